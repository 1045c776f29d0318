"""Commands: what the ``DriverMachine`` wants done. Names are imperatives; the service executes commands in order."""

from __future__ import annotations

import msgspec

from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.messages import Member
from spark_elastic.protocol.records import DriverRecord


class StartWorker(msgspec.Struct, frozen=True):
    """Have the host start a training process."""

    host: int
    worker: int


class KillWorker(msgspec.Struct, frozen=True):
    """Have the host kill its training process."""

    host: int
    worker: int


class RestartTask(msgspec.Struct, frozen=True):
    """Have the task raise, so that Spark starts it again, perhaps elsewhere."""

    host: int
    reason: str


class ReleaseTask(msgspec.Struct, frozen=True):
    """Have the task end well, because the job no longer needs its slot."""

    host: int


class YieldSlots(msgspec.Struct, frozen=True):
    """Give all slots back to Spark and ask for them again later: another run may be waiting for them."""


class FormWorld(msgspec.Struct, frozen=True):
    """Tell the members that they form the next world."""

    generation: int
    members: tuple[Member, ...]
    previous_size: int


class InterruptWorld(msgspec.Struct, frozen=True):
    """Have the workers leave the world at their next commit."""

    generation: int
    workers: tuple[int, ...]


class AbortWorld(msgspec.Struct, frozen=True):
    """Have the workers leave the world at once, in the middle of a collective if need be."""

    generation: int
    workers: tuple[int, ...]
    reason: str


class AbortDevice(msgspec.Struct, frozen=True):
    """Have the workers abort the device's group, since all ranks that had not come back have answered ``AbortWorld``.

    A world over Gloo alone has no such group, so there is nothing to do.
    """

    generation: int
    workers: tuple[int, ...]


class FinishWorld(msgspec.Struct, frozen=True):
    """Tell the workers that all of them have left the elastic function."""

    generation: int
    workers: tuple[int, ...]


class LeaveJob(msgspec.Struct, frozen=True):
    """Have the worker end, because the job no longer needs it."""

    worker: int


class FinishJob(msgspec.Struct, frozen=True):
    """End the job with the results of these workers, which are in rank order."""

    workers: tuple[int, ...]


class FailJob(msgspec.Struct, frozen=True):
    """End the job with an error."""

    error: SparkElasticError


class Record(msgspec.Struct, frozen=True):
    """Write an entry into the event log."""

    record: DriverRecord


Command = (
    StartWorker
    | KillWorker
    | RestartTask
    | ReleaseTask
    | YieldSlots
    | FormWorld
    | InterruptWorld
    | AbortWorld
    | AbortDevice
    | FinishWorld
    | LeaveJob
    | FinishJob
    | FailJob
    | Record
)
