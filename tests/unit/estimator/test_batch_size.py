"""The batch size of a fit whose Params give none: what is picked, what it goes together with, and that a run keeps it."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql.types import DoubleType, StructField, StructType

from spark_elastic.estimator import Store, TorchEstimator, runs, slots
from spark_elastic.estimator.batch_size import (
    LEAST_ROWS,
    LEAST_SHARE,
    MOST_NUMBERS,
    enough_workers,
    pick_batch_size,
    width_of,
)
from spark_elastic.estimator.estimator import _tell_batch
from spark_elastic.estimator.plan import DataPlan, Trained
from spark_elastic.estimator.planning import (
    Sizes,
    first_rows,
    given_batch,
    plan_data,
    plan_recipe,
    plan_shards,
    settle_batch,
)
from spark_elastic.estimator.recipe import Recipe
from spark_elastic.estimator.runs import RunRecord, check_run, describe_params, read_record
from spark_elastic.estimator.schedules import wants_epochs

SCHEMA = StructType([StructField("x", DoubleType()), StructField("y", DoubleType())])
BY_STEPS = {
    "scheduler": torch.optim.lr_scheduler.OneCycleLR,
    "schedulerParams": {"max_lr": 1.0},
    "schedulerInterval": "step",
}


def make(**params: Any) -> TorchEstimator:
    given = {"model": torch.nn.Linear(1, 1), "loss": torch.nn.MSELoss(), "featureCols": ["x"], "labelCols": ["y"]}
    return TorchEstimator(**{**given, **params})


def recipe(estimator: TorchEstimator) -> Recipe:
    return plan_recipe(estimator, estimator._layout(SCHEMA), None)


def data_of(estimator: TorchEstimator) -> DataPlan:
    return plan_data(estimator, ("train", None), {}, False)


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        (1, 32),
        (1_000, 32),
        (10_000, 128),
        (65_500, 256),
        (100_000, 256),
        (1_000_000, 1024),
        (10**7, 4096),
        (10**9, 4096),
    ],
)
def test_it_is_about_the_square_root_of_the_rows(rows: int, picked: int) -> None:
    assert pick_batch_size(rows, 20) == picked


def test_an_epoch_has_about_as_many_steps_as_a_step_has_rows_or_more() -> None:
    for rows in range(2 * LEAST_ROWS**2, 10**6, 997):
        picked = pick_batch_size(rows, 1)
        assert math.log2(picked).is_integer()
        assert rows / picked >= picked / 2


@pytest.mark.parametrize(("width", "picked"), [(500, 1024), (3 * 224**2, 64), (MOST_NUMBERS, LEAST_ROWS), (0, 1024)])
def test_wide_rows_get_smaller_batches(width: int, picked: int) -> None:
    assert pick_batch_size(1_000_000, width) == picked


def test_it_depends_on_the_data_alone_and_has_room_for_all_shards() -> None:
    assert list(inspect.signature(pick_batch_size).parameters) == ["rows", "width", "shards"]
    assert pick_batch_size(1_000, 1, 48) == 48
    assert pick_batch_size(100_000, 1, 48) == 256


def test_the_width_of_a_row_is_counted_in_numbers_of_all_columns() -> None:
    lists = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(6), torch.zeros(3)], layout=torch.jagged)
    assert width_of({"x": torch.zeros(3, 5), "y": torch.zeros(3, dtype=torch.int64), "lists": lists}) == 5 + 1 + 4


def test_the_rows_are_those_that_the_loader_finds(tmp_path: Path) -> None:
    values = np.zeros(1_000)
    pq.write_table(pa.table({"x": values, "y": values}), tmp_path / "part.parquet", row_group_size=300)
    estimator = make()
    data = plan_data(estimator, (tmp_path.as_uri(), None), {}, False)
    sample, rows = first_rows(estimator._layout(SCHEMA), data)
    assert (rows, width_of(sample)) == (1_000, 2)


def test_what_needs_a_global_batch_works_without_a_batch_size_and_not_with_that_of_workers() -> None:
    for params, error in (
        ({"balance": "auto"}, 'balance="auto" needs globalBatchSize'),
        ({"deterministic": True}, "deterministic=True needs globalBatchSize: with batchSize=8"),
        (BY_STEPS, "OneCycleLR has to know the steps of an epoch"),
    ):
        recipe(make(**params))
        with pytest.raises(ValueError, match=error):
            recipe(make(**params, batchSize=8))
    assert plan_shards(make(deterministic=True)) == 24
    assert plan_shards(make(deterministic=True, shards=48, maxNp=40)) == 48
    with pytest.raises(ValueError, match="shards=24 must be at least maxNp=25: a worker computes whole shards"):
        plan_shards(make(deterministic=True, maxNp=25))


def test_a_batch_size_that_is_given_counts() -> None:
    assert given_batch(make()) == {}
    assert given_batch(make(batchSize=8)) == {"batchSize": 8}
    assert given_batch(make(globalBatchSize=8)) == {"globalBatchSize": 8}
    earlier = make(globalBatchSize=8)
    earlier._setDefault(batchSize=32)  # as an estimator has it that an earlier release saved
    assert given_batch(earlier) == {"globalBatchSize": 8}
    assert given_batch(earlier.clear(earlier.globalBatchSize) or earlier) == {"batchSize": 32}


def test_the_loader_gets_the_picked_size_and_validation_follows_it() -> None:
    estimator = make()
    data, _ = settle_batch(estimator, data_of(estimator), Sizes(1, 2, 2), {"globalBatchSize": 128})
    assert (data.training["batch_size"], data.training["global_batch_size"]) == (None, 128)
    assert data.validation_batch_size is None
    data, _ = settle_batch(estimator, data_of(estimator), Sizes(1, 2, 2), {"batchSize": 32})
    assert (data.training["batch_size"], data.training["global_batch_size"]) == (32, None)
    assert data.validation_batch_size == 32
    validating = make(valBatchSize=9)
    assert (
        settle_batch(validating, data_of(validating), Sizes(1, 2, 2), {"batchSize": 32})[0].validation_batch_size == 9
    )


def test_workers_are_at_most_so_many_that_each_has_a_share_unless_params_ask_for_more() -> None:
    assert enough_workers(4 * LEAST_SHARE) == 4
    assert enough_workers(1) == 1
    slots, batch = Sizes(1, 20, 20), {"globalBatchSize": 64}

    def sizes(**params: Any) -> Sizes:
        return settle_batch(make(**params), data_of(make()), slots, batch)[1]

    assert sizes() == Sizes(1, 8, 8)
    assert sizes(numProc=12) == Sizes(1, 12, 12)
    assert sizes(minNp=9).most == 9
    assert sizes(maxNp=20) == slots
    assert settle_batch(make(), data_of(make()), Sizes(1, 2, 4), batch)[1] == Sizes(1, 2, 4)
    assert settle_batch(make(), data_of(make()), slots, {"batchSize": 32})[1] == slots


@pytest.mark.parametrize("batch", [{"globalBatchSize": 512}, {"batchSize": 32}])
def test_a_run_keeps_the_batch_size_with_which_it_began(batch: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that this release would not pick, such as the default of an earlier one."""
    began = RunRecord("run", "data", describe_params(make())).with_batch(batch)
    monkeypatch.setattr(runs, "find_run", lambda *_: began)
    store, again = Store.create("/x"), RunRecord("run", "data", describe_params(make(maxNp=7)))
    assert again.batch == {}
    assert check_run(store, again) is began
    assert again.with_batch(began.batch) == began
    assert check_run(store, replace(again, params=describe_params(make(**batch)))) is began
    with pytest.raises(ValueError, match=r"another run .* differs in .*atchSize \(was .*, is "):
        check_run(store, replace(again, params=describe_params(make(globalBatchSize=100))))


