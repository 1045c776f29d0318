"""Functions that tell user code about its world.

Outside a job they answer as in a world of one, so that a script or a notebook cell can be tried unchanged.
"""

from __future__ import annotations

import os

import torch

from spark_elastic.errors import NotInWorldError
from spark_elastic.protocol.ticket import DEVICE_VARIABLE
from spark_elastic.worker.job import current_job
from spark_elastic.worker.world import World


def current_world() -> World | None:
    """Return the world of this process; None outside a job. Raises ``NotInWorldError`` before the first generation."""
    job = current_job()
    if job is None:
        return None
    if job.world is None:
        raise NotInWorldError(
            "there is no rank here: before its first generation a worker belongs to no world. Ask inside the function "
            "decorated with @elastic, or after it; device() works everywhere. A function that is to have a rank from its first "
            "line on runs in a fixed world: run(fn, num_proc=…, elastic=False)"
        )
    return job.world


def rank() -> int:
    """Return this worker's rank in its world, from 0 on; 0 outside a job.

    This function and the following ones raise ``NotInWorldError`` before the job's first generation.
    """
    world = current_world()
    return 0 if world is None else world.rank


def size() -> int:
    """Return the number of workers in the world; 1 outside a job."""
    world = current_world()
    return 1 if world is None else world.size


def local_rank() -> int:
    """Return this worker's number among the workers on its machine, from 0 on."""
    world = current_world()
    return 0 if world is None else world.me.local_rank


def local_size() -> int:
    """Return the number of workers on this machine."""
    world = current_world()
    return 1 if world is None else world.me.local_size


def cross_rank() -> int:
    """Return this worker's number among the workers with the same ``local_rank`` on all machines, from 0 on."""
    world = current_world()
    return 0 if world is None else world.me.cross_rank


def cross_size() -> int:
    """Return the number of machines that have a worker with this ``local_rank``."""
    world = current_world()
    return 1 if world is None else world.me.cross_size


def generation() -> int:
    """Return the number of the current generation, which grows with every reset; 0 outside a job."""
    world = current_world()
    return 0 if world is None else world.generation


def device() -> torch.device:
    """Return the device to train on: the GPU that Spark assigned to the task, else the CPU; outside a job, a GPU if any."""
    if current_job() is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))


def process_group() -> torch.distributed.ProcessGroup | None:
    """Return the generation's ``torch.distributed`` process group, valid until the next reset; None outside a job."""
    world = current_world()
    return None if world is None else torch.distributed.group.WORLD
