"""When the votes of all ranks are there, and when those who have voted have to go on."""

from __future__ import annotations

import pytest
from machine_script import running

from spark_elastic.driver.hosts import HostManager
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.voting import find_to_call_back, have_all_delivered, have_all_voted

MEMBER, VOTED, READY, DONE = WorkerPhase.MEMBER, WorkerPhase.VOTED, WorkerPhase.READY, WorkerPhase.DONE


def world(phase: WorldPhase, *workers: WorkerPhase | None) -> Situation:
    """A world of so many ranks; of those that are None, the worker is lost."""
    job = running(*"abc"[: len(workers)]).job
    assert job.world is not None
    job.world.phase = phase
    for number, worker in enumerate(workers):
        if worker is None:
            del job.workers[number]
        else:
            job.workers[number].phase = worker
    return Situation(0.0, 0.0, job.settings, job.hosts, job.workers, job.world, 1, has_trained=True, most=4)


NOTHING = Situation(0.0, 0.0, running("a").settings, HostManager(), {}, None, 0, has_trained=False, most=4)


@pytest.mark.parametrize("phase", list(WorldPhase))
def test_votes_count_only_in_a_world_that_trains(phase: WorldPhase) -> None:
    assert have_all_voted(world(phase, VOTED, VOTED)) == (phase in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING))


@pytest.mark.parametrize("other", [MEMBER, READY, None])
def test_one_rank_that_has_not_voted_keeps_the_job_going(other: WorkerPhase | None) -> None:
    assert not have_all_voted(world(WorldPhase.RUNNING, VOTED, other))


def test_those_who_have_voted_are_called_back_once_another_has_left_at_an_interrupt() -> None:
    seen = world(WorldPhase.INTERRUPTING, VOTED, READY, VOTED)
    assert [worker.worker for worker in find_to_call_back(seen)] == [0, 2]
    assert find_to_call_back(world(WorldPhase.INTERRUPTING, VOTED, MEMBER)) == []


@pytest.mark.parametrize("phase", [phase for phase in WorldPhase if phase is not WorldPhase.INTERRUPTING])
def test_nobody_is_called_back_where_nothing_was_interrupted(phase: WorldPhase) -> None:
    assert find_to_call_back(world(phase, VOTED, READY)) == []


@pytest.mark.parametrize(
    ("phase", "workers", "have_delivered"),
    [
        (WorldPhase.FINISHING, (DONE, DONE), True),
        (WorldPhase.FINISHING, (DONE, VOTED), False),
        (WorldPhase.FINISHING, (DONE, None), False),
        (WorldPhase.RUNNING, (DONE, DONE), False),
    ],
)
def test_a_job_has_its_results_when_all_ranks_of_the_finishing_world_have_delivered_theirs(
    phase: WorldPhase, workers: tuple[WorkerPhase | None, ...], have_delivered: bool
) -> None:
    assert have_all_delivered(world(phase, *workers)) == have_delivered


def test_nobody_votes_or_delivers_without_a_world() -> None:
    assert not have_all_voted(NOTHING)
    assert not have_all_delivered(NOTHING)
    assert find_to_call_back(NOTHING) == []
