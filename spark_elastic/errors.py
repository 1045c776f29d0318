"""Every error that spark_elastic raises on purpose.

::

    SparkElasticError
    ├── TrainingFailedError          the job failed; holds every failing worker's host, rank and traceback
    │   ├── RanksDifferError         ranks that should be equal are not: training was wrong
    │   ├── ResetLimitExceededError  more resets after failures than reset_limit allows
    │   ├── StateLostError           every copy of the committed state is gone
    │   └── NotFiniteLossError       a fit's loss is NaN or infinite, and terminateOnNaN says that this ends it
    ├── NotEnoughHostsError          start_timeout or elastic_timeout passed with fewer than min_np workers
    ├── NotInWorldError              rank(), size() … were asked before the first generation
    ├── TrainingCodeError            the training function would train wrongly; the message has the line to write
    ├── CheckpointError              a checkpoint (or saved model) cannot be written, read, or does not fit the job
    │   └── DamagedError             a file of a checkpoint or of a saved model is not what was written
    ├── DataError                    a dataset is broken, changed, or not what the job expects
    ├── ScriptFailedError            a script of --restart-on-change has failed too often; reaches the user as TrainingFailedError
    └── JobCancelledError            Spark or the user ended the job from outside

    WorldChanged(Exception)          raised into user code; caught by @elastic
    ├── WorkerLostError              a worker of this generation is gone: the state goes back to the last commit
    └── HostsUpdatedInterrupt        workers come or leave as planned: the state was just committed

Mistakes in arguments are ``ValueError`` and ``TypeError``. ``WorkerLostError`` and ``HostsUpdatedInterrupt`` are not
``RuntimeError``s, so that code which skips a batch on out-of-memory does not swallow them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "CheckpointError",
    "DamagedError",
    "DataError",
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
    """Base of all errors that end a job or refuse an operation."""

    # Whether it would come again however often it is tried, so that it ends the job when the first worker raises it.
    is_final = False


def name_worker(worker: int, rank: int | None) -> str:
    """Say which worker it is, in errors and logs."""
    return f"rank {rank} (worker {worker})" if rank is not None else f"worker {worker} (no rank yet)"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What is known of the end of one ``worker``: the ``host`` that it ran on, how it ended (``cause``), and its last words.

    ``rank`` is None for a worker that had not been in a world yet. ``traceback`` is empty where no Python exception
    was raised (a signal, an exit, a hang); ``last_lines`` holds the last lines of its output.
    """

    worker: int
    rank: int | None
    host: str
    cause: str
    traceback: str = ""
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{name_worker(self.worker, self.rank)} on {self.host}: {self.cause}"]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.last_lines:
            lines += ["    the last lines of its output:", *(f"    | {line}" for line in self.last_lines)]
        return "\n".join(lines)


WorkerFailure.__init__.__doc__ = "Keep the given facts; nothing is checked, and nothing is raised."


class TrainingFailedError(SparkElasticError):
    """The job failed. ``failures`` holds every failing worker, the latest last."""

    def __init__(self, message: str, failures: tuple[WorkerFailure, ...] = ()) -> None:
        """Keep the message and the failures, which ``str`` shows below the message; nothing is checked."""
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
    """Parameters or optimizer state differ between ranks that should be equal, or ranks train other ones. Names the first."""

    is_final = True


class ResetLimitExceededError(TrainingFailedError):
    """More resets were caused by failures than ``reset_limit`` allows."""


class StateLostError(TrainingFailedError):
    """Every worker that held the committed state is gone, and there is no durable checkpoint."""


class NotFiniteLossError(TrainingFailedError):
    """A fit's loss was NaN or infinite; says in which epoch and step. ``terminateOnNaN=False`` goes on all the same."""


class NotEnoughHostsError(SparkElasticError):
    """Fewer than ``min_np`` workers were there when ``start_timeout`` or ``elastic_timeout`` passed."""


class NotInWorldError(SparkElasticError):
    """There is no rank yet: the code runs above the elastic function, before the first generation."""


class TrainingCodeError(SparkElasticError):
    """The training function would train wrongly without a word. The message has the line to write."""

    is_final = True


class CheckpointError(SparkElasticError):
    """The checkpoint directory cannot be used, holds nothing whole, or its state is not this job's."""


class DamagedError(CheckpointError):
    """A file of a checkpoint, or of a saved model, is missing, damaged or forged: it is not what was written."""


class DataError(SparkElasticError):
    """A dataset is damaged, has changed while it was read, or does not hold what was asked of it."""


class JobCancelledError(SparkElasticError):
    """The job was ended from outside: the SparkContext stopped, or the job's Spark jobs were cancelled."""


class ScriptFailedError(SparkElasticError):
    """A script of ``--restart-on-change`` has failed more often than it may. The job fails with it, ``TrainingFailedError``."""


class WorldChanged(Exception):
    """The world that the code trains in has ended. ``@elastic`` catches it and enters the function again."""


class WorkerLostError(WorldChanged):
    """A worker of this generation is gone; the state goes back to the last commit."""


class HostsUpdatedInterrupt(WorldChanged):
    """Workers arrive or leave as planned; the state has just been committed and nothing is lost."""
