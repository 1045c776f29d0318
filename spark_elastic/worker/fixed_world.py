"""``run(elastic=False)``: a world of fixed size around the whole of the user's function.

The function finds its rank, collectives and torch's default group from its first line on. When a worker is lost, the driver
ends all the others, too, and everything runs again in new processes: nothing of one attempt, such as its modules, its globals
or code that swallows errors, can affect the next one. Therefore there is no state to restore here, and no loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from spark_elastic.errors import WorldChanged
from spark_elastic.protocol.fault_points import Point
from spark_elastic.worker import faults
from spark_elastic.worker.backends import BACKENDS, HOST_BACKEND
from spark_elastic.worker.job import Job
from spark_elastic.worker.torchrun import rank_variables
from spark_elastic.worker.tracebacks import text_of
from spark_elastic.worker.world import World

T = TypeVar("T")


def call_in_fixed_world(job: Job, call: Callable[[], T]) -> T:
    """Form the world, call the user's function in it, and return its value once all ranks have returned.

    When a worker is lost this does not return: the driver ends this process.
    """
    try:
        faults.reached(Point.READY)
        world = job.next_world("")
        os.environ.update(rank_variables(world))
        _accept_init_process_group(world)
        value = call()
        faults.reached(Point.RETURN, rank=world.rank, generation=world.generation)
        if job.state is not None:
            job.state._leave(world)
        job.control.vote()
    except BaseException as error:
        if not isinstance(error, WorldChanged) and (job.world is None or not job.world.is_broken()):
            raise
        # The world is broken, so the exception comes from a failed collective, whatever user code has turned that into.
        job.control.ready(text_of(error))
        raise
    job.finish()
    faults.reached(Point.FINISHED, rank=world.rank, generation=world.generation)
    return value


def _accept_init_process_group(world: World) -> None:
    """Make ``init_process_group()``, with which TorchDistributor functions begin, accept the existing group."""
    of_torch = dist.init_process_group

    @functools.wraps(of_torch)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            of_torch(backend, *args, **kwargs)
            return
        for name, ours in (("world_size", world.size), ("rank", world.rank)):
            if kwargs.get(name, -1) not in (-1, ours):
                raise ValueError(
                    f"init_process_group({name}={kwargs[name]}) was called, but this world has {name}={ours}; leave it out"
                )
        if backend in BACKENDS and backend not in (HOST_BACKEND, world.backend):
            raise ValueError(
                f"init_process_group({backend!r}) was called, but run() has formed this world with {world.backend!r}. Call "
                f"init_process_group('gloo'), or give run(backend={backend!r}). Without backend= run() takes nccl if every "
                "worker has a GPU of its own: have Spark give each task one"
            )

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
