"""Training lives through the loss of workers, tasks and executors, at every named point of the protocol."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import STEPS, check
from training import count_rows, count_steps, evaluate_everywhere, train_with_what_newcomers_cannot_load

from spark_elastic import TrainingFailedError
from spark_elastic.driver.admission import FREE_FAILURES
from spark_elastic.testing import Point, exit_with, hang, kill, kill_executor, kill_task, raise_error, segfault, stop


def test_killed_workers_cost_no_committed_step_wherever_they_are_in_a_step(run_on_spark: Any) -> None:
    faults = [
        kill(rank=1, step=5),
        kill(rank=0, step=12),
        kill(rank=2, step=20, at=Point.RECORDED),
        kill(rank=0, step=28, at=Point.RECORDED),
        kill(rank=1, step=36, at=Point.COMMITTED),
        kill(rank=0, step=44, at=Point.COMMITTED),
        kill(rank=1, step=STEPS),
    ]
    # With fewer than three training waits, so that every rank is there to be struck.
    result = run_on_spark(count_steps, STEPS, 0.01, faults=faults, min_np=3, max_np=3)
    check(result)
    assert result.faults == len(faults)
    # Survivors never restart: each worker that was started beyond the first three replaces a dead one.
    assert len(result.of("worker_started")) <= 3 + len(faults)


def test_commits_in_place_lose_nothing_either(run: Any) -> None:
    faults = [
        kill(rank=1, step=5),
        kill(rank=0, step=12),
        kill(rank=2, step=20, at=Point.RECORDED),
        kill(rank=0, step=28, at=Point.COMMITTED),
        kill(rank=1, generation=5, at=Point.REPAIR),
        raise_error(rank=1, step=44),
    ]
    result = run(count_steps, STEPS, 0.01, 0, 64, "in_place", faults=faults, min_np=3, max_np=3)
    check(result)
    assert result.faults == len(faults)


def test_deaths_while_a_world_forms_is_repaired_and_sealed_only_delay_it(run: Any) -> None:
    faults = [
        kill(rank=2, generation=1, at=Point.FORM),
        kill(rank=0, generation=2, at=Point.FORM),
        kill(rank=1, step=10),
        kill(rank=0, generation=5, at=Point.FORMED),
        kill(rank=1, generation=6, at=Point.REPAIR),
        kill(rank=1, generation=7, at=Point.SYNCED),
        kill(rank=1, step=50, at=Point.RECORDED),
    ]
    result = run(count_steps, STEPS, 0.05, faults=faults, min_np=2, max_np=3, num_proc=3)
    check(result)
    assert result.faults >= 5


def test_a_second_death_during_the_recovery_from_the_first_is_survived(run: Any) -> None:
    faults = [kill(rank=3, step=10), kill(rank=0, generation=2, at=Point.FORM)]
    result = run(count_steps, STEPS, 0.02, faults=faults, min_np=1, max_np=4, num_proc=4)
    check(result)
    assert result.faults == 2
    assert result.of("world_forming")[2]["size"] >= 2


def test_workers_that_end_by_themselves_are_replaced_and_survivors_never_restart(run: Any) -> None:
    faults = [
        segfault(rank=1, step=9),
        exit_with(rank=1, step=18, code=0),
        exit_with(rank=1, step=27, code=3),
        raise_error(rank=1, step=36),
    ]
    result = run(count_steps, 40, 0.02, faults=faults, min_np=2, max_np=2)
    check(result, 40)
    assert [event["code"] for event in result.of("worker_exited")][:3] == [-signal.SIGSEGV, 0, 3]
    assert "InjectedFaultError" in result.of("worker_lost")[3]["cause"]
    # The oldest worker has the lowest rank: rank 0 is the same process from beginning to end.
    first = result.of("worker_started")[:2]
    assert result.results[0]["pid"] in {event["pid"] for event in first}
    assert len(result.results[0]["entries"]) == 5


def test_a_killed_task_and_a_killed_executor_are_brought_back_by_spark_while_survivors_wait_in_memory(
    run_on_spark: Any,
) -> None:
    faults = [kill_task(rank=1, step=10), kill_executor(rank=1, step=20)]
    result = run_on_spark(count_steps, 30, 0.02, faults=faults, min_np=2, max_np=2)
    check(result, 30)
    assert result.sizes == [2, 2, 2]
    assert result.results[0]["resets"] == [(2, 2), (2, 2)]
    assert len(result.results[1]["entries"]) == 1


def test_workers_that_are_stopped_or_never_enter_a_collective_are_found_killed_and_replaced(run: Any) -> None:
    faults = [stop(rank=1, step=9), hang(rank=1, step=20)]
    result = run(count_steps, 40, 0.02, faults=faults, min_np=2, max_np=2, heartbeat_timeout=6.0, hang_timeout=8.0)
    check(result, 40)
    stopped, hung = result.of("worker_lost")
    assert "silent for 6 s" in stopped["cause"]
    assert "hang_timeout" in hung["cause"]


def test_killing_the_same_slot_ten_times_does_not_end_the_job(run: Any) -> None:
    faults = [kill(rank=1, step=step) for step in range(5, 55, 5)]
    result = run(count_steps, STEPS, faults=faults, min_np=2, max_np=2)
    check(result)
    assert result.faults == 10


def test_a_loss_after_one_rank_has_left_sends_all_back_into_the_function(run: Any) -> None:
    faults = [kill(rank=1, at=Point.RETURN, generation=1)]
    result = run(count_steps, 20, faults=faults, min_np=1, max_np=2, num_proc=2)
    check(result, 20)
    assert result.faults == 1


@pytest.mark.parametrize("point", [Point.FINISHED, Point.RESULT], ids=["after the vote", "before the result"])
def test_a_worker_that_dies_before_its_result_has_arrived_fails_the_job_by_name(run: Any, point: Point) -> None:
    with pytest.raises(TrainingFailedError, match="rank 1 was lost after training had finished") as failure:
        run(count_steps, 10, faults=[kill(rank=1, at=point)], min_np=1, max_np=2, num_proc=2)
    assert failure.value.failures[-1].rank == 1


def test_a_loss_while_all_ranks_evaluate_for_longer_than_ready_timeout_costs_nobody_else(run: Any) -> None:
    faults = [kill(rank=1, step=2, at=Point.COMMITTED)]
    result = run(
        evaluate_everywhere, 4.0, faults=faults, min_np=1, max_np=2, num_proc=2, ready_timeout=1.0, hang_timeout=60.0
    )
    assert result.faults == 1
    assert [event["rank"] for event in result.of("worker_lost")] == [1]


def test_newcomers_that_fail_every_time_hold_nobody_up_for_long(run: Any, tmp_path: Path) -> None:
    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "newcomers_paused":
            (tmp_path / "paused").touch()

    faults = [kill(rank=1, step=10)]
    result = run(
        train_with_what_newcomers_cannot_load, STEPS, str(tmp_path / "paused"), faults=faults, on_event=watch,
        min_np=1, max_np=2, num_proc=2, reset_limit=1,
    )  # fmt: skip
    (steps,) = result.results
    assert steps >= 10 + STEPS
    paused = result.of("newcomers_paused")
    assert paused
    assert "does not fit into 1" in paused[0]["reason"]
    assert len(result.of("world_broken")) <= 1 + FREE_FAILURES


def test_a_rank_whose_packets_vanish_is_replaced_once_a_second_world_is_stuck_and_every_row_counts(
    run_on_spark: Any, dataset: str
) -> None:
    result = run_on_spark(
        count_rows, dataset, 1000, 1, {"global_batch_size": 100}, False, 2, min_np=3, max_np=3, hang_timeout=4.0
    )
    broken = [event["reason"] for event in result.of("world_broken")]
    assert broken == ["all ranks had entered a collective that was not complete after 8 s (hang_timeout)"] * 2
    for each in result.results:
        assert each["seen"] == pytest.approx([1.0] * 1000)
    (lost,) = result.of("worker_lost")
    assert (lost["rank"], lost["cause"]) == (2, "its connections to the others were silent in two worlds in a row")
