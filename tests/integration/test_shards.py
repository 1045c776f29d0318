"""Jobs that train on shards: the same bits whether one worker trains or several, undisturbed or with kills and joins."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_training
import torch
import torchmetrics
from other_processes import wait_until
from torch import nn

import spark_elastic
from spark_elastic import NotFiniteLossError, RanksDifferError, TrainingFailedError
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.estimator.runs import describe_callbacks
from spark_elastic.estimator.training import train
from spark_elastic.protocol.records import WorkerReported
from spark_elastic.protocol.reports import CheckpointWritten
from spark_elastic.testing import kill
from spark_elastic.timeline.event_log import read_events

cloudpickle.register_pickle_by_value(shard_training)

STEPS = 16


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """234 rows of 16 numbers and a class, in row groups of odd sizes."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((234, 16)).astype(np.float32)
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 16), "y": pa.array(rng.integers(0, 3, 234))}
    )
    pq.write_table(table, folder / "part-0.parquet", row_group_size=31)
    return folder.as_uri()


def alone(run: Any, url: str | None) -> str:
    result = run(shard_training.train_on_shards, STEPS, url, num_proc=1, min_np=1, max_np=1)
    assert len(set(result.results[0]["losses"])) == STEPS
    return str(result.results[0]["digest"])


def test_three_workers_with_kills_and_joins_leave_the_bits_of_one(run: Any, rows: str) -> None:
    # Planned resets make commits of their own, which count as steps here.
    faults = [kill(rank=1, step=3), kill(rank=0, step=7), kill(rank=2, step=14)]
    result = run(
        shard_training.train_on_shards, STEPS, rows, {5: 3, 9: 3}, faults=faults, num_proc=3, min_np=1, max_np=3
    )
    assert result.faults == len(faults)
    assert {2, 3} <= set(result.sizes)
    assert {each["digest"] for each in result.results} == {alone(run, rows)}


def test_a_divided_optimizer_leaves_the_bits_of_one_worker_on_executors_through_kills_and_joins(
    run: Any, run_on_spark: Any, tmp_path: Path
) -> None:
    kills, full = {4: 1, 9: 2}, {2: 3, 7: 3, 12: 3}
    (tmp_path / "killed").mkdir()
    result = run_on_spark(
        shard_training.train_on_shards, STEPS, None, full, kills, str(tmp_path / "killed"), True, num_proc=3, min_np=2,
        max_np=3,
    )  # fmt: skip
    assert len(list((tmp_path / "killed").iterdir())) == len(kills)
    assert {2, 3} <= set(result.sizes)
    assert {each["digest"] for each in result.results} == {alone(run, None)}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_kills_in_mid_step_and_ten_joins_on_executors_leave_the_bits_of_one_worker(
    run: Any, run_on_spark: Any, rows: str, tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    kills = {4 * number + 1: drawn.randrange(3) for number in range(10)}
    full = dict.fromkeys((step + 2 for step in kills), 3)
    steps = 42
    result = run_on_spark(
        shard_training.train_on_shards, steps, rows, full, kills, str(tmp_path), num_proc=3, min_np=1, max_np=3
    )
    assert len(list(tmp_path.iterdir())) == 10
    assert result.sizes.count(3) > 10
    quiet = run(shard_training.train_on_shards, steps, rows, num_proc=1, min_np=1, max_np=1)
    assert {each["digest"] for each in result.results} == {each["digest"] for each in quiet.results}


def test_a_job_goes_on_from_a_durable_checkpoint_in_a_world_of_another_size(run: Any, tmp_path: Path) -> None:
    for steps, size in ((9, 2), (STEPS, 3)):
        result = run(
            shard_training.train_on_shards, steps, checkpoint=tmp_path.as_uri(), checkpoint_interval=0, num_proc=size,
            min_np=size, max_np=size,
        )  # fmt: skip
    assert {each["digest"] for each in result.results} == {alone(run, None)}


def test_a_job_whose_driver_died_leaves_the_bits_of_one_that_nothing_happened_to(
    run: Any, script: Any, tmp_path: Path
) -> None:
    first, log = script("local[2]", "on shards"), tmp_path / "on shards" / "log"

    def has_what_is_needed() -> bool:
        """Both faults, and a checkpoint of the time after the first."""
        if not log.exists() or log.read_text().count("fault_injected") < 2:
            return False
        told = [entry.record.report for entry in read_events(log) if isinstance(entry.record, WorkerReported)]
        return any(isinstance(report, CheckpointWritten) and report.step >= 4 for report in told)

    wait_until(has_what_is_needed, "two faults and a checkpoint", first)
    first.kill()
    saved = tmp_path / "on shards" / "saved"
    result = run(shard_training.train_on_shards, STEPS, checkpoint=saved, num_proc=3, min_np=3, max_np=3)
    assert 4 <= result.of("checkpoint_restored")[0]["values"]["step"] < STEPS
    assert {each["digest"] for each in result.results} == {alone(run, None)}


def count_threads() -> int:
    shard_training.small_state()
    return torch.get_num_threads()


def test_workers_compute_with_one_thread_however_many_cores_their_slots_have_and_with_as_many_as_env_says() -> None:
    for size in (1, 2):
        assert spark_elastic.run(count_threads, num_proc=size, max_np=size, local=True) == [1] * size
    assert spark_elastic.run(count_threads, num_proc=1, max_np=1, local=True, env={"OMP_NUM_THREADS": "2"}) == [2]


def train_beside_parts(with_module: bool) -> None:
    import spark_elastic as se

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            (state.model.module if with_module else state.model)(batch[0]).sum().backward()
            state.optimizer.step()
            state.commit()

    train(shard_training.small_state())


@pytest.mark.parametrize("with_module", [False, True], ids=["forward", "backward"])
def test_training_beside_the_loop_ends_the_job_with_the_lines_to_write(run: Any, with_module: bool) -> None:
    with pytest.raises(TrainingFailedError, match=r"for part in state\.model\.parts"):
        run(train_beside_parts, with_module, num_proc=1, min_np=1, max_np=1)


def train_with_threads(folder: str) -> int:
    """The first worker to come has one thread, the second two, all others three: nobody is like any rank 0."""
    import os

    import torch

    import spark_elastic as se

    threads = 3
    for number in (1, 2):
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_EXCL))
            threads = number
            break
        except FileExistsError:
            pass
    torch.set_num_threads(threads)

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            for part in state.model.parts(batch):
                state.model(part).sum().backward()
            state.optimizer.step()
            state.commit()

    train(shard_training.small_state())
    return torch.get_num_threads()


