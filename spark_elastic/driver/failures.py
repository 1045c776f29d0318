"""FailureBook: which workers failed and why, and when another try has become pointless."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from spark_elastic.errors import FAILED_BY, TrainingFailedError, WorkerFailure

# How often user code may raise the same exception without a commit in between before the job ends: otherwise a bad row would
# reset the job forever.
SAME_EXCEPTION_LIMIT = 3
# How many crashes (exit codes, SIGSEGV …) without a commit in between end the job. A SIGKILL comes from the cluster and never
# counts.
CRASH_LIMIT = 10
# How many failures are kept for the final error: enough to understand what happened, few enough to read.
KEPT = 32

_CLUSTERS_DOING = {-signal.SIGKILL, -signal.SIGTERM}


class FirstSign(Enum):
    """What the end of a worker looks like before its exit code is known."""

    PROCESS_DIED = "its process died"
    CONNECTION_BROKE = "its connection to the driver broke"


# What Gloo prints before it ends a process whose peer has sent something unexpected.
_MISMATCH = "collective mismatch"


def describe_exit(
    code: int, memory_setting: str | None, last_lines: Sequence[str] = (), injected: str | None = None
) -> str:
    """Say what an exit code (minus the signal, for a killed process) means, and what to look at.

    ``memory_setting`` gives workers more memory, if there is such a setting. ``last_lines`` are the last that the process
    printed. ``injected`` names the injected fault that has ended the process, if one has.
    """
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if injected is not None:
        return f"{f'exited with code {code}' if code >= 0 else f'killed by {name}'}, by the injected fault {injected}"
    if code >= 0:
        hint = f" (137 on a cluster: raise {memory_setting})" if code == 137 and memory_setting else ""
        return f"exited with code {code} before its result had arrived{hint}"
    if code == -signal.SIGABRT and any(_MISMATCH in line for line in last_lines):
        return (
            f"killed by {name}, by Gloo: this rank and another one were in different collectives. Look for a call that some "
            "ranks only make, such as one below `if rank() == 0` of a collective, of an evaluation, or of the state_dict() of a "
            "ZeroRedundancyOptimizer"
        )
    if code != -signal.SIGKILL:
        return f"killed by {name}"
    if memory_setting is None:
        return f"killed by {name}; the kernel may have run out of memory"
    return f"killed by {name}; if the kernel ran out of memory, raise {memory_setting}"


@dataclass(slots=True)
class FailureBook:
    """Keeps the failures of a job, and counts those that repeat without progress between them."""

    # The name of the setting that gives workers more memory, if there is one.
    memory_setting: str | None = None
    failures: dict[int, WorkerFailure] = field(default_factory=dict)
    # The classes of the errors of this package that workers have raised; empty for others.
    kinds: dict[int, str] = field(default_factory=dict)
    # The workers whose end is known only by its first sign, and those whose last lines have not arrived yet.
    _unexplained: set[int] = field(default_factory=set)
    _speaking: set[int] = field(default_factory=set)
    # The injected faults that are about to end workers.
    injected: dict[int, str] = field(default_factory=dict)
    # (generation, signature) of each failure that counts; entries of generations before the last progress are dropped.
    _counted: list[tuple[int, str]] = field(default_factory=list)

    def add(self, failure: WorkerFailure, *, is_explained: bool = True) -> None:
        """Keep a failure, and forget the oldest if there are too many. An unexplained failure waits for the exit code."""
        self.failures[failure.worker] = failure
        if not is_explained:
            self._unexplained.add(failure.worker)
        if failure.traceback:
            self._speaking.add(failure.worker)
        while len(self.failures) > KEPT:
            del self.failures[next(iter(self.failures))]

    def meaning_of_exit(self, worker: int, code: int, last_lines: Sequence[str]) -> str:
        """Say what the exit code of a worker means, and forget the injected fault that has ended it, if one has."""
        return describe_exit(code, self.memory_setting, last_lines, self.injected.pop(worker, None))

    def explain(self, worker: int, meaning: str, last_lines: tuple[str, ...]) -> bool:
        """Add what the exit of a worker means. Return whether only the first sign of its end was known before."""
        is_why = worker in self._unexplained
        self._unexplained.discard(worker)
        self._speaking.discard(worker)
        known = self.failures.get(worker)
        if known is not None:
            cause = meaning if is_why else known.cause
            self.failures[worker] = replace(known, cause=cause, last_lines=last_lines or known.last_lines)
        return is_why

    def as_raised(self, error: TrainingFailedError) -> TrainingFailedError:
        """Return the error in the class that says why, if an exception was the last failure, and all have been of one kind."""
        kinds = {self.kinds.get(failure.worker, "") for failure in error.failures if failure.traceback}
        is_raised = len(kinds) == 1 and error.failures[-1].traceback != ""
        if type(error) is not TrainingFailedError or not is_raised:
            return error
        return FAILED_BY.get(kinds.pop(), TrainingFailedError)(error.message, error.failures)

    def lacks_exit_of(self, error: TrainingFailedError) -> bool:
        """Whether an exit is still to explain how one of the error's workers was lost, or to bring its last lines."""
        awaited = self._unexplained | self._speaking
        return any(failure.worker in awaited for failure in error.failures)

    def retold(self, error: TrainingFailedError) -> TrainingFailedError:
        """Return the error with what is known about its failures by now."""
        message = error.message
        for failure in error.failures:
            message = message.replace(failure.as_loss(), self.failures[failure.worker].as_loss())
        return type(error)(message, tuple(self.failures[failure.worker] for failure in error.failures))

    def count_exception(self, generation: int, where: str, error: str) -> None:
        """Count an exception that the line ``where`` of user code has raised."""
        self._counted.append((generation, f"{error.split(':', 1)[0]} at {where}"))

    def count_exit(self, generation: int, code: int) -> None:
        """Count the exit of a process, unless the code says that the cluster ended it."""
        if code not in _CLUSTERS_DOING:
            self._counted.append((generation, ""))

    def progressed(self, generation: int) -> None:
        """Note a commit of this generation: failures in earlier ones no longer count."""
        self._counted = [entry for entry in self._counted if entry[0] >= generation]

    def verdict(self) -> str | None:
        """Return why another try is pointless; None if it is not."""
        counts = Counter(signature for _, signature in self._counted)
        for signature, times in counts.items():
            if signature and times >= SAME_EXCEPTION_LIMIT:
                return f"the same exception ({signature}) was raised {times} times without a commit between"
        if counts[""] >= CRASH_LIMIT:
            return f"workers crashed {counts['']} times without a commit between"
        return None

    def story(self) -> tuple[WorkerFailure, ...]:
        """Return the failures that are kept."""
        return tuple(self.failures.values())
