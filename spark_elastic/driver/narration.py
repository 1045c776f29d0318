"""Narrator: tells people in the driver's log who was lost, where and why, and how the job continued."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spark_elastic.errors import name_worker
from spark_elastic.protocol import records, reports
from spark_elastic.protocol.records import Record

# How many seconds a loss waits before it is logged. Its cause and its consequences usually become known meanwhile.
FLUSH_SECONDS = 1.0

# The level and the text of a log message.
Line = tuple[int, str]


@dataclass(slots=True)
class _Loss:
    """A lost worker that has not been logged yet: more may soon be known about how it ended and how the job continues."""

    worker: int
    who: str
    cause: str
    has_exited: bool = False
    meaning: str = ""

    def __str__(self) -> str:
        return f"{self.who} was lost: {self.meaning or self.cause}"


class Narrator:
    """Turns the machine's records into log lines; pure. Losses and their consequences are warnings; planned changes are not.

    A loss is logged as one line. It waits until it is known how the process ended and that the job continues, or until ``flush``.
    """

    def __init__(self, elastic: bool = True) -> None:
        self._elastic = elastic
        self._is_broken = False
        self._commit: str | None = None
        # Whether rank 0 of the newest world has not entered the user's function yet.
        self._is_beginning = False
        # How the state was lost, until the job has continued from its durable checkpoint.
        self._state_lost = ""
        # The host of every worker, and the workers of every generation in rank order.
        self._hosts: dict[int, str] = {}
        self._members: dict[int, list[int]] = {}
        # The generations and ranks for which a warning about slowness was logged.
        self._slow: set[tuple[int, int]] = set()
        self._waiting: list[_Loss] = []
        # How the job continues after these losses, once that is known.
        self._sequel = ""
        # The workers whose loss was logged before it was known how their process had ended.
        self._told: dict[int, str] = {}
        # What workers have raised, until their loss is logged. All ranks often raise the same error, which is shown once.
        self._tracebacks: dict[int, str] = {}
        self._shown = ""

    @property
    def is_waiting(self) -> bool:
        """Whether ``flush`` would return any lines."""
        return bool(self._waiting)

    def hear_traceback(self, worker: int, traceback: str) -> None:
        """Note what a worker has raised; it is logged with the worker's loss."""
        self._tracebacks[worker] = traceback.rstrip()

    def flush(self) -> list[Line]:
        """Return lines for the losses that wait, however little is known about them."""
        if not self._waiting:
            return []
        text = "; ".join(map(str, self._waiting)) + (self._sequel or self._consequence)
        for loss in self._waiting:
            if not loss.has_exited:
                self._told[loss.worker] = loss.who
            traceback = self._tracebacks.pop(loss.worker, "")
            if traceback and traceback != self._shown:
                text += f"\n{traceback}"
                self._shown = traceback
        self.forget()
        return [(logging.WARNING, text)]

    def forget(self) -> None:
        """Drop the losses that wait, because the job's error describes them."""
        self._waiting, self._sequel = [], ""

    def tell(self, record: Record) -> list[Line]:  # noqa: C901  # a case for each record
        """Return what is to be logged now."""
        match record:
            case records.WorkerLost(worker, rank, host, cause):
                self._waiting.append(_Loss(worker, f"{name_worker(worker, rank)} on {host}", cause))
            case records.WorkerExited(worker=worker, meaning=meaning, explains=explains):
                return self._note_exit(worker, meaning if explains else "")
            case records.WorldBroken(generation, reason, lost):
                return self._note_break(generation, reason, lost)
            case records.RunAgain(generation):
                return self._go_on(f"all of generation {generation} runs again, in new processes")
            case records.WorldInterrupted(generation, reason):
                return [(logging.INFO, f"generation {generation} ends at its next commit: {reason}")]
            case records.WorkerStarting(worker, name=name):
                self._hosts[worker] = name
            case records.WorldForming(generation, workers=workers, newest_commit=commit):
                self._commit, self._is_beginning = commit, True
                self._members[generation] = workers
            case records.WorkerReported(generation=generation, report=reports.SharesChanged() as change):
                return self._tell_shares(generation, change)
            case records.WorldFormed(generation, size):
                begins = "begins" if self._commit is None else f"goes on from commit {self._commit}"
                return self._go_on(f"generation {generation} of size {size} {begins}")
            case records.StateLost(reason=reason):
                self._is_broken = True
                self._state_lost = f"{reason}, so that the next world begins from the newest durable checkpoint"
                return [] if self._waiting else [(logging.WARNING, self._state_lost)]
            case records.WorkerReported(rank=0, generation=generation, report=reports.Entered(step=step)):
                return self._note_entry(generation, step)
            case records.NewcomersPaused():
                return [(logging.WARNING, _describe_pause(record))]
            case records.DriverPaused(seconds):
                return [(logging.WARNING, f"the driver stood still for {seconds:g} s")]
            case records.WorkerSlow() | records.WorkerTooSlow():
                return [(logging.WARNING, record.describe())]
            case records.WorldSized():
                return [(logging.INFO, record.describe())]
            case records.HostDraining(host, name):
                text = f"host {host} on {name} drains; its worker leaves at the next commit, unless it alone holds the state"
                return [(logging.INFO, text)]
            case records.HostCooling(host, name, seconds):
                text = f"host {host} on {name} gets no worker for {seconds:g} s, as its last ones died without a commit"
                return [(logging.INFO, text)]
        return []

    def _tell_shares(self, generation: int, change: reports.SharesChanged) -> list[Line]:
        """Warn of a slow rank once per generation; later changes of shares are corrections."""
        is_new = change.slow_rank is not None and (generation, change.slow_rank) not in self._slow
        if change.slow_rank is not None:
            self._slow.add((generation, change.slow_rank))
        level = logging.WARNING if is_new else logging.INFO
        return [(level, change.describe(functools.partial(self._name, generation)))]

    def _name(self, generation: int, rank: int) -> str:
        members = self._members.get(generation, [])
        if rank >= len(members):
            return f"rank {rank}"
        return f"{name_worker(members[rank], rank)} on {self._hosts[members[rank]]}"

    @property
    def _consequence(self) -> str:
        if self._state_lost:
            return f"; {self._state_lost}"
        # In a fixed world the next line says what follows: RunAgain, or the job's error.
        return "; its survivors go back to their last commit" if self._is_broken and self._elastic else ""

    def _note_break(self, generation: int, reason: str, lost: int | None) -> list[Line]:
        self._is_broken = True
        if any(loss.worker == lost for loss in self._waiting):
            return []
        return [(logging.WARNING, f"generation {generation} ends: {reason}{self._consequence}")]

    def _note_exit(self, worker: int, meaning: str) -> list[Line]:
        loss = next((loss for loss in self._waiting if loss.worker == worker), None)
        if loss is None:
            told = self._told.pop(worker, None)
            return [(logging.WARNING, f"{told} {meaning}")] if told is not None and meaning else []
        loss.has_exited, loss.meaning = True, meaning
        return self._flush_what_is_complete()

    def _go_on(self, text: str) -> list[Line]:
        level = logging.WARNING if self._is_broken else logging.INFO
        self._is_broken = False
        if not self._waiting:
            return [(level, text)]
        lost = f"; {self._state_lost}" if self._state_lost else ""
        self._sequel = f"{lost}. {text[0].upper()}{text[1:]}"
        return self._flush_what_is_complete()

    def _note_entry(self, generation: int, step: int) -> list[Line]:
        """Say from where a world without a commit continues, unless that is the beginning of the training."""
        level = logging.WARNING if self._state_lost else logging.INFO
        is_told = self._is_beginning and self._commit is None and (step > 0 or bool(self._state_lost))
        self._is_beginning, self._state_lost = False, ""
        begins = (
            f"goes on from the durable checkpoint of step {step}"
            if step
            else "starts over: no checkpoint had been written"
        )
        return [(level, f"generation {generation} {begins}")] if is_told else []

    def _flush_what_is_complete(self) -> list[Line]:
        is_complete = not self._is_broken and all(loss.has_exited for loss in self._waiting)
        return self.flush() if is_complete else []


class Narration:
    """Logs what a narrator tells, and has it flush losses after ``FLUSH_SECONDS`` at the latest. Not thread-safe."""

    def __init__(
        self,
        elastic: bool,
        log: Callable[[int, str], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self.narrator = Narrator(elastic)
        self._log = log
        self._call_later = call_later
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, record: Record) -> None:
        """Log what the narrator says about a record."""
        self._log_all(self.narrator.tell(record))
        if self.narrator.is_waiting and self._timer is None:
            self._timer = self._call_later(FLUSH_SECONDS, self._flush)

    def close(self) -> None:
        """Log the losses that wait, because the job is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _flush(self) -> None:
        self._timer = None
        self._log_all(self.narrator.flush())

    def _log_all(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._log(*line)


def _describe_pause(pause: records.NewcomersPaused) -> str:
    again = f"it is tried again in {pause.seconds:g} s"
    if pause.host is not None:
        return f"newcomers on {pause.host} are left out: {pause.reason}; training goes on without them, {again}"
    return (
        f"newcomers have broken {pause.failures} worlds in a row, the last time because {pause.reason}; "
        f"if min_np workers are left, training goes on without newcomers, and {again}"
    )
