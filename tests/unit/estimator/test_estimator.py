"""What a fit prints of its epochs, what it logs, and how it calls ``run``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unstarted_fits import data_of, make

from spark_elastic.estimator import Store, slots
from spark_elastic.estimator.estimator import TorchEstimator, _printer, _tell_batch
from spark_elastic.estimator.plan import Trained
from spark_elastic.estimator.planning import Sizes, plan_recipe
from spark_elastic.estimator.runs import RunRecord
from spark_elastic.protocol.event_format import as_event
from spark_elastic.protocol.records import Entry, JobFailed, WorldSized


def test_a_fit_prints_its_epochs_and_a_loss_that_is_reported_within_one(capsys: pytest.CaptureFixture[str]) -> None:
    show = _printer("fit-1")
    show({"event": "metrics", "values": {"epoch": 0, "loss": 0.25, "rows": 1200}})
    show({"event": "metrics", "values": {"epoch": 1, "loss": float("nan")}})
    show(as_event(Entry(0.0, JobFailed("ValueError", "no more"))))
    show(as_event(Entry(0.0, WorldSized(1, False, [2, 1], [1900.0, 2600.0]))))
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, second) == ("fit-1 epoch 0: loss 0.25, 1,200 rows", "fit-1 epoch 1: loss nan")
    assert third.startswith(
        "fit-1: 1 of 2 workers train from here on, because more are not faster: 2 trained 1,900 rows/s"
    )


@pytest.mark.parametrize(("width", "outputs"), [(2, ["prediction"]), (None, ["a_prediction", "b_prediction"])])
def test_output_columns_are_by_default_one_for_each_output(width: int | None, outputs: list[str]) -> None:
    """One output that answers to two labels got two names, and the fit ended with an error about names that nobody gave."""

    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x).unbind(1)  # type: ignore[return-value]

    net = Two(2, 2) if width is None else torch.nn.Linear(2, width)
    estimator = TorchEstimator(model=net, loss=torch.nn.MSELoss(), featureCols=["x"], labelCols=["a", "b"])
    recipe = plan_recipe(estimator, estimator._layout_of_names(), None)
    model = estimator._untrained(recipe, {"x": torch.ones(3, 2), "a": torch.ones(3), "b": torch.ones(3)})
    assert model.value("outputCols") == outputs
    model._check({})


@pytest.mark.parametrize(
    ("params", "adapts"),
    [
        ({"globalBatchSize": 64}, True),
        ({"globalBatchSize": 64, "deterministic": True}, True),
        ({"globalBatchSize": 64, "adaptiveNp": False}, False),
        ({"globalBatchSize": 64, "zeroRedundancy": True}, False),
        ({"batchSize": 64}, False),
    ],
)
def test_fewer_workers_may_train_where_steps_do_not_depend_on_their_number_unless_the_param_says_no(
    params: dict[str, Any], adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_on_cores(make(verbose=0, **params), 4, tmp_path, monkeypatch)["adaptive_np"] is adapts


def run_on_cores(
    estimator: TorchEstimator, cores: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> dict[str, Any]:
    """Return how an estimator calls ``run`` for up to four workers on a cluster of so many cores."""
    given: dict[str, Any] = {}

    def run(*_: Any, **settings: Any) -> list[Any]:
        given.update(settings)
        return [Trained({}, {}, [])]

    monkeypatch.setattr("spark_elastic.run", run)
    context = SimpleNamespace(master="yarn", defaultParallelism=cores)
    session: Any = SimpleNamespace(conf=settings, sparkContext=context)
    plan: Any = SimpleNamespace(run_id="run", data=data_of(estimator))
    estimator._run(session, plan, Sizes(1, 4, 4), Store.create(folder))
    return given


@pytest.mark.parametrize(
    ("settings", "params"),
    [({"spark.task.cpus": "2"}, {}), ({}, {"resourceProfile": {"cpus": 2}})],
    ids=["of the session", "of the Param"],
)
def test_fits_side_by_side_share_the_tasks_that_there_is_room_for_and_not_the_cores(
    settings: dict[str, str], params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in cores, a second fit was granted tasks that the first one held, and its start timed out."""
    with slots.ledger.slots(3, 3, 4):
        estimator = make(verbose=0, **params)
        assert run_on_cores(estimator, 8, tmp_path, monkeypatch, **settings)["max_np"] == 1


def test_the_log_tells_what_was_picked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "spark_elastic"):
        _tell_batch(RunRecord("nightly", "data").with_batch({"globalBatchSize": 256}), 65_500, 20, Sizes(1, 4, 4))
    assert caplog.messages == [
        "nightly: globalBatchSize=256 for 65,500 rows of 20 numbers, with at most 4 workers; set globalBatchSize or "
        "batchSize, and maxNp, to choose otherwise"
    ]
