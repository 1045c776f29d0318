"""Slowness: which worker is replaced because it is too slow, when, and what becomes of the place where it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.slowness import LONGEST_PAUSE, MEASUREMENTS, SHORTEST_PAUSE, Replacements, Slowness, SlowRank
from spark_elastic.protocol.records import WorkerSlow, WorkerTooSlow

EVEN = (30, 30, 30)
HOPELESS = (1000, 11_000, 1000)


def judged(shares: Sequence[int], *measured: Sequence[int]) -> list[SlowRank | None]:
    slowness = Slowness(0.1)
    return [slowness.measured(1, shares, microseconds) for microseconds in measured]


def test_a_rank_is_too_slow_when_several_measurements_in_a_row_say_so() -> None:
    assert judged(EVEN, *[HOPELESS] * MEASUREMENTS) == [None] * (MEASUREMENTS - 1) + [SlowRank(1, 11.0)]
    assert not any(judged(EVEN, HOPELESS, HOPELESS, (1000, 9_000, 1000), HOPELESS, HOPELESS))
    assert not any(judged(EVEN, *[(1000, 9_900, 1000)] * 5))


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    assert judged((10, 10), *[(1000, 20_000)] * 3)[-1] == SlowRank(1, 20.0)
    assert judged((10, 10, 10, 10), *[(1, 1000, 1000, 11_000)] * 3)[-1] == SlowRank(3, 11.0)


def test_of_two_ranks_the_slower_one_is_found() -> None:
    assert judged((10, 10, 10, 10, 10), *[(1000, 12_000, 1000, 15_000, 1000)] * 3)[-1] == SlowRank(3, 15.0)


def test_a_rank_that_was_relieved_in_between_is_still_found() -> None:
    slowness = Slowness(0.1)
    assert slowness.measured(1, EVEN, (1000, 20_000, 1000)) is None
    assert slowness.measured(1, (41, 8, 41), (1300, 5_500, 1300)) is None
    found = slowness.measured(1, (43, 3, 44), (1400, 2_000, 1400))
    assert found is not None
    assert found.rank == 1


def test_a_relieved_rank_is_not_taken_for_hopeless_because_some_of_a_step_is_in_no_proportion_to_rows() -> None:
    # At an even share it needs three times as long; of its two rows it spends nearly all the time on what any batch takes.
    assert not any(judged(EVEN, *[(1000, 3000, 1000)] * 3))
    assert not any(judged((44, 2, 44), *[(1400, 1400, 1400)] * 5))


def test_a_rank_without_rows_has_no_speed() -> None:
    slowness = Slowness(0.8)
    assert not any(slowness.measured(1, (0, 1, 1), (100, 100, 100)) for _ in range(5))


def test_another_generation_is_measured_anew() -> None:
    slowness = Slowness(0.1)
    found = [slowness.measured(generation, EVEN, HOPELESS) for generation in (1, 1, 2, 2, 2)]
    assert found == [None, None, None, None, SlowRank(1, 11.0)]


@pytest.mark.parametrize("limit", [None, 0.05])
def test_nobody_is_too_slow_without_a_limit_or_above_it(limit: float | None) -> None:
    slowness = Slowness(limit)
    assert not any(slowness.measured(1, EVEN, HOPELESS) for _ in range(5))


def test_pauses_double_up_to_a_limit() -> None:
    replacements = Replacements()
    pauses = [replacements.begin(0.0) for _ in range(7)]
    assert pauses[:3] == [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert replacements.are_paused(LONGEST_PAUSE - 1)
    assert not replacements.are_paused(LONGEST_PAUSE)


# -- what the driver does ----------------------------------------------------------------------------------------------


def measure(script: Script, slow: int, times: int = MEASUREMENTS, generation: int | None = None) -> None:
    """Rank 0 tells so many measurements, in all of which a worker is hopeless."""
    size = len(script.ranks)
    microseconds = tuple(20_000 if worker == slow else 1000 for worker in script.ranks)
    for _ in range(times):
        told = script.generation if generation is None else generation
        script.send(ev.StepsTimed(script.ranks[0], told, (10,) * size, microseconds))


def leave(script: Script, worker: int) -> None:
    """The interrupted world ends at its next commit, and one goes on without this worker, which ends."""
    host = script.host_of(worker)
    script.obey_interrupt()
    script.acknowledge()
    script.commit()
    script.end_those_told()
    assert do.ReleaseTask(host) in script.told
    script.lose_host(host, reason="released")


def slow_job(*names: str, **settings: object) -> Script:
    script = running(*names, replace_slow=0.1, **settings)
    script.commit()
    return script


def test_a_worker_that_is_too_slow_leaves_at_the_next_commit_and_no_failure_is_counted() -> None:
    script = slow_job("a", "b", "c", min_np=2)
    measure(script, slow=1, times=MEASUREMENTS - 1)
    assert script.told[-1] == script.worlds[-1]
    measure(script, slow=1, times=1)
    assert script.told[-1] == do.InterruptWorld(1, (0, 1, 2))
    assert script.recorded(WorkerTooSlow) == [WorkerTooSlow(1, 1, "b", 20.0, SHORTEST_PAUSE)]
    leave(script, 1)
    assert script.ranks == [0, 2]
    assert script.worlds[-1].members[0].commit is not None
    assert script.job.setbacks.resets == 0
    assert not any(isinstance(command, (do.KillWorker, do.AbortWorld)) for command in script.told)


def test_its_executor_gets_no_worker_for_a_while_and_another_one_gets_it_at_once() -> None:
    script = slow_job("a", "b", "c", min_np=2)
    place = script.job.workers[1].place
    measure(script, slow=1)
    leave(script, 1)
    again = script.register("b", place=place)
    assert script.worker_on(again) is None
    assert script.worker_on(script.register("d")) is not None
    script.pass_time(SHORTEST_PAUSE - 1)
    assert script.worker_on(again) is None
    script.pass_time(2)
    assert script.worker_on(again) is not None


def test_the_executor_is_used_all_the_same_where_fewer_than_min_np_workers_are_left() -> None:
    script = slow_job("a", "b", "c", min_np=2)
    place = script.job.workers[1].place
    measure(script, slow=1)
    leave(script, 1)
    again = script.register("b", place=place)
    assert script.worker_on(again) is None
    script.lose_host(2)
    assert script.worker_on(again) is not None


def test_the_executor_is_not_used_for_a_worker_that_was_killed_on_a_host_that_stays() -> None:
    script = slow_job("a", "b", "c", min_np=2)
    place, host = script.job.workers[1].place, script.host_of(2)
    measure(script, slow=1)
    leave(script, 1)
    again = script.register("b", place=place)
    script.kill(2)
    assert script.worker_on(host) is not None
    assert script.worker_on(again) is None


def test_without_a_spare_worker_it_stays_which_is_told_once_and_leaves_when_a_newcomer_is_ready() -> None:
    script = slow_job("a", "b", min_np=2)
    measure(script, slow=1, times=5)
    assert script.recorded(WorkerTooSlow) == [WorkerTooSlow(1, 1, "b", 20.0, None)]
    script.join("c", wait=False)
    measure(script, slow=1, times=1)
    assert script.recorded(WorkerTooSlow)[1:] == [WorkerTooSlow(1, 1, "b", 20.0, SHORTEST_PAUSE)]
    leave(script, 1)
    assert script.ranks == [0, 2]


def test_one_worker_at_a_time_is_replaced() -> None:
    script = slow_job("a", "b", "c", "d", min_np=1)
    measure(script, slow=1)
    measure(script, slow=2)
    assert len(script.recorded(WorkerTooSlow)) == 1
    leave(script, 1)
    measure(script, slow=2, times=10)
    assert len(script.recorded(WorkerTooSlow)) == 1, "it is a minute too early for another one"
    script.pass_time(SHORTEST_PAUSE)
    measure(script, slow=2, times=1)
    assert [record.worker for record in script.recorded(WorkerTooSlow)] == [1, 2]
    assert script.recorded(WorkerTooSlow)[-1].seconds == 2 * SHORTEST_PAUSE


def test_nobody_is_replaced_once_a_rank_has_returned() -> None:
    script = slow_job("a", "b", "c", min_np=1)
    script.vote(0)
    measure(script, slow=1)
    assert script.recorded(WorkerTooSlow) == []


def test_measurements_of_an_earlier_world_do_not_count() -> None:
    script = slow_job("a", "b", "c", min_np=1)
    script.kill(2)
    script.come_back()
    script.acknowledge()
    measure(script, slow=1, generation=1)
    assert script.recorded(WorkerTooSlow) == []


@pytest.mark.parametrize(
    ("sender", "shares", "microseconds"),
    [
        (0, (30, 30, 30), (0, 1000, 1000)),
        (0, (30, 30, 30), (-1, 1000, 1000)),
        (0, (-30, 30, 30), (1000, 1000, 1000)),
        (0, (30, 30, 30), (1000, 11_000)),
        (0, (30, 30, 30, 30), (1000, 1000, 1000, 11_000)),
        (0, (), ()),
        (1, EVEN, HOPELESS),
        (99, EVEN, HOPELESS),
    ],
)
def test_what_cannot_be_rank_0s_measurements_counts_for_nothing(
    sender: int, shares: tuple[int, ...], microseconds: tuple[int, ...]
) -> None:
    script = running("a", "b", "c", replace_slow=0.1, min_np=2)
    script.commit()
    worker = script.ranks[sender] if sender < 3 else sender
    for _ in range(MEASUREMENTS):
        script.send(ev.StepsTimed(worker, script.generation, shares, microseconds))
    assert not script.recorded(WorkerTooSlow)
    assert script.error is None


def test_without_the_setting_nobody_is_replaced() -> None:
    script = running("a", "b", "c", min_np=1)
    script.commit()
    measure(script, slow=1, times=5)
    assert script.recorded(WorkerTooSlow) == []
    assert script.told[-1] == script.worlds[-1]


def test_a_slow_worker_whose_rows_have_moved_is_not_told_of() -> None:
    script = running("a", "b", "c", min_np=1)
    script.commit()
    for shares, microseconds in ((10, 10, 10), (1000, 3000, 1000)), *[((12, 4, 14), (1200, 1900, 1400))] * 5:
        script.send(ev.StepsTimed(script.ranks[0], script.generation, shares, microseconds))
    assert script.recorded(WorkerSlow) == []


def test_a_slow_worker_is_told_of_once_in_any_job() -> None:
    script = running("a", "b", "c", min_np=1)
    script.commit()
    measure(script, slow=1, times=MEASUREMENTS - 1)
    assert script.recorded(WorkerSlow) == []
    measure(script, slow=1, times=5)
    assert script.recorded(WorkerSlow) == [WorkerSlow(1, 1, "b", 20.0)]
    script.kill(2)
    script.come_back()
    script.acknowledge()
    script.commit()
    measure(script, slow=1, times=MEASUREMENTS)
    assert len(script.recorded(WorkerSlow)) == 1, "a new generation is no news"
