"""Every error that spark_elastic raises on purpose.

::

    SparkElasticError
    ├── TrainingFailedError          the job failed; holds host, rank and traceback of the workers that failed
    │   ├── RanksDifferError         ranks that should be equal are not: training was wrong
    │   ├── ResetLimitExceededError  more resets after failures than reset_limit allows
    │   ├── StateLostError           every copy of the committed state is gone
    │   ├── TrainingCheckpointError  a worker met a CheckpointError, which this is as well
    │   │   └── TrainingDamagedError a worker met a DamagedError, which this is as well
    │   ├── TrainingDataError        a worker met a DataError, which this is as well
    │   ├── TrainingCodeFailedError  a worker met a TrainingCodeError, which this is as well
    │   └── NotFiniteLossError       a fit's loss is NaN or infinite, and terminateOnNaN says that this ends it
    ├── NotEnoughHostsError          start_timeout or elastic_timeout passed with fewer than min_np workers
    ├── NotInWorldError              rank(), size() … were asked before the first generation
    ├── TrainingCodeError            the training function would train wrongly
    ├── CheckpointError              a checkpoint (or saved model) cannot be written, read, or does not fit the job
    │   └── DamagedError             a file of a checkpoint or of a saved model is not what was written
    ├── DataError                    a dataset is broken, changed, or not what the job expects
    ├── DiscoveryError               host_discovery_script is missing, failed at its first run, or printed no hosts
    ├── ScriptFailedError            a script of --restart-on-change has failed too often; reaches the user as TrainingFailedError
    └── JobCancelledError            the job was ended from outside: its session stopped, or its Spark jobs were cancelled

    WorldChanged(Exception)          raised in user code; caught by @elastic
    ├── WorkerLostError              a worker of this generation is gone: the state goes back to the last commit
    └── HostsUpdatedInterrupt        workers come or leave as planned: the state was just committed

Mistakes in arguments are ``ValueError`` and ``TypeError``. ``WorkerLostError`` and ``HostsUpdatedInterrupt`` are not
``RuntimeError``s, so that code which skips a batch on out-of-memory does not swallow them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = [
    "CheckpointError",
    "DamagedError",
    "DataError",
    "DiscoveryError",
    "HostsUpdatedInterrupt",
    "JobCancelledError",
    "NotEnoughHostsError",
    "NotFiniteLossError",
    "NotInWorldError",
    "RanksDifferError",
    "ResetLimitExceededError",
    "SparkElasticError",
    "StateLostError",
    "TrainingCodeError",
    "TrainingFailedError",
    "WorkerFailure",
    "WorkerLostError",
    "WorldChanged",
]


class SparkElasticError(Exception):
    """Base class of all errors that end a job or refuse an operation."""

    # Whether a retry would always raise this error again. If so, the first worker that raises it ends the job.
    is_final = False


E = TypeVar("E", bound=BaseException)


def final(error: E) -> E:
    """Return an error marked as one that ends the job, whichever worker raises it first."""
    object.__setattr__(error, "is_final", True)  # also one of a class that forbids it
    return error


def name_worker(worker: int, rank: int | None) -> str:
    """Return a worker's name for errors and logs."""
    return f"rank {rank} (worker {worker})" if rank is not None else f"worker {worker} (no rank yet)"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How one ``worker`` ended: the ``host`` that it ran on, the ``cause``, and its last output.

    ``rank`` is None if the worker had not joined a world yet. ``traceback`` is empty if no Python exception was raised (a
    signal, an exit, a hang). ``last_lines`` holds the last lines of the worker's output.
    """

    worker: int
    rank: int | None
    host: str
    cause: str
    traceback: str = ""
    last_lines: tuple[str, ...] = ()

    def as_loss(self) -> str:
        """Return the failure as a sentence about the loss of the worker."""
        who = name_worker(self.worker, None) if self.rank is None else f"rank {self.rank}"
        return f"{who} on {self.host} was lost: {self.cause}"

    def __str__(self) -> str:
        lines = [f"{name_worker(self.worker, self.rank)} on {self.host}: {self.cause}"]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.last_lines:
            lines += ["    the last lines of its output:", *(f"    | {line}" for line in self.last_lines)]
        return "\n".join(lines)


WorkerFailure.__init__.__doc__ = "Keep the given facts; nothing is checked, and nothing is raised."


class TrainingFailedError(SparkElasticError):
    """The job failed. ``failures`` lists the workers that failed, the latest last, at most the newest 32."""

    def __init__(self, message: str, failures: tuple[WorkerFailure, ...] = ()) -> None:
        """Store the message and the failures without checks. ``str`` shows the failures below the message."""
        super().__init__(message, failures)
        self.message = message
        self.failures = failures

    def __str__(self) -> str:
        parts, shown = [self.message], set()
        for failure in self.failures:
            known = failure.traceback != "" and failure.traceback in shown
            shown.add(failure.traceback)
            parts.append(str(replace(failure, traceback="    (the same traceback)") if known else failure))
        return "\n\n".join(parts)


class RanksDifferError(TrainingFailedError):
    """Ranks that should be equal differ in parameters, optimizer state, or which parameters they train. Names the first."""

    is_final = True


class ResetLimitExceededError(TrainingFailedError):
    """Failures caused more resets than ``reset_limit`` allows."""


class StateLostError(TrainingFailedError):
    """All workers that held the committed state are gone, and there is no durable checkpoint."""


class NotFiniteLossError(TrainingFailedError):
    """A fit's loss was NaN or infinite. Names the epoch and step. With ``terminateOnNaN=False`` the fit continues anyway."""

    is_final = True


