"""What is known of a job at one moment: who belongs to its world, and whose end says something about the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from spark_elastic.driver.generation import Generation
from spark_elastic.driver.hosts import Host, HostManager, Place
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId, Member

BEGIN = CommitId(1, 4)


def situation(workers: Iterable[int], ranks: tuple[int, ...] | None = None, holders: Iterable[int] = ()) -> Situation:
    """One host for each worker; ``ranks`` are the members of the newest world, into which ``holders`` brought the state."""
    hosts = HostManager()
    known = {}
    for number in workers:
        place = Place("a", number)
        hosts.add(Host(number, number, "a", place, worker=number))
        known[number] = Worker(number, number, "a", place, started_at=0.0, heard=0.0, phase=WorkerPhase.READY)
    world = None
    if ranks is not None:
        brought = set(holders)
        members = tuple(
            Member(number, rank, rank, len(ranks), 0, 1, BEGIN if number in brought else None)
            for rank, number in enumerate(ranks)
        )
        world = Generation(2, members, since=0.0, phase=WorldPhase.RUNNING)
        for number in ranks:
            if number in known:
                known[number].phase = WorkerPhase.MEMBER
    settings = JobSettings(min_np=2, num_proc=3, max_np=4, start_timeout=60.0)
    return Situation(10.0, 0.0, settings, hosts, known, world, 0 if world is None else 2, has_trained=True, most=4)


def test_members_are_who_is_left_of_the_world_in_rank_order() -> None:
    seen = situation([1, 3, 5], ranks=(5, 2, 1))
    assert [worker.worker for worker in seen.members] == [5, 1]
    assert [seen.rank_of(number) for number in (5, 2, 1, 3)] == [0, 1, 2, None]
    assert situation([1]).members == []


def test_newcomers_are_ready_and_in_no_world_and_may_stay() -> None:
    seen = situation([0, 1, 2, 3], ranks=(0,))
    seen.workers[0].phase = WorkerPhase.READY  # a member that has come back
    seen.workers[1].phase = WorkerPhase.BOOTING
    draining = seen.hosts.get(2)
    assert draining is not None
    draining.draining = True
    assert [worker.worker for worker in seen.newcomers] == [3]


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, 3),
        ({"now": 59.0}, 3),
        ({"now": 60.0}, 2),
        ({"generation": 1}, 2),
    ],
)
def test_the_first_world_takes_num_proc_workers_until_start_timeout_and_any_other_min_np(
    change: dict[str, float], needed: int
) -> None:
    assert replace(situation([0]), **change).needed == needed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("happened", "is_joining"),
    [
        (lambda seen: None, False),
        (lambda seen: setattr(seen.workers[0], "has_progressed", True), True),
        (lambda seen: [setattr(worker, "has_progressed", True) for worker in seen.workers.values()], False),
    ],
    ids=["nobody has committed", "the holder has", "both have"],
)
def test_a_member_joins_until_it_commits_where_those_who_brought_the_state_have(
    happened: Callable[[Situation], object], is_joining: bool
) -> None:
    seen = replace(situation([0, 1], ranks=(0, 1), holders=[0]), has_trained=False)
    happened(seen)
    assert seen.is_joining(seen.workers[1]) == is_joining
    assert not seen.is_joining(seen.workers[0])


def test_a_member_joins_as_long_as_a_holder_of_what_was_trained_is_left() -> None:
    trained = situation([0, 1], ranks=(0, 1), holders=[0])
    assert trained.is_joining(trained.workers[1])
    assert not trained.is_joining(trained.workers[0])
    alone = situation([1], ranks=(0, 1), holders=[0])
    assert not alone.is_joining(alone.workers[1])


def test_a_newcomer_says_nothing_of_a_job_that_trains_or_could_train_without_it() -> None:
    seen = situation([0, 1, 2, 3], ranks=(0, 1, 2), holders=[0, 1])
    assert [seen.speaks_of_the_job(number) for number in range(4)] == [True, True, False, False]


def test_a_member_that_joins_speaks_of_a_job_that_has_too_few_without_it() -> None:
    seen = situation([0, 2], ranks=(0, 2), holders=[0])
    assert seen.speaks_of_the_job(2)


def test_anybody_speaks_of_a_job_that_has_no_world_or_one_that_breaks() -> None:
    assert situation([0]).speaks_of_the_job(0)
    seen = situation([0, 1, 3], ranks=(0, 1), holders=[0, 1])
    assert not seen.speaks_of_the_job(3)
    assert seen.world is not None
    seen.world.phase = WorldPhase.BREAKING
    assert seen.speaks_of_the_job(3)
