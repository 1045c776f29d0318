"""Fault injection for tests: strikes a worker at a given rank and step, or at a named point of the protocol.

::

    with spark_elastic.testing.inject(kill(rank=1, step=20), raise_error(rank=0, step=35)):
        spark_elastic.run(train_fn, min_np=2, max_np=4)

Faults are deterministic and need no sleeps. If a job succeeds and a fault has not struck, a warning is issued. ``step`` counts
the job's explicit commits from 1. By default a fault strikes when the worker with that rank calls ``commit()`` for that step,
before anything is saved. Each fault strikes once in a job unless ``times`` says otherwise, whichever worker has the rank by
then.

A cluster of local processes that shrinks and grows, without Spark::

    with spark_elastic.testing.local_cluster(slots=4) as cluster:
        with inject(take_away(rank=3, step=20), give_back(step=40)):
            spark_elastic.run(train_fn, min_np=2, local=cluster)

``cluster.take_away`` and ``cluster.give_back`` do the same from another thread, or in ``on_event``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from spark_elastic._integers import whole_number
from spark_elastic._seconds import seconds_from
from spark_elastic.driver.fault_plan import active, active_plan
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.protocol.fault_points import Action, Fault, InjectedFaultError, Point

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
    """Describe a fault. ``kill`` and the others are this function with a fixed ``action``.

    Args:
        action: what happens.
        rank: the rank that it strikes; None means the one that comes to the point first.
        step: the step at which it strikes; None means the first.
        generation: the generation in which it strikes; None means the first that comes to the point.
        at: the point within the step: by default when the worker calls ``commit()``, before anything is saved.
        times: how often it strikes in a job, if the point comes again; a step that survivors keep does not.
        code: the exit code with which ``exit_with`` ends the process.
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
    code, grace = whole_number("code", code, 0), seconds_from("grace", grace)
    if code > 255:
        raise ValueError(f"code must be at most 255, as exit codes are, not {code}")
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
"""Never return from this point. The process otherwise stays responsive."""
kill_task = partial(fault, Action.KILL_TASK)
"""SIGKILL the task's Python process."""
kill_executor = partial(fault, Action.KILL_EXECUTOR)
"""SIGKILL the executor's JVM; in local processes, where a task is its own executor, the task's process."""
drain = partial(fault, Action.DRAIN)
"""Make the worker leave at a commit, as before a decommission. Its slot is then offered to Spark again."""
take_away = partial(fault, Action.TAKE_AWAY)
"""Take the slot from its ``local_cluster``: the worker leaves at a commit, or is killed after ``grace`` seconds (0: at once)."""
give_back = partial(fault, Action.GIVE_BACK)
"""Return a slot that was taken away to the ``local_cluster``."""


@contextmanager
def local_cluster(slots: int) -> Iterator[LocalCluster]:
    """Make a cluster of ``slots`` processes on this machine, for ``run(local=cluster)``.

    Successive jobs start in a fraction of a second, because torch is imported once for all of them. Concurrent jobs share the
    slots. Workers use no GPU. Jobs that are still running when the cluster ends, end with it.
    """
    cluster = LocalCluster(slots)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Inject the faults into every ``run`` that this thread starts inside the ``with``, besides those of a ``with`` around it."""
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"inject takes faults, such as kill(rank=1, step=3), not {fault!r}")
    token = active.set(tuple(replace(entry, number=number) for number, entry in enumerate((*active.get(), *faults), 1)))
    try:
        yield
    finally:
        active.reset(token)
