"""What a process needs to join a job: where the driver is, the key that proves membership, and what to run.

A task and its worker use the ticket to connect to the driver, which sends each worker the payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from spark_elastic._text import shown
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.fault_points import Fault

# The variable in which the task tells a worker its device, if Spark has assigned a GPU to the task.
DEVICE_VARIABLE = "SPARK_ELASTIC_DEVICE"
# The variable that tells a worker that nobody has chosen its number of threads: it follows from the workers per machine.
THREADS_VARIABLE = "SPARK_ELASTIC_DEFAULT_THREADS"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Travels to tasks in Spark's closure, and otherwise over private sockets; never in the environment or in arguments."""

    run_id: str
    addresses: tuple[tuple[str, int], ...]
    credentials: Credentials
    network_interface: str | None = None


class CheckpointPlan(msgspec.Struct, frozen=True):
    """Where commits are written, as which attempt of the job, how many seconds apart, and how many of them are kept.

    storage_options: a pickled dict, or nothing. best: the metric by which the best are kept, too, and "min" or "max".
    """

    url: str
    attempt: int
    interval: float
    keep: int
    storage_options: bytes = b""
    best: tuple[str, Literal["min", "max"]] | None = None

    def __repr__(self) -> str:
        return f"CheckpointPlan({shown(self.url)!r}, attempt={self.attempt})"  # the options may hold secrets


class Payload(msgspec.Struct, frozen=True):
    """The user's call (a pickled ``(fn, args, kwargs, sys.argv)``) and what a worker has to know about the job."""

    call: bytes
    form_timeout: float
    max_np: int
    faults: tuple[Fault, ...] = ()
    checkpoint: CheckpointPlan | None = None
    elastic: bool = True
