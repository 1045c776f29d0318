"""What the driver sends to every worker. Apart from the worker, because the driver needs no torch."""

from __future__ import annotations

import msgspec

from spark_elastic.faults import Fault


class CheckpointPlan(msgspec.Struct, frozen=True):
    """Where commits are written, as which attempt of the job, and how many seconds apart.

    storage_options: a pickled dict, or nothing.
    """

    url: str
    attempt: int
    interval: float
    storage_options: bytes = b""


class Payload(msgspec.Struct, frozen=True):
    """The user's call (a pickled ``(fn, args, kwargs)``) and what a worker has to know of the job."""

    call: bytes
    form_timeout: float
    faults: tuple[Fault, ...] = ()
    checkpoint: CheckpointPlan | None = None
    elastic: bool = True
