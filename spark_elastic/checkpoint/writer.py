"""A worker's part in the durable checkpoints of its job: it restores them, and writes them while it is rank 0."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgspec

from spark_elastic._text import as_utf8, shown, without_secrets
from spark_elastic.checkpoint.best import BestKept, Metric, Score
from spark_elastic.checkpoint.content import SavedState, decode, encode, encode_joined
from spark_elastic.checkpoint.daemon_executor import DaemonExecutor
from spark_elastic.checkpoint.directory import VERSION_OF_PARTS, CheckpointDirectory, RemovedError, SupersededError
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.checkpoint.newest import load_newest
from spark_elastic.checkpoint.parts import Part, Written, encode_part, join
from spark_elastic.checkpoint.skeleton import Lender
from spark_elastic.checkpoint.tensors import file_pieces
from spark_elastic.errors import CheckpointError, WorkerLostError
from spark_elastic.protocol import reports
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.ticket import CheckpointPlan

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("spark_elastic")

# A job waits at its end for its last checkpoint, unless no piece of it has been written for this long.
STALL_SECONDS = 120.0
# While a rank writes its part of a checkpoint, it tells rank 0 of progress no more often than this.
TELL_SECONDS = 10.0
# The pauses before a store that fails while a checkpoint is loaded is asked again.
RESTORE_PAUSES = (0.5, 1.0, 2.0)


class PartMeeting(Protocol):
    """How ranks tell rank 0 that they have written their parts."""

    def is_wanted(self) -> bool:
        """Whether rank 0 wants the parts. May block. Raises ``WorkerLostError`` if the generation is over."""
        ...

    def tell(self) -> None:
        """Tell rank 0, from another rank, that there is progress. Raises ``WorkerLostError`` if the generation is over."""
        ...

    def bring(self, content: bytes) -> None:
        """Tell rank 0, from another rank, what has been written; nothing follows. Raises ``WorkerLostError``, too."""
        ...

    def collect(self, progress: Callable[[], None]) -> list[bytes]:
        """On rank 0, wait for what all other ranks bring; return it in rank order. Calls ``progress`` when a rank reports some.

        Raises ``WorkerLostError`` if a rank is lost.
        """
        ...


class CheckpointWriter:
    """Writes snapshots on a thread of its own, one at a time; the user's thread only hands them over.

    A failed write causes a warning and an event. A later commit tries again, after a pause that grows with each failure, up to
    the interval. ``report`` takes reports for the event log, ``beat`` is called whenever a long wait or read makes progress.
    """

    def __init__(
        self, plan: CheckpointPlan, report: Callable[[reports.Report], None], beat: Callable[[], None]
    ) -> None:
        self.attempt = plan.attempt
        self._url = plan.url
        self._name = shown(plan.url)  # for messages
        self._storage_options = plan.storage_options
        self._interval = plan.interval
        self._keep = plan.keep
        self._best = None if plan.best is None else BestKept(Metric(*plan.best), plan.keep, self._read_scores)
        self._report = report
        self._beat = beat
        self._pool = DaemonExecutor("spark_elastic-checkpoint")  # a store may never answer
        self._writing: Future[None] | None = None
        # A new writer writes at once, because it does not know the age of its predecessor's last checkpoint.
        self._due_at = 0.0
        self._asked = False
        self._failures = 0
        # How many checkpoints in a row were given up because the world changed.
        self._given_up = 0
        self._superseded = False
        self._pieces = 0
        self._durable_steps: int | None = None
        # The rank and the steps with which this process writes its part of the last commit.
        self._last_part: tuple[int, int] | None = None
        self._begun: CheckpointName | None = None
        self._damaged: set[CheckpointName] = set()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        # The last write is complete, or the worker is failing and its process is about to end.
        self._pool.shutdown(wait=False)

    @property
    def metric(self) -> Metric | None:
        """The metric by which the best checkpoints are kept; None if only the newest are."""
        return None if self._best is None else self._best.metric

    def restore(self, device: torch.device) -> SavedState | None:
        """Load the newest undamaged checkpoint, with the job's pickled objects; None if there is none.

        A store that fails is asked again, a few times.
        """
        for pause in RESTORE_PAUSES:
            try:
                return self._restore(device)
            except OSError as error:
                logger.warning(
                    "%s cannot be read, and is tried again in %g s: %s",
                    self._directory.name,
                    pause,
                    self._told(error),
                )
                time.sleep(pause)
        return self._restore(device)

    def _restore(self, device: torch.device) -> SavedState | None:
        def load(name: CheckpointName) -> SavedState:
            return decode(self._directory, name, unpickle=True, device=device, progress=self._beat)

        def skip(name: CheckpointName) -> None:
            if name not in self._damaged:
                self._damaged.add(name)
                self._report(reports.CheckpointDamaged(str(name)))

        self._directory.check_claim(self.attempt)
        saved = load_newest(self._directory, load, skip)
        if saved is not None:
            self._durable_steps = saved.steps
            self._report(reports.CheckpointRestored(str(saved.name), saved.steps))
        return saved

    def ask(self) -> None:
        """Request that a commit be written as soon as possible."""
        self._asked = True

    def is_due(self) -> bool:
        """Whether to write this commit: no other is being written, and the interval has passed or a write was requested."""
        return not self._is_writing and not self._superseded and (self._asked or time.monotonic() >= self._due_at)

    def begin(self, commit: CommitId, snapshots: Lender) -> None:
        """Begin to write the current snapshot, that of ``commit``. Blocks at most as long as a copy of it takes."""
        name = self._begin(commit)
        snapshot = snapshots.lend()

        def write() -> int:
            try:
                self._directory.check_claim(self.attempt)
                return self._directory.write(name, encode(snapshot), self._progress)
            finally:
                snapshots.take_back()

        self._writing = self._pool.submit(self._write, name, snapshot.skeleton["steps"], write)

    def begin_part(self, commit: CommitId, part: Part, meeting: PartMeeting) -> None:
        """Begin to write this rank's part of ``commit``, which all ranks write together.

        A rank other than 0 whose older write has not ended leaves this one out, so this checkpoint is never completed. It
        blocks only while it reports that.
        """
        if part.rank == 0:
            name = self._begin(commit)
            self._writing = self._pool.submit(
                self._write, name, part.skeleton["steps"], lambda: self._write_and_join(name, part, meeting)
            )
        elif self._is_writing:
            self.leave_out(part.file, CheckpointError("its rank has not ended an older write"), meeting)
        else:
            name = CheckpointName(self.attempt, commit.generation, commit.index)
            self._writing = self._pool.submit(self._write_part, name, part, meeting)

    def leave_out(self, file: str, error: Exception, meeting: PartMeeting) -> None:
        """Tell rank 0, from another rank, that this rank writes nothing, because of ``error``."""
        _bring(meeting, Written(file, error=_sendable(error)))

    def expect_last_part(self, rank: int, steps: int) -> None:
        """Note that all ranks write the job's last commit, the one after ``steps``, together."""
        self._last_part = rank, steps

    def complete(self) -> None:
        """Wait for the last part, after all ranks have left the elastic function. On rank 0, warn of what is unwritten."""
        if self._last_part is None:
            return
        self.wait(lambda: False)
        rank, steps = self._last_part
        if rank == 0:
            self.warn_of_unwritten(steps, lambda: False)

    def lacks(self, steps: int) -> bool:
        """Whether the commit after ``steps`` has yet to be written."""
        return not self._is_writing and self._durable_steps != steps and not self._superseded

    def has_score(self, commit: CommitId) -> bool:
        """Whether ``commit`` is known as one of the best, or is about to be."""
        assert self._best is not None
        try:
            return CheckpointName(self.attempt, commit.generation, commit.index) in self._best
        except Exception:  # ``score`` reports it
            return False

    def score(self, commit: CommitId, value: float, snapshots: Lender, is_over: Callable[[], bool]) -> None:
        """Have the current snapshot, that of ``commit``, written and kept if ``value`` is one of the best so far.

        Blocks while an older commit is being written, as ``finish`` does.
        """
        assert self._best is not None
        name = CheckpointName(self.attempt, commit.generation, commit.index)
        try:
            is_worth_it = self._best.takes(name, value)
        except Exception as error:
            text = "the scores in %s could not be read; %s=%s is not compared: %s"
            logger.warning(text, self._name, self._best.metric.name, value, self._told(error))
            return
        if self._superseded or not is_worth_it:
            return
        if name != self._begun:
            self.wait(is_over)
            if is_over():
                return
            if self._is_writing:
                self._cannot_keep(name, value, "an older write has not ended")
                return
            self.begin(commit, snapshots)
        self._writing = self._pool.submit(self._write_score, name, self._best.add(name, value))

    def finish(self, commit: CommitId, snapshots: Lender, is_over: Callable[[], bool]) -> None:
        """Wait until the current snapshot is written, or ``is_over()``. Gives up with a warning after ``STALL_SECONDS``."""
        steps = snapshots.current.skeleton["steps"]
        self._last_part = None  # it belonged to a generation that was lost
        self.wait(is_over)
        if self.lacks(steps) and not is_over():
            self.begin(commit, snapshots)
            self.wait(is_over)
        self.warn_of_unwritten(steps, is_over)

    def warn_of_unwritten(self, steps: int, is_over: Callable[[], bool]) -> None:
        """Warn of what the job leaves unwritten. ``steps`` are those of its last commit."""
        if self._durable_steps != steps and not self._superseded and not is_over():
            then = (
                "resumes from the newest that was written"
                if self._durable_steps is not None
                else "finds none of this run"
            )
            logger.warning("the job's last commit could not be written to %s; the next run %s", self._name, then)
        if self._best is not None and self._keeps_no_best(self._best) and not is_over():
            text = (
                "no checkpoint of %s is kept as the best: rank 0 gave state.report no finite %s that could be compared"
            )
            logger.warning(text, self._name, self._best.metric.name)

    def _keeps_no_best(self, best: BestKept) -> bool:
        try:
            return best.are_none
        except Exception as error:
            logger.debug("the scores in %s could not be read: %s", self._name, self._told(error))
            return False

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until no write is in progress, or ``is_over()``, or no piece has been written for ``STALL_SECONDS``."""
        seen, since = self._pieces, time.monotonic()
        while self._is_writing and not is_over() and time.monotonic() - since < STALL_SECONDS:
            assert self._writing is not None
            wait([self._writing], timeout=1.0)
            self._beat()
            if self._pieces != seen:
                seen, since = self._pieces, time.monotonic()

    # ------------------------------------------------------------------ inside

    @cached_property
    def _directory(self) -> CheckpointDirectory:
        """The directory. It is opened at its first use, so that an error is raised from the training function."""
        options = pickle.loads(self._storage_options) if self._storage_options else None
        return CheckpointDirectory(self._url, options)

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _begin(self, commit: CommitId) -> CheckpointName:
        self._begun = CheckpointName(self.attempt, commit.generation, commit.index)
        self._asked = False
        self._due_at = time.monotonic() + self._interval
        return self._begun

    def _write(self, name: CheckpointName, steps: int, write: Callable[[], int]) -> None:
        """Have a checkpoint written by ``write``, which returns its size in bytes, and report it."""
        started = time.monotonic()
        try:
            written = write()
        except WorkerLostError:
            self._begun, self._due_at = None, time.monotonic()
            self._given_up += 1
            text = "the world changed before all ranks had written their parts"
            if self._given_up > 1:
                logger.warning("checkpoint %s could not be written: %s, %d times in a row", name, text, self._given_up)
            self._report(reports.CheckpointFailed(str(name), steps, text))
            return
        except SupersededError as error:
            self._give_way(name, error)
            return
        except Exception as error:
            self._begun = None
            if isinstance(error, RemovedError):
                self._durable_steps = None
            self._failures += 1
            self._due_at = min(self._due_at, time.monotonic() + 2.0 ** (self._failures - 1))
            text = f"{type(error).__name__}: {self._told(error)}"
            logger.warning(
                "checkpoint %s could not be written; training continues, and the next commits try again: %s", name, text
            )
            self._report(reports.CheckpointFailed(str(name), steps, text))
            return
        self._failures = self._given_up = 0
        self._durable_steps = steps
        seconds = round(time.monotonic() - started, 4)
        self._report(reports.CheckpointWritten(str(name), steps, written, seconds))
        self._prune(name)

    def _write_part(self, name: CheckpointName, part: Part, meeting: PartMeeting) -> None:
        """Write the part of a rank other than 0, and tell rank 0."""
        told_at = time.monotonic()

        def progress() -> None:
            nonlocal told_at
            self._progress()
            if time.monotonic() - told_at > TELL_SECONDS:
                told_at = time.monotonic()
                meeting.tell()

        try:
            if not meeting.is_wanted():
                return
            self._directory.check_claim(self.attempt)
            encoded = encode_part(part)
            entry = self._directory.write_file(name, part.file, file_pieces(encoded.tensors), progress)
            written = Written(part.file, str(name), entry, tuple(encoded.tensors), tuple(encoded.dicts))
        except WorkerLostError as error:
            logger.debug("%s of checkpoint %s is given up: %s", part.file, name, error)
            return
        except Exception as error:
            written = Written(part.file, error=_sendable(error))
        _bring(meeting, written)

    def _write_and_join(self, name: CheckpointName, part: Part, meeting: PartMeeting) -> int:
        """Write the part of rank 0, and complete the checkpoint once all other ranks have written theirs."""
        with self._directory.removing(name):
            try:
                self._directory.check_claim(self.attempt)
                encoded = encode_part(part)
                entries = {
                    part.file: self._directory.write_file(name, part.file, file_pieces(encoded.tensors), self._progress)
                }
            finally:
                others = [msgspec.json.decode(packed, type=Written) for packed in meeting.collect(self._progress)]
            join(encoded, others, str(name))
            entries |= {other.file: other.entry for other in others if other.entry is not None}
            for file, pieces in encode_joined(encoded, part.skeleton).items():
                entries[file] = self._directory.write_file(name, file, pieces, self._progress)
            return self._directory.complete(name, entries, VERSION_OF_PARTS)

    def _read_scores(self) -> dict[CheckpointName, Score]:
        return self._directory.scores(self._directory.list().scored - self._damaged)

    def _write_score(self, name: CheckpointName, score: Score) -> None:
        """Write the score of a checkpoint whose own write has just ended."""
        if self._superseded:
            return
        try:
            if name not in self._directory.check_claim(self.attempt).complete:
                raise CheckpointError("it could not be written")
            self._directory.write_score(name, score)
        except Exception as error:
            assert self._best is not None
            self._best.forget()
            self._cannot_keep(name, score.value, self._told(error))
            return
        self._prune(name)

    def _cannot_keep(self, name: CheckpointName, value: float, why: str) -> None:
        assert self._best is not None
        text = "checkpoint %s with one of the best %s so far, %s, is not kept for that: %s"
        logger.warning(text, name, self._best.metric.name, value, why)

    def _give_way(self, name: CheckpointName, error: SupersededError) -> None:
        """Write no more, as a later run has claimed the directory by the time of this checkpoint."""
        self._superseded = True
        logger.warning("%s", error)
        self._report(reports.CheckpointSuperseded(str(name)))

    def _prune(self, name: CheckpointName) -> None:
        """Remove older checkpoints, now that this one has been written."""
        try:
            self._directory.prune(self.attempt, self._damaged, self._keep, self.metric)
        except SupersededError as error:
            self._give_way(name, error)
        except Exception as error:
            logger.warning(
                "old checkpoints of %s could not be removed; the next write tries again: %s",
                self._name,
                self._told(error),
            )

    def _told(self, error: Exception) -> str:
        return without_secrets(error, self._url)

    def _progress(self) -> None:
        self._pieces += 1


def _bring(meeting: PartMeeting, written: Written) -> None:
    """Tell rank 0, which waits for it, what was written, or why that cannot be told."""
    try:
        try:
            meeting.bring(msgspec.json.encode(written))
        except (ValueError, TypeError) as error:  # more than the store accepts, or not text
            meeting.bring(msgspec.json.encode(Written(written.file, error=_sendable(error))))
    except WorkerLostError as error:
        logger.debug("%s is given up: %s", written.file, error)


def _sendable(error: Exception) -> str:
    return as_utf8(f"{type(error).__name__}: {error}")
