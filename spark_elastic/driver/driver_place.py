"""Where the driver of a job runs: the interface of such a place, and what every place is given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import cloudpickle
import msgspec

from spark_elastic._text import shown, without_secrets
from spark_elastic.checkpoint.best import Metric
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import KEPT
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import CheckpointError
from spark_elastic.launchers.base import Launcher
from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.records import JobStarted
from spark_elastic.protocol.ticket import CheckpointPlan, Payload

# How often a waiting ``run`` lets Python handle signals.
SIGNAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class CheckpointWish:
    """The user's arguments for a durable checkpoint."""

    url: str = field(repr=False)  # it and the options may hold secrets
    interval: float
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)
    keep: int = KEPT
    best: Metric | None = None

    def check(self) -> None:
        """Raise ``CheckpointError`` if the checkpoint directory cannot be written. Leaves a job that writes there alone."""
        with self._opened() as directory:
            directory.try_to_write()

    def claim(self) -> CheckpointPlan:
        """Claim the next attempt in the checkpoint directory. Raises ``CheckpointError`` if it cannot be written."""
        with self._opened() as directory:
            attempt = directory.claim()
        options = cloudpickle.dumps(dict(self.storage_options)) if self.storage_options else b""
        best = None if self.best is None else (self.best.name, self.best.mode)
        return CheckpointPlan(self.url, attempt, float(self.interval), self.keep, options, best)

    @contextmanager
    def _opened(self) -> Iterator[CheckpointDirectory]:
        try:
            yield CheckpointDirectory(self.url, self.storage_options)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint={shown(self.url)!r} cannot be written: {type(error).__name__}: {without_secrets(error, self.url)}"
            ) from error


class DriverPlace(Protocol):
    """Runs one job's driver. It is constructed with the user's wish for a checkpoint, or None.

    own_slots: how many of the launcher's slots are not for workers.
    """

    own_slots: ClassVar[int]

    def __init__(self, wish: CheckpointWish | None) -> None: ...

    def check(self, launcher: Launcher, host_discovery_script: str | os.PathLike[str] | None) -> None:
        """Do what can fail before anything is started. Raises ``CheckpointError``, or ``ValueError`` for wrong arguments."""

    def sizes(
        self, launcher: Launcher, num_proc: int | None, min_np: int | None, max_np: int | None
    ) -> tuple[int, int, int]:
        """Fill in sizes that are None from the slots besides the driver's. Return ``min_np``, ``num_proc`` and ``max_np``."""

    def run(
        self, launcher: Launcher, settings: JobSettings, call: bytes, log: EventLog, printer: OutputPrinter
    ) -> list[bytes]:
        """Run the job until it ends. Return the pickled results in rank order, or raise the job's error.

        Raises ``CheckpointError`` if the checkpoint cannot be claimed.
        """


def begin_job(
    log: EventLog,
    run_id: str,
    settings: JobSettings,
    call: bytes,
    faults: tuple[Fault, ...],
    wish: CheckpointWish | None,
    application: str,
) -> bytes:
    """Claim the checkpoint and record that a job begins. Return the encoded job that each of its workers is given.

    Whatever else may be refused comes before: a claim ends the checkpoints of another job that writes there.
    """
    checkpoint = None if wish is None else wish.claim()
    log.record(
        JobStarted(
            run_id=run_id,
            min_np=settings.min_np,
            num_proc=settings.num_proc,
            max_np=settings.max_np,
            attempt=None if checkpoint is None else checkpoint.attempt,
            application=application,
        )
    )
    return msgspec.msgpack.encode(
        Payload(call, settings.form_timeout, settings.max_np, faults, checkpoint, settings.elastic)
    )