def test_workers_with_other_kernels_end_the_job_with_both_named(run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"threads was \d and is \d here"):
        run(train_with_threads, str(tmp_path), num_proc=2, min_np=2, max_np=2)


def planned(url: str, **steps: Any) -> TrainingPlan:
    """Plan as an estimator does."""
    torch.manual_seed(0)
    metrics = {"accuracy": torchmetrics.Accuracy("multiclass", num_classes=3), "spread": spread}
    return TrainingPlan(
        run_id="run",
        model=nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)),
        layout=Layout((Input(None, ("x",)),), ("y",), None),
        objective=Objective((nn.CrossEntropyLoss(),), (), metrics),
        data=DataPlan(
            training_url=url, validation_url=url, batch_size=None, global_batch_size=40, validation_batch_size=None,
            shuffle=True, seed=1, shards=8,
        ),
        steps=StepPlan(
            optimizer=torch.optim.Adam, optimizer_arguments={"lr": 0.01}, clip_norm=0.5, passes=2,
            scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau, **steps,
        ),
        epochs=3, steps_per_epoch=None, checkpoint_steps=None, seed=1, callbacks=cloudpickle.dumps([]),
        callbacks_given=describe_callbacks([]), log_url=None, use_gpu=None,
    )  # fmt: skip


def fit(run: Any, url: str, size: int, faults: Any = None, **steps: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train as an estimator does; return the weights, and the history without times and sizes."""
    plan = planned(url, **steps)
    results = run(train, plan, faults=faults, num_proc=size, min_np=1, max_np=size).results
    found = next(each for each in results if each is not None)
    return found.weights, [
        {name: value for name, value in epoch.items() if name not in ("seconds", "sizes")} for epoch in found.history
    ]


def spread(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output.std()


def test_a_deterministic_fit_has_the_same_weights_and_history_with_any_number_of_workers(run: Any, rows: str) -> None:
    weights, history = fit(run, rows, 1)
    others, other_history = fit(run, rows, 3, [kill(rank=1, step=4)])
    assert len({epoch["val_loss"] for epoch in history}) == 3
    assert history == other_history
    assert {name for name, value in weights.items() if not torch.equal(value, others[name])} == set()


def test_a_fit_with_a_divided_optimizer_has_the_weights_of_one_without(run: Any, rows: str) -> None:
    weights, history = fit(run, rows, 1)
    others, other_history = fit(run, rows, 3, [kill(rank=1, step=4)], zero_redundancy=True)
    assert history == other_history
    assert {name for name, value in weights.items() if not torch.equal(value, others[name])} == set()


@pytest.mark.parametrize(("steps", "name"), [(None, "loss"), (1, "val_loss")])
def test_a_fit_with_a_divided_optimizer_tells_of_a_loss_that_is_nan_between_two_commits(
    steps: int | None, name: str, run: Any, rows: str, tmp_path: Path
) -> None:
    plan = planned(rows, zero_redundancy=True)
    diverging = replace(plan.steps, optimizer_arguments={"lr": 1e30})
    plan = replace(
        plan,
        model=nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3)),
        steps=diverging,
        commit_steps=100,
        steps_per_epoch=steps,
    )
    with pytest.raises(NotFiniteLossError, match=f"epoch 0, step 1: {name} is ") as raised:
        run(train, plan, num_proc=3, min_np=3, max_np=3, checkpoint=tmp_path.as_uri())
    assert [failure.rank for failure in raised.value.failures] == [0]


def validate_in_training_mode(what: str) -> None:
    import spark_elastic as se

    model = se.DistributedDataParallel(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = se.data.ElasticDataLoader(torch.ones(8, 2), global_batch_size=8, shards=2)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, teacher=nn.BatchNorm1d(1))
    called = model.module[1] if what == "the module" else state.teacher

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            state.optimizer.zero_grad()
            with torch.no_grad():
                called(torch.full((2, 1), float(se.rank())))
            for part in state.model.parts(batch):
                state.model(part).sum().backward()
            state.optimizer.step()
            state.commit()

    train(state)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (
            "the module",
            TrainingFailedError,
            "the models' buffers were not the same on all ranks when the loop .* began",
        ),
        (
            "a teacher",
            RanksDifferError,
            r"the buffer state\.teacher\.running_mean has not been the same .* call its eval\(\)",
        ),
    ],
)
def test_statistics_that_follow_a_ranks_own_rows_end_the_job(
    run: Any, what: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        run(validate_in_training_mode, what, num_proc=2, min_np=2, max_np=2)
