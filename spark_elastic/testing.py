"""Fault injection for tests: strike a worker at a given rank and step, or at a named point of the protocol.

::

    with spark_elastic.testing.inject(kill(rank=1, step=20), raise_error(rank=0, step=35)):
        spark_elastic.run(train_fn, min_np=2, max_np=4)

Faults are deterministic: no sleeping and hoping. One that has not struck when a job succeeds is warned of. ``step`` counts the
explicit commits of the job from 1 on; by default a fault strikes when the worker of that rank calls ``commit()`` for that step,
before anything is saved. Each strikes once in a job unless ``times`` says otherwise, whichever worker then has the rank.

A cluster that shrinks and grows, of processes of this machine, without Spark::

    with spark_elastic.testing.local_cluster(slots=4) as cluster:
        with inject(take_away(rank=3, step=20), give_back(step=40)):
            spark_elastic.run(train_fn, min_np=2, local=cluster)

``cluster.take_away`` and ``cluster.give_back`` do the same from another thread, or in ``on_event``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from msgspec.structs import replace

from spark_elastic._integers import whole_number
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.protocol.fault_points import Action, Fault, InjectedFaultError, Point
from spark_elastic.protocol.records import Entry, EventsDropped, FaultInjected

__all__ = [
    "Action",
    "Fault",
    "InjectedFaultError",
    "LocalCluster",
    "Point",
    "active_plan",
    "drain",
    "exit_with",
    "fault",
    "give_back",
    "hang",
    "inject",
    "kill",
    "kill_executor",
    "kill_task",
    "local_cluster",
    "raise_error",
    "segfault",
    "stop",
    "take_away",
]

_active: ContextVar[tuple[Fault, ...]] = ContextVar("spark_elastic_faults", default=())


def fault(
    action: Action | str,
    *,
    rank: int | None = None,
    step: int | None = None,
    generation: int | None = None,
    at: Point | str = Point.COMMIT,
    times: int = 1,
    code: int = 1,
    grace: float = 30.0,
) -> Fault:
    """Describe a fault; ``kill`` and the others are this function with their ``action``.

    Args:
        action: what happens.
        rank: which rank it strikes; None is every rank.
        step: at which step; None is every step.
        generation: in which generation; None is every generation.
        at: where in the step: by default when the worker calls ``commit()``, before anything is saved.
        times: how often it strikes in a job.
        code: with which exit code ``exit_with`` ends the process.
        grace: how many seconds ``take_away`` leaves the worker.
    """
    for name, value, least in (
        ("rank", rank, 0),
        ("step", step, 0),
        ("generation", generation, 1),
        ("times", times, 1),
    ):
        if value is not None:
            whole_number(name, value, least)
    return Fault(0, Action(action), Point(at), rank, step, generation, times, code, grace)


kill = partial(fault, Action.KILL)
"""SIGKILL the worker's process."""
segfault = partial(fault, Action.SEGFAULT)
"""SIGSEGV the worker's process."""
exit_with = partial(fault, Action.EXIT)
"""``os._exit(code)``."""
raise_error = partial(fault, Action.RAISE)
"""Raise ``InjectedFaultError`` in user code."""
stop = partial(fault, Action.STOP)
"""SIGSTOP the worker's process."""
hang = partial(fault, Action.HANG)
"""Never return from this point; the process stays responsive otherwise."""
kill_task = partial(fault, Action.KILL_TASK)
"""SIGKILL the task's Python process."""
kill_executor = partial(fault, Action.KILL_EXECUTOR)
"""SIGKILL the executor's JVM; in local processes, where a task is its own executor, the task's."""
drain = partial(fault, Action.DRAIN)
"""Have the worker leave at a commit, as ahead of a decommission; when it has left, its slot is offered to Spark again."""
take_away = partial(fault, Action.TAKE_AWAY)
"""Take the slot from its ``local_cluster``: it leaves at a commit, or is killed after ``grace`` seconds, 0 for at once."""
give_back = partial(fault, Action.GIVE_BACK)
"""Give a slot that was taken away back to the ``local_cluster``."""


@contextmanager
def local_cluster(slots: int) -> Iterator[LocalCluster]:
    """Make a cluster of so many slots, which are processes of this machine, for ``run(local=cluster)``.

    Jobs that run on it one after the other start in a fraction of a second, since torch is imported once for all of them. Jobs
    that run side by side share its slots. Its workers use no GPU. Jobs that still run there end with it.
    """
    cluster = LocalCluster(slots)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Have the faults strike in every ``run`` that this thread starts inside the ``with``."""
    token = _active.set(tuple(replace(entry, number=number) for number, entry in enumerate(faults, 1)))
    try:
        yield
    finally:
        _active.reset(token)


class Strikes:
    """Watches which of the faults strike that are to strike in a run that is started here."""

    def __init__(self) -> None:
        self._missing = {entry.number: entry for entry in active_plan()}

    def see(self, entry: Entry) -> None:
        """Note an entry of the job's event log."""
        if isinstance(entry.record, FaultInjected):
            self._missing.pop(entry.record.fault, None)
        elif isinstance(entry.record, EventsDropped):
            self._missing.clear()  # nobody knows what these were

    def warn_of_missing(self) -> None:
        """Warn the caller of ``run`` of faults that have not struck: a test with such a fault has tested nothing."""
        if self._missing:
            told = ", ".join(map(str, self._missing.values()))
            warnings.warn(
                f"injected, but never struck: {told}. Did the job reach that step, with that rank, in that generation?",
                stacklevel=3,
            )


def active_plan() -> tuple[Fault, ...]:
    """Return the faults that are to strike in a run that is started here."""
    return _active.get()
