"""@elastic: the loop that enters the user's function once per generation until all ranks have left it."""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import TypeVar

from spark_elastic._callables import is_deferred
from spark_elastic.errors import HostsUpdatedInterrupt, TrainingCodeError, WorldChanged
from spark_elastic.protocol.fault_points import Point
from spark_elastic.worker import faults
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.process.children import ending_children
from spark_elastic.worker.state.base import State
from spark_elastic.worker.state.entered import entered_without_job
from spark_elastic.worker.torchrun import is_one_of_several
from spark_elastic.worker.tracebacks import text_of

logger = logging.getLogger("spark_elastic")

T = TypeVar("T")


def elastic(function: Callable[..., T]) -> Callable[..., T]:
    """Make ``function(state, *args, **kwargs)`` survive losses and arrivals of workers.

    When a worker is lost, the state goes back to the last commit; when workers arrive or leave as planned, it has just been
    committed. Then a new world is formed, the state is synced, reset callbacks run on all ranks, and ``function`` is entered
    again, so it has to continue from the state. When all ranks have left ``function``, the call returns this rank's value; a
    loss before that enters ``function`` again. The call blocks while fewer than ``min_np`` workers are left.

    A job has one elastic function, which is called once. Outside a job the function is simply called, except in a process that
    torchrun has started as one of several: each would train by itself, and ``TrainingCodeError`` is raised. Under
    ``run(elastic=False)`` it is called once, with the state of the newest durable checkpoint if there is one, and a loss runs
    the whole of the job's function again.
    """
    if not callable(function):
        raise TypeError(f"elastic takes a function, not {function!r}")
    if is_deferred(function):
        raise TypeError(
            f"elastic takes a plain function, and {function!r} is a generator or coroutine function: nothing of it would run "
            "before the call has returned, when the world is over"
        )

    @functools.wraps(function)
    def call(state: State, *args: object, **kwargs: object) -> T:
        if not isinstance(state, State):
            raise TypeError(f"the first argument of an elastic function is a State, not {type(state).__name__}")
        if "_commits" not in vars(state):
            raise TypeError(f"{type(state).__name__}.__init__ has to call super().__init__()")
        job = current_job()
        if job is None:
            if is_one_of_several():
                raise TrainingCodeError(
                    f"this process is one of {os.environ['WORLD_SIZE']} that torchrun, or spark-elastic run "
                    "--restart-on-change, has started, and each of them would train by itself: start a script that has an "
                    "elastic function with spark-elastic run, without --restart-on-change"
                )
            state._begin(None)
            with entered_without_job(state), state._checked_outside():
                return _ended(function(state, *args, **kwargs))

        def enter() -> T:
            with ending_children():
                return _ended(function(state, *args, **kwargs))

        job.enter_elastic()
        state._prepare()
        if job.is_fixed:  # a loss ends this process, so the function is entered only once
            state._begin(job)
            return state._enter(enter)
        return _run(job, state, enter)

    return call


def _ended(value: T) -> T:
    """Return the elastic function's result. Raises ``TypeError`` for a coroutine or generator, which has yet to run."""
    if isinstance(value, (Generator, Awaitable, AsyncGenerator)):
        raise TypeError(
            f"the elastic function returned {value!r}, of which nothing has run yet, and when it runs the world is over: train "
            "within the function"
        )
    return value


def _run(job: Job, state: State, enter: Callable[[], T]) -> T:
    reason = ""
    while True:
        try:
            world = job.next_world(reason)
            state._begin(job)
            value = state._enter(enter)
            faults.reached(Point.RETURN, rank=world.rank, generation=world.generation)
            state._leave(world)
            job.control.vote()
        except BaseException as error:
            job.reporter.left_early()
            change = _find_change(error, job)
            if change is None:
                raise
            reason = "" if isinstance(change, HostsUpdatedInterrupt) else text_of(change)
            logger.debug("%s: %s", type(change).__name__, reason)
            # The frames of the failed step hold the old model wrapper, its buckets and its process group.
            for link in _chain(error):
                traceback.clear_frames(link.__traceback__)
            # A cleared frame keeps the function that it belongs to, and a nested one the module that it was called for.
            del change, link
        else:
            job.finish()
            faults.reached(Point.FINISHED, rank=world.rank, generation=world.generation)
            return value
        if job.world is not None:
            job.world.rest()
        # Restore after a planned interrupt, too: gradients, and changes that code made on its way out, belong to no commit.
        state.restore()


def _find_change(error: BaseException, job: Job) -> WorldChanged | None:
    """Return the change of the world that an exception comes from; None if it has another cause.

    User code may wrap our exceptions in its own. In a broken world errors of collectives are plain ``RuntimeError``s, and
    ``torch.distributed.checkpoint`` wraps these in a ``CheckpointException``, which is a mere ``BaseException``.
    """
    for link in _chain(error):
        if isinstance(link, WorldChanged):
            return link
        is_torchs = isinstance(link, RuntimeError) or type(link).__module__.startswith("torch.distributed.")
        if is_torchs and job.world is not None and job.world.is_broken():
            return job.world.lost(link)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
