"""The records of runs: which fit goes on with a run, and which is another run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from unstarted_fits import BY_STEPS, make, recipe

from spark_elastic.errors import DamagedError
from spark_elastic.estimator import Store, TorchEstimator, runs
from spark_elastic.estimator.description import describe
from spark_elastic.estimator.runs import VERSION, RunRecord, check_run, describe_params, read_record
from spark_elastic.estimator.schedules import wants_epochs


def test_a_run_is_told_apart_by_its_data_and_its_training_params_but_not_by_weights() -> None:
    one, same = describe_params(make()), describe_params(make(model=torch.nn.Linear(1, 1), epochs=9, verbose=0))
    assert one == same
    other = describe_params(make(batchSize=7, optimizer=torch.optim.SGD, optimizerParams={"lr": 1.0}))
    found = RunRecord("run", "data", one).differences(RunRecord("run", "other", other))
    assert found[0] == "the data"
    assert {entry.split(" ")[0] for entry in found[1:]} == {"batchSize", "optimizer", "optimizerParams"}
    assert describe(lambda x: x) == describe(lambda x: x)
    assert describe(lambda x: x + 2) != describe(lambda x: x + 1)


def test_the_records_of_all_releases_are_read_and_one_of_another_version_is_another_run() -> None:
    present = RunRecord("run", "data", version=VERSION)
    assert read_record(json.dumps(asdict(present)).encode(), "run.json") == present
    first = read_record(b'{"run_id": "run", "data": "data", "params": {}, "data_url": null}', "run.json")
    assert first.differences(present) == ["its record (of version 1, this release writes 2)"]
    later = read_record(b'{"run_id": "run", "data": "data", "version": 3, "seed": 1}', "run.json")
    assert later.differences(present) == ["its record (of version 3, this release writes 2)"]


@pytest.mark.parametrize("content", [b"", b'{"run_id": "ru', b"[]", b'{"run_id": "run"}', b"\xff"])
def test_what_is_no_record_of_a_run_is_told_with_its_place(content: bytes) -> None:
    with pytest.raises(DamagedError, match=r"runs/run/run\.json is damaged"):
        read_record(content, "/store/runs/run/run.json")


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


def test_a_runs_record_names_what_has_changed_in_a_loss() -> None:
    def record(delta: float) -> RunRecord:
        estimator = TorchEstimator(model=nn.Linear(1, 1), loss=nn.HuberLoss(delta=delta), labelCols=["y"])
        return RunRecord("run", "data", json.loads(json.dumps(describe_params(estimator))))

    assert record(1.0).differences(record(2.0)) == ["loss.delta (was 1.0, is 2.0)"]
    assert record(float("nan")).differences(record(float("nan"))) == []


def test_output_columns_count_where_they_may_tell_outputs_apart() -> None:
    def described(*labels: str) -> list[Any]:
        return [
            describe_params(TorchEstimator(labelCols=list(labels), outputCols=outputs))
            for outputs in (["p", "q"], ["q", "p"])
        ]

    one, other = described("a", "b")
    assert one != other
    one, other = described("a")
    assert one == other
