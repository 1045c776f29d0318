"""The machine's invariants: each is noticed when it does not hold. That they hold is seen in all the machine's other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from machine_script import running

from spark_elastic.driver import commands as do
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.validation import validate
from spark_elastic.driver.world import World
from spark_elastic.protocol.messages import CommitId


def world_of(machine: DriverMachine) -> World:
    assert machine.world is not None
    return machine.world


MISTAKES: list[tuple[str, Callable[[DriverMachine], object]]] = [
    ("generations are numbered", lambda m: m._sizes.pop(1)),
    ("worker 9 has a number of its own", lambda m: m.workers.__setitem__(9, m.workers[0])),
    ("the world is the newest one", lambda m: setattr(m.world, "generation", 7)),
    ("ranks are dense", lambda m: world_of(m).ranks.__setitem__(1, 2)),
    ("a world that is over", lambda m: setattr(m.world, "phase", WorldPhase.OVER)),
    ("has formed when all have", lambda m: world_of(m).acknowledged.remove(0)),
    ("RUNNING has formed", lambda m: setattr(m.world, "was_formed", False)),
    ("answered: all are members", lambda m: world_of(m).answered.add(5)),
    ("why a world breaks", lambda m: setattr(m.world, "broken_by", "a guess")),
    ("the newest world", lambda m: setattr(m, "world", None)),
    (
        "worker 0 is awaited",
        lambda m: (setattr(m.workers[0], "phase", WorkerPhase.READY), m.workers[0].__setattr__("awaited_since", 1.0)),
    ),
    ("worker 1 has no newer commit", lambda m: setattr(m.workers[1], "commit", CommitId(1, 9))),
    ("the host of worker 1 is registered", lambda m: m.hosts.remove(1)),
    ("the host of worker 1 knows", lambda m: setattr(m.hosts.get(1), "worker", None)),
    ("the worker of host 1 knows", lambda m: setattr(m.hosts.get(1), "worker", 0)),
    ("host 1 is released only", lambda m: setattr(m.hosts.get(1), "released", True)),
]


@pytest.mark.parametrize(("what", "mistake"), MISTAKES, ids=[what for what, _ in MISTAKES])
def test_what_always_holds_is_missed_when_it_does_not(what: str, mistake: Callable[[DriverMachine], object]) -> None:
    machine = running("a", "b").machine
    validate(machine)
    mistake(machine)
    with pytest.raises(AssertionError, match=what):
        validate(machine)


def test_what_is_left_of_a_job_that_has_ended_is_not_looked_at() -> None:
    script = running("a")
    script.raises(0)
    assert isinstance(script.outcome, do.FailJob)
    world_of(script.machine).generation = 7
    validate(script.machine)