class NotEnoughHostsError(SparkElasticError):
    """Fewer than ``min_np`` workers were available when ``start_timeout`` or ``elastic_timeout`` passed."""


class NotInWorldError(SparkElasticError):
    """There is no rank yet, because this code runs above the elastic function, before the first generation."""


class TrainingCodeError(SparkElasticError):
    """The training function would silently train wrongly. The message has the line to write instead.

    If a worker raises this error, ``run`` raises one that is a ``TrainingFailedError`` as well.
    """

    is_final = True


class CheckpointError(SparkElasticError):
    """The checkpoint directory is unusable, holds no complete checkpoint, or holds the state of another job."""


class DamagedError(CheckpointError):
    """A file of a checkpoint or saved model is missing, damaged or forged."""


class DataError(SparkElasticError):
    """A dataset is damaged, changed while it was being read, or lacks what was requested from it."""


class DiscoveryError(SparkElasticError):
    """The host discovery script failed, or printed something that is not a list of hosts."""


class TrainingCodeFailedError(TrainingFailedError, TrainingCodeError):
    """The job failed because its training function would silently train wrongly. The message has the line to write instead."""


class TrainingCheckpointError(TrainingFailedError, CheckpointError):
    """The job failed because a worker could not use its checkpoint."""


class TrainingDamagedError(TrainingCheckpointError, DamagedError):
    """The job failed because all of its checkpoints are damaged."""


class TrainingDataError(TrainingFailedError, DataError):
    """The job failed because a worker could not use its dataset."""


# What the job fails with if workers raise an error of this name; with other errors it is a plain TrainingFailedError.
FAILED_BY: Mapping[str, type[TrainingFailedError]] = {
    CheckpointError.__name__: TrainingCheckpointError,
    DamagedError.__name__: TrainingDamagedError,
    DataError.__name__: TrainingDataError,
    NotFiniteLossError.__name__: NotFiniteLossError,
    RanksDifferError.__name__: RanksDifferError,
    StateLostError.__name__: StateLostError,
    TrainingCodeError.__name__: TrainingCodeFailedError,
}


def public_name(error: BaseException) -> str:
    """Return the name of the error's nearest class in this module; empty for errors that are not of this package."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return next(kinds, "") if isinstance(error, SparkElasticError) else ""


class JobCancelledError(SparkElasticError):
    """The job was ended from outside: the SparkContext stopped, or the job's Spark jobs were cancelled."""


class ScriptFailedError(SparkElasticError):
    """A ``--restart-on-change`` script failed more often than it may. The job then fails with ``TrainingFailedError``.

    ``script_traceback`` is what torch's ``@record`` has written in the script; empty if it has written nothing.
    """

    is_final = True

    def __init__(self, message: str, script_traceback: str = "") -> None:
        """Store both without checks."""
        super().__init__(message)
        self.script_traceback = script_traceback


class WorldChanged(Exception):
    """The current world has ended. ``@elastic`` catches this and enters the function again."""


class WorkerLostError(WorldChanged):
    """A worker of this generation is gone; the state goes back to the last commit."""


class HostsUpdatedInterrupt(WorldChanged):
    """Workers arrive or leave as planned. The state has just been committed, so nothing is lost."""

    def __init__(self, message: str = "workers arrive or leave") -> None:
        """Make the interrupt, with what is logged of it."""
        super().__init__(message)