def test_the_epochs_of_a_scheduler_that_spans_the_fit_belong_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint brought back the old number of steps, after which it raised in the workers."""

    def run_of(epochs: int) -> RunRecord:
        estimator = make(**BY_STEPS, epochs=epochs, globalBatchSize=64)
        return RunRecord("run", "data", describe_params(estimator, wants_epochs(recipe(estimator).steps)))

    store, began = Store.create("/x"), run_of(2)
    monkeypatch.setattr(runs, "find_run", lambda *_: began)
    assert check_run(store, run_of(2)) is began
    with pytest.raises(ValueError, match=r"another run .* differs in epochs \(was 2, is 4\)"):
        check_run(store, run_of(4))
    fixed = {**BY_STEPS, "schedulerParams": {"max_lr": 1.0, "epochs": 9}}
    assert not wants_epochs(recipe(make(**fixed, epochs=2, globalBatchSize=64)).steps)
    old = replace(began, params={name: value for name, value in began.params.items() if name != "epochs"})
    monkeypatch.setattr(runs, "find_run", lambda *_: old)
    assert check_run(store, run_of(4)) is old


def test_another_kind_of_estimator_is_another_run_and_records_without_a_kind_fit_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = describe_params(make())
    monkeypatch.setattr(runs, "find_run", lambda *_: RunRecord("run", "data", {**mine, "estimator": "TorchClassifier"}))
    store, again = Store.create("/x"), RunRecord("run", "data", mine)
    with pytest.raises(ValueError, match=r"differs in estimator \(was TorchClassifier, is Torch"):
        check_run(store, again)
    old = {name: value for name, value in mine.items() if name != "estimator"}
    monkeypatch.setattr(runs, "find_run", lambda *_: RunRecord("run", "data", old))
    assert check_run(store, again) is not None


def test_two_fits_that_begin_a_run_at_the_same_time_are_told_apart() -> None:
    written: dict[str, bytes] = {}
    files = SimpleNamespace(exists=written.__contains__, read=written.__getitem__, write=written.__setitem__)
    store: Any = SimpleNamespace(files=files, url="/x", spark_url=str, run_url=str)
    first, second = (RunRecord("run", "data", describe_params(make(learningRate=rate))) for rate in (0.1, 0.2))
    runs.record_run(store, first)
    with pytest.raises(ValueError, match="differs in learningRate"):
        runs.record_run(store, second)
    runs.record_run(store, first)


def test_a_run_of_an_earlier_release_with_a_global_batch_is_the_same_run() -> None:
    """Its record has the default of the other Param, too."""
    params = describe_params(make(globalBatchSize=64))
    written = json.dumps(asdict(RunRecord("run", "data", {**params, "batchSize": 32}, version=2))).encode()
    known = read_record(written, "run.json")
    assert known.differences(RunRecord("run", "data", params, version=2)) == []
    assert known.batch == {"globalBatchSize": 64}
    saved = make(globalBatchSize=64)
    saved._setDefault(batchSize=32)
    assert describe_params(saved) == params


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


def test_a_balance_is_refused_for_a_run_that_goes_on_with_the_batch_size_of_workers() -> None:
    estimator = make(balance="auto")
    with pytest.raises(ValueError, match=r'balance="auto" needs globalBatchSize, .* with batchSize=32'):
        settle_batch(estimator, data_of(estimator), Sizes(1, 1, 1), {"batchSize": 32})


def test_the_log_tells_what_was_picked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "spark_elastic"):
        _tell_batch(RunRecord("nightly", "data").with_batch({"globalBatchSize": 256}), 65_500, 20, Sizes(1, 4, 4))
    assert caplog.messages == [
        "nightly: globalBatchSize=256 for 65,500 rows of 20 numbers, with at most 4 workers; set globalBatchSize or "
        "batchSize, and maxNp, to choose otherwise"
    ]
