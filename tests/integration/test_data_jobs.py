"""Every row counts exactly once an epoch, shown by the model itself, through losses at every kind of place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import training
from data_jobs import EPOCHS, ROWS, STEPS, check

from spark_elastic import TrainingFailedError
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.estimator.runs import describe_callbacks
from spark_elastic.estimator.training import train
from spark_elastic.protocol.event_format import read_event
from spark_elastic.testing import Fault, Point, drain, kill
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.resets import Kind

cloudpickle.register_pickle_by_value(networks)


@pytest.mark.parametrize(
    "faults",
    [
        [kill(rank=1, step=5), kill(rank=0, step=9, at=Point.RECORDED)],
        [kill(rank=1, step=STEPS - 1), kill(rank=0, step=STEPS)],
        [kill(rank=1, step=2 * STEPS), kill(rank=0, at=Point.RETURN)],
    ],
    ids=["in mid-epoch", "at the epoch's end", "during the last commit and after one rank has left"],
)
def test_the_training_function_of_the_documentation_counts_every_row_once(
    run: Any, dataset: str, faults: list[Fault]
) -> None:
    result = run(
        training.count_rows, dataset, ROWS, EPOCHS, {"global_batch_size": 64}, faults=faults,
        min_np=1, max_np=3, num_proc=3,
    )  # fmt: skip
    check(result)
    assert result.faults == len(faults)


def test_rows_count_once_where_the_state_holds_nothing_but_plain_objects(run: Any, dataset: str) -> None:
    result = run(training.see_rows, dataset, faults=[kill(rank=1, step=5)], min_np=1, num_proc=2, max_np=2)
    assert result.faults == 1
    assert result.results[0] == [*range(1000)]


def test_a_batch_size_per_worker_counts_every_row_once_through_a_loss_and_a_return(run: Any, dataset: str) -> None:
    faults = [kill(rank=2, step=4), kill(rank=0, step=20)]
    result = run(
        training.count_rows, dataset, ROWS, 4, {"batch_size": 7}, faults=faults, min_np=1, max_np=3, num_proc=3
    )
    check(result, 4)
    assert result.faults == 2


def test_rows_count_once_when_a_worker_is_drained_and_its_slot_comes_back(run: Any, dataset: str) -> None:
    result = run(
        training.count_rows, dataset, ROWS, EPOCHS, {"global_batch_size": 64}, faults=[drain(rank=0, step=7)],
        min_np=2, max_np=3, num_proc=3,
    )  # fmt: skip
    check(result)
    assert (result.faults, len(result.of("host_draining"))) == (1, 1)
    assert result.of("worker_lost") == [], "a drained worker leaves, it is not lost"
    assert result.sizes[:2] == [3, 2]


def test_rows_move_away_from_a_slow_rank_and_count_once_through_a_loss_and_a_join(run: Any, dataset: str) -> None:
    result = run(training.count_rows_beside_a_slow_rank, dataset, ROWS, EPOCHS, min_np=2, max_np=3, num_proc=3)
    assert result.sizes[0] == result.sizes[-1] == 3
    assert len(result.of("worker_lost")) == 1
    changes = result.of("shares_changed")
    assert {event["rank"] for event in changes} == {0}
    for found in result.results:
        assert found["seen"] == pytest.approx([found["epochs"]] * ROWS)
        for _, shares, slow in found["shares"]:
            assert sum(shares) == 30
            assert shares[slow] == min(shares)


def test_rows_of_a_fit_move_away_from_a_slow_rank_and_count_once(run: Any, dataset: str) -> None:
    epochs = 4
    plan = TrainingPlan(
        run_id="run", model=networks.RowCounter(ROWS), layout=Layout((Input(None, ("id",)),), (), None),
        objective=Objective((), (), {}),
        data=DataPlan(
            training_url=dataset, validation_url=None, batch_size=None, global_batch_size=30, validation_batch_size=None,
            shuffle=True, seed=1, balance="auto",
        ),
        steps=StepPlan(
            optimizer=torch.optim.SGD, optimizer_arguments={"lr": 1.0}, train_step=networks.count_row_beside_a_slow_rank
        ),
        epochs=epochs, steps_per_epoch=None, checkpoint_steps=None, seed=1, callbacks=cloudpickle.dumps([]),
        callbacks_given=describe_callbacks([]), log_url=None, use_gpu=None,
    )  # fmt: skip
    result = run(train, plan, num_proc=3, min_np=3, max_np=3)
    found = next(each for each in result.results if each is not None)
    assert found.weights["seen"].tolist() == pytest.approx([epochs] * ROWS)
    # 134 steps, of which the slow rank needs 30 ms for an even share, are long enough to be timed.
    first = result.of("shares_changed")[0]["values"]
    assert first["before"] == [10, 10, 10]
    assert first["after"][1] == min(first["after"])
    assert sum(first["after"]) == 30


def test_a_fit_goes_on_with_fewer_workers_where_they_are_faster_and_its_history_tells_it(
    run: Any, dataset: str
) -> None:
    plan = TrainingPlan(
        run_id="run", model=networks.RowCounter(ROWS), layout=Layout((Input(None, ("id",)),), (), None),
        objective=Objective((), (), {}),
        data=DataPlan(training_url=dataset, validation_url=None, global_batch_size=25, shuffle=True, seed=1),
        steps=StepPlan(optimizer=torch.optim.SGD, optimizer_arguments={"lr": 25.0}, train_step=networks.mean_of_rows),
        epochs=1000, steps_per_epoch=None, checkpoint_steps=None, seed=1,
        callbacks=cloudpickle.dumps([networks.SlowExchange()]), callbacks_given="", log_url=None, use_gpu=None,
    )  # fmt: skip
    result = run(train, plan, num_proc=2, min_np=1, max_np=2, adaptive_np=True)
    (trained,) = result.results
    assert result.sizes == [2, 1]
    assert trained.history[-1]["sizes"][-1] == 1
    assert {size for entry in trained.history for size in entry["sizes"]} == {1, 2}
    assert trained.weights["seen"].tolist() == pytest.approx([len(trained.history)] * ROWS)
    history = read_history([read_event(event) for event in result.events])
    assert "1 of 2 workers train from here on" in history.sized[-1].describe()


def test_a_hopeless_rank_is_replaced_where_the_user_says_so_and_no_step_is_lost(run: Any) -> None:
    result = run(
        training.count_rows_beside_a_hopeless_rank, 120, 0, True, num_proc=3, min_np=2, max_np=3, replace_slow=0.3
    )
    (slow,) = result.of("worker_too_slow")
    assert (slow["worker"], slow["rank"], slow["seconds"]) == (1, 1, 60.0)
    assert slow["times"] > 1 / 0.3
    assert result.sizes[:2] == [3, 2]
    assert result.sizes[-1] == 3
    assert result.of("world_broken") == result.of("worker_lost") == []
    history = read_history([read_event(event) for event in result.events])
    assert [reset.steps_lost for reset in history.resets] == [0] * len(history.resets)
    assert history.resets[0].kind is Kind.DRAIN
    assert slow["host"] in history.too_slow[0].describe()
    for each in result.results:
        assert each["seen"] == pytest.approx([each["epochs"]] * 120)


def test_without_the_setting_a_hopeless_rank_is_named_and_stays(run: Any) -> None:
    # With the setting it would leave after three measurements, of 8 steps each.
    result = run(training.count_rows_beside_a_hopeless_rank, 120, 80, False, num_proc=3, min_np=2, max_np=3)
    assert result.sizes == [3]
    assert result.of("worker_too_slow") == result.of("host_draining") == []
    (slow,) = result.of("worker_slow")
    assert (slow["worker"], slow["rank"]) == (1, 1)
    history = read_history([read_event(event) for event in result.events])
    assert f"on {slow['host']} was slow" in str(history.slow[0])


@pytest.mark.parametrize(
    ("a_row", "a_rank", "in_any_case", "sizes"),
    [(0.001, 0.08, 0.0, [4, 2, 1]), (0.03, 0.0, 0.09, [4, 2, 4])],
    ids=["more are slower", "more are faster"],
)
def test_as_many_workers_train_as_are_fastest_and_no_step_is_lost(
    run: Any, a_row: float, a_rank: float, in_any_case: float, sizes: list[int]
) -> None:
    result = run(
        training.count_rows_at_any_size, 120, a_row, a_rank, in_any_case, sizes[-1], num_proc=4, min_np=1, max_np=4,
        adaptive_np=True,
    )  # fmt: skip
    assert result.sizes == sizes
    told = result.of("world_sized")
    assert [event["size"] for event in told[:2]] == sizes[1:]
    assert result.of("world_broken") == result.of("worker_lost") == []
    history = read_history([read_event(event) for event in result.events])
    assert [reset.steps_lost for reset in history.resets] == [0, 0]
    assert len(result.results) == sizes[-1]
    for each in result.results:
        assert each["sizes"] == sizes
        assert each["seen"] == pytest.approx([each["epochs"]] * 120)


def test_every_row_counts_once_over_randomized_schedules_of_kills_drains_and_joins() -> None:
    # `make schedules` runs more of them.
    script = Path(__file__).parents[1] / "support" / "row_schedules.py"
    done = subprocess.run([sys.executable, script, "--jobs", "3", "--cases", "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "18 schedules" in done.stdout
    assert done.stdout.rstrip().endswith("every row once")


@pytest.mark.parametrize("change", ["truncated", "replaced", "deleted", "given another schema"])
def test_a_file_that_changes_while_training_ends_the_job_with_its_name(run: Any, tmp_path: Path, change: str) -> None:
    for number in range(12):
        table = pa.table({"id": pa.array(range(number * 100, number * 100 + 100), pa.int64())})
        pq.write_table(table, tmp_path / f"part-{number:02}.parquet")
    with pytest.raises(TrainingFailedError, match=rf"DataError: {tmp_path}/part-\d\d\.parquet") as failure:
        run(training.train_on_files_that_change, str(tmp_path), change, min_np=2, max_np=2)
    assert failure.value.failures
