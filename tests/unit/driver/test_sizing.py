"""Sizing: when fewer workers are tried, whether they stay, and what becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.narration import Narrator
from spark_elastic.driver.phases import WorldPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.sizing import LEAST_GAIN, MEASUREMENTS, WARM_UP, Sizing, Speed, best_size, size_to_try
from spark_elastic.protocol.records import WorldInterrupted, WorldSized

ROWS = 1000
ENOUGH = WARM_UP + MEASUREMENTS


def speeds(**found: tuple[float, float]) -> dict[int, Speed]:
    return {int(size[1:]): Speed(*each) for size, each in found.items()}


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ({4: 100.0}, 4),
        ({4: 100.0, 2: 104.0}, 4),
        ({4: 100.0, 2: 105.0}, 2),
        ({4: 100.0, 2: 110.0, 1: 112.0}, 2),
        ({4: 100.0, 2: 110.0, 1: 120.0}, 1),
        ({8: 100.0, 4: 90.0, 2: 130.0}, 2),
    ],
)
def test_more_workers_are_preferred_unless_fewer_are_clearly_faster(found: dict[int, float], best: int) -> None:
    assert best_size({size: Speed(rate, 0.5) for size, rate in found.items()}) == best


def test_half_as_many_are_tried_where_much_of_a_step_is_waiting() -> None:
    assert size_to_try(speeds(n4=(100, 0.3)), 4, least=1) == 2
    assert size_to_try(speeds(n4=(100, 0.2)), 4, least=1) is None
    assert size_to_try(speeds(n5=(100, 0.3)), 5, least=1) == 2
    assert size_to_try(speeds(n4=(100, 0.3)), 4, least=3) == 3
    assert size_to_try(speeds(n4=(100, 0.9)), 4, least=4) is None
    assert size_to_try(speeds(n1=(100, 0.9)), 1, least=1) is None
    assert size_to_try(speeds(n4=(100, 0.9), n2=(50, 0.9)), 4, least=1) is None, "it was tried"


def settled(seconds: Callable[[int], float], most: int, least: int, waiting: float) -> tuple[list[int], int]:
    """Measure worlds of ``most`` workers, and then of whatever size is wanted. Return the sizes, and the one that stays."""
    sizing, sizes = Sizing(True, least), [most]
    for generation in range(1, 20):
        size = sizes[-1]
        period = round(seconds(size) * 1e6)
        for _ in range(ENOUGH):
            sizing.measured(generation, ROWS, period, (round(period * (1 - waiting)),) * size)
        wanted = sizing.limit or most
        if wanted == size:
            return sizes, size
        sizes.append(wanted)
    raise AssertionError(f"it does not settle: {sizes}")


def test_what_fewer_rows_would_not_shorten_counts_as_waiting() -> None:
    """Fewer ranks would spend it, too, so they may be as fast although all are busy all the time."""
    for fixed, limit in [(0, None), (400_000, 2)]:
        sizing = Sizing(True, 1)
        for _ in range(ENOUGH):
            sizing.measured(1, ROWS, 1_000_000, (1_000_000,) * 4, fixed)
        assert sizing.limit == limit


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=64, max_size=64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([0.1, 0.5]),
)
def test_it_settles_after_each_size_was_tried_once_at_most(
    seconds: dict[int, float], most: int, least: int, waiting: float
) -> None:
    least = min(least, most)
    sizes, last = settled(lambda size: seconds[size], most, least, waiting)
    assert len(set(sizes[:-1])) == len(sizes[:-1]), "only the size to which it goes back comes twice"
    assert min(sizes) >= least
    assert len(sizes) <= 8
    rates = {size: ROWS * 1e6 / round(seconds[size] * 1e6) for size in sizes}
    assert rates[last] >= max(rate for size, rate in rates.items() if size >= last) * (1 - 1e-9)
    assert all(rates[last] * (1 + LEAST_GAIN) > rate * (1 - 1e-9) for size, rate in rates.items() if size < last)


def test_a_network_that_waits_for_little_keeps_all_workers() -> None:
    assert settled(lambda size: 1.0 * size, 8, 1, waiting=0.2) == ([8], 8)


def test_a_network_that_only_waits_ends_with_one_worker() -> None:
    assert settled(lambda size: 1.0 * size, 8, 1, waiting=0.9) == ([8, 4, 2, 1], 1)


def test_the_first_measurement_of_a_world_does_not_count_and_of_the_others_the_fastest_one_does() -> None:
    sizing = Sizing(True, 1)
    assert sizing.measured(1, ROWS, 1, (1,) * 4) is None
    assert sizing.measured(1, ROWS, 30_000, (10_000,) * 4) is None
    assert sizing.measured(1, ROWS, 20_000, (10_000,) * 4) == WorldSized(2, True, [4], [50_000.0])


def test_measurements_of_several_worlds_are_not_put_together() -> None:
    sizing = Sizing(True, 1)
    assert not any(sizing.measured(generation, ROWS, 2000, (100,) * 4) for generation in range(10))


def test_a_world_that_losses_have_made_smaller_is_not_measured() -> None:
    sizing = Sizing(True, 1)
    for _ in range(ENOUGH):
        sizing.measured(1, ROWS, 1000, (1000,) * 4)
    assert not any(sizing.measured(2, ROWS, 10, (5,) * 2) for _ in range(10))
    assert sizing.limit is None


def test_a_larger_world_than_any_before_is_compared_with_what_was_measured() -> None:
    sizing = Sizing(True, 1)
    for _ in range(ENOUGH):
        assert sizing.measured(1, ROWS, 1000, (1000,) * 2) is None
    told = [sizing.measured(2, ROWS, 2000, (100,) * 4) for _ in range(ENOUGH)]
    assert told == [None] * (ENOUGH - 1) + [WorldSized(2, False, [4, 2], [500_000.0, 1_000_000.0])]


@pytest.mark.parametrize("period", [0, 1000])
def test_nothing_is_decided_where_it_is_off_or_the_time_of_a_step_is_not_known(period: int) -> None:
    sizing = Sizing(is_on=period == 0, least=1)
    assert not any(sizing.measured(1, ROWS, period, (1,) * 4) for _ in range(10))


def test_a_fixed_world_cannot_shrink() -> None:
    with pytest.raises(ValueError, match="adaptive_np needs a world that can continue with fewer workers"):
        JobSettings(min_np=2, num_proc=2, max_np=2, elastic=False, adaptive_np=True)


# -- what the driver does ----------------------------------------------------------------------------------------------


def measure(script: Script, period: int, times: int = ENOUGH, own: int = 100) -> None:
    """Rank 0 tells so often how long steps take."""
    size = len(script.ranks)
    for _ in range(times):
        script.send(ev.StepsTimed(script.ranks[0], script.generation, (1,) * size, (own,) * size, period, ROWS))


def follow(script: Script) -> None:
    """The interrupted world ends at its next commit, the next one commits, and workers that are told to end do."""
    script.obey_interrupt()
    script.acknowledge()
    script.commit()
    script.end_those_told()


def sized_job(*names: str, **settings: object) -> Script:
    script = running(*names, adaptive_np=True, **settings)
    script.commit()
    return script


def test_fewer_workers_train_from_the_next_commit_on_and_the_others_end_without_a_failure() -> None:
    script = sized_job("a", "b", "c", "d")
    measure(script, 1000, times=ENOUGH - 1)
    assert script.told[-1] == script.worlds[-1]
    measure(script, 1000, times=1)
    assert script.told[-1] == do.InterruptWorld(1, (0, 1, 2, 3))
    assert script.recorded(WorldInterrupted)[-1] == WorldInterrupted(1, "2 workers are to train", "shrink")
    newest = script.job.newest_commit
    script.obey_interrupt()
    assert script.ranks == [0, 1]
    assert newest is not None
    assert [str(member.commit) for member in script.worlds[-1].members] == [f"1.{newest.index + 1}"] * 2
    for worker in (0, 1):
        script.send(ev.GroupFormed(worker, 2))
    assert do.LeaveJob(2) not in script.told, "the others have not sealed the world yet"
    script.acknowledge()
    assert script.told[-2:] == [do.LeaveJob(2), do.LeaveJob(3)]
    script.end_those_told()
    script.pass_time(30)
    assert [script.worker_on(host) for host in (2, 3)] == [None, None]
    assert script.job.setbacks.resets == 0
    assert script.ranks == [0, 1]


def test_fewer_workers_that_are_not_faster_get_the_others_back() -> None:
    script = sized_job("a", "b", "c", "d")
    measure(script, 1000)
    follow(script)
    measure(script, 2000)
    assert script.recorded(WorldSized)[-1] == WorldSized(4, False, [4, 2], [1_000_000.0, 500_000.0])
    script.boot(*(worker for host in (2, 3) if (worker := script.worker_on(host)) is not None))
    script.pass_time(1)
    follow(script)
    assert len(script.ranks) == 4
    measure(script, 5000, times=10)
    assert len(script.worlds) == 3


def test_fewer_workers_that_are_faster_stay_whatever_arrives() -> None:
    script = sized_job("a", "b", "c", "d", max_np=6)
    measure(script, 1000)
    follow(script)
    measure(script, 800, own=700)
    assert script.recorded(WorldSized)[-1] == WorldSized(2, False, [4, 2], [1_000_000.0, 1_250_000.0])
    assert script.worker_on(script.register("e")) is None
    script.pass_time(60)
    assert script.ranks == [0, 1]
    assert script.generation == 2


def test_a_newcomer_that_was_on_its_way_waits() -> None:
    script = sized_job("a", "b", "c", max_np=4)
    host = script.register("d")
    measure(script, 1000)
    follow(script)
    late = script.worker_on(host)
    assert late is not None
    script.boot(late)
    script.pass_time(60)
    assert script.ranks == [0]
    assert isinstance(script.job.world, Generation)
    assert script.job.world.phase is WorldPhase.RUNNING


def test_a_lost_worker_is_replaced_on_a_host_that_idles() -> None:
    script = sized_job("a", "b", "c", "d")
    measure(script, 1000)
    follow(script)
    script.kill(0)
    script.come_back()
    script.acknowledge()
    script.commit()
    newcomers = [process.worker for process in script.processes.values() if process.phase == "starting"]
    assert len(newcomers) == 1
    script.boot(*newcomers)
    script.pass_time(1)
    follow(script)
    assert len(script.ranks) == 2


def test_a_worker_whose_host_drains_is_replaced_on_a_host_that_idles() -> None:
    script = sized_job("a", "b", "c", "d")
    measure(script, 1000)
    follow(script)
    script.drain(0)
    follow(script)
    assert script.ranks == [1]
    assert sum(process.phase == "starting" for process in script.processes.values()) == 1


def test_a_world_that_breaks_while_it_is_interrupted_goes_on_with_fewer() -> None:
    script = sized_job("a", "b", "c", "d")
    measure(script, 1000)
    script.kill(1)
    script.come_back()
    assert script.ranks == [0, 2]


def test_what_those_who_were_left_out_hold_is_never_gone_back_to() -> None:
    script = sized_job("a", "b", "c", "d", durable=True)
    measure(script, 1000)
    script.obey_interrupt()
    script.acknowledge()
    script.commit()
    script.kill(0, 1)
    assert script.job.newest_commit is None
    assert script.recorded(WorldSized)[-1].size == 2


def test_min_np_workers_always_train() -> None:
    script = sized_job("a", "b", "c", "d", min_np=3)
    measure(script, 1000)
    follow(script)
    assert script.ranks == [0, 1, 2]
    measure(script, 100, own=10)
    assert script.generation == 2


def test_no_other_size_is_tried_once_a_rank_has_returned() -> None:
    script = sized_job("a", "b")
    script.vote(0)
    measure(script, 1000)
    assert not any(isinstance(command, do.InterruptWorld) for command in script.told)
    script.vote(1)
    assert isinstance(script.told[-1], do.FinishWorld)


def test_without_the_setting_all_workers_train() -> None:
    script = running("a", "b")
    script.commit()
    measure(script, 1000, times=10)
    assert script.told[-1] == script.worlds[-1]
    assert script.recorded(WorldSized) == []


def test_the_log_tells_how_many_workers_train_and_why() -> None:
    def told(*sized: object) -> str:
        ((level, line),) = Narrator().tell(WorldSized(*sized))  # type: ignore[arg-type]
        assert level == logging.INFO
        return line

    assert told(2, True, [4], [1900.0]) == (
        "2 of 4 workers are tried, because workers spend much of a step on waiting: 4 trained 1,900 rows/s"
    )
    assert told(4, False, [4, 2], [1900.0, 1200.0]) == (
        "all 4 workers train again, because fewer are not faster: 4 trained 1,900 rows/s, 2 trained 1,200 rows/s"
    )
    assert told(2, False, [4, 2], [1900.0, 2600.4]) == (
        "2 of 4 workers train from here on, because more are not faster: 4 trained 1,900 rows/s, 2 trained 2,600 rows/s. With "
        "maxNp=2 the next fit leaves the other slots free, with adaptiveNp=False all train"
    )
