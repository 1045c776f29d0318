"""The machine's invariants: each is noticed when it does not hold. That they hold is seen in all the machine's other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from machine_script import running

from spark_elastic.driver import commands as do
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.job_state import JobState
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.validation import validate
from spark_elastic.protocol.messages import CommitId


def world_of(job: JobState) -> Generation:
    assert job.world is not None
    return job.world


MISTAKES: list[tuple[str, Callable[[JobState], object]]] = [
    ("generations are numbered", lambda job: job.sizes.pop(1)),
    ("worker 9 has a number of its own", lambda job: job.workers.__setitem__(9, job.workers[0])),
    ("the world is the newest one", lambda job: setattr(job.world, "generation", 7)),
    ("ranks are dense", lambda job: world_of(job).ranks.__setitem__(1, 2)),
    ("a world that is over", lambda job: setattr(job.world, "phase", WorldPhase.OVER)),
    ("has formed when all have", lambda job: world_of(job).acknowledged.remove(0)),
    ("RUNNING has formed", lambda job: setattr(job.world, "was_formed", False)),
    ("answered: all are members", lambda job: world_of(job).answered.add(5)),
    ("why a world breaks", lambda job: setattr(job.world, "broken_by", "a guess")),
    ("the newest world", lambda job: setattr(job, "world", None)),
    (
        "worker 0 is awaited",
        lambda job: (
            setattr(job.workers[0], "phase", WorkerPhase.READY),
            job.workers[0].__setattr__("awaited_since", 1.0),
        ),
    ),
    ("worker 1 has no newer commit", lambda job: setattr(job.workers[1], "commit", CommitId(1, 9))),
    ("the host of worker 1 is registered", lambda job: job.hosts.remove(1)),
    ("the host of worker 1 knows", lambda job: setattr(job.hosts.get(1), "worker", None)),
    ("the worker of host 1 knows", lambda job: setattr(job.hosts.get(1), "worker", 0)),
    ("host 1 is released only", lambda job: setattr(job.hosts.get(1), "released", True)),
]


@pytest.mark.parametrize(("what", "mistake"), MISTAKES, ids=[what for what, _ in MISTAKES])
def test_what_always_holds_is_missed_when_it_does_not(what: str, mistake: Callable[[JobState], object]) -> None:
    job = running("a", "b").job
    validate(job)
    mistake(job)
    with pytest.raises(AssertionError, match=what):
        validate(job)


def test_what_is_left_of_a_job_that_has_ended_is_not_looked_at() -> None:
    script = running("a")
    script.raises(0)
    assert isinstance(script.outcome, do.FailJob)
    world_of(script.job).generation = 7
    validate(script.job)
