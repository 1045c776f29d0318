"""Runtime: everything that a worker takes from outside.

The defaults are the real implementations; the simulation passes in its own.
"""

from __future__ import annotations

import logging
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy
import torch

from spark_elastic.checkpoint.writer import CheckpointWriter
from spark_elastic.data.pinning import set_pin
from spark_elastic.protocol.reports import GpuUsed
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.faults import Injector
from spark_elastic.worker.gpu import use_of_gpu
from spark_elastic.worker.group import Group
from spark_elastic.worker.process.program_end import end_failed_program, end_program
from spark_elastic.worker.system import System

if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler  # it takes no parameter before Python 3.11

logger = logging.getLogger("spark_elastic")


def prepare_process() -> None:
    """Turn a process that has just been forked into a worker."""
    _reseed()
    _allow_all_descriptors()
    _name_our_warnings()


class _UntilConfigured(_Handler):
    """Writes to stderr until user code configures logging. Then the package's records go where all others do."""

    def handle(self, record: logging.LogRecord) -> bool:
        return False if logging.getLogger().handlers else super().handle(record)


def _name_our_warnings() -> None:
    """Name the logger in our warnings. The root logger is left to user code, because ``basicConfig`` works only once."""
    handler = _UntilConfigured()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)


def _reseed() -> None:
    """Give this fork random numbers of its own, as a fresh interpreter would have."""
    random.seed()
    numpy.random.seed()
    torch.seed()


def _allow_all_descriptors() -> None:
    """Raise the soft limit of open files to the hard one: each peer takes four descriptors, and user code needs some, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        logger.debug("the limit of open files stays as it is", exc_info=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime(System):
    """Everything that one worker takes from outside."""

    # Turns the process into a worker.
    prepare: Callable[[], None] = prepare_process
    # End the user's function as Python ends a program; the first one calls its argument meanwhile.
    end_program: Callable[[Callable[[], None]], None] = end_program
    end_failed_program: Callable[[], None] = end_failed_program
    # The connection to the driver, and the process group of a generation.
    control: Callable[..., ControlClient] = ControlClient
    group: Callable[..., Group] = Group
    # The writer of durable checkpoints, and how loaders get the facts about the data that the whole job shares.
    checkpoints: Callable[..., CheckpointWriter] = CheckpointWriter
    set_pin: Callable[..., None] = set_pin
    # The process's use of its GPU, called on its training thread.
    gpu: Callable[[], GpuUsed | None] = use_of_gpu
    # The injector of faults at the named points of the protocol.
    injector: Callable[..., Callable[..., None]] = Injector


REAL_RUNTIME = Runtime()
