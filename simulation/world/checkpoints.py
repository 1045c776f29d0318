"""The disk of durable checkpoints, and its writers: a snapshot that is lent to a slow writer must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from simulation.world import threads
from spark_elastic.checkpoint.content import SavedState
from spark_elastic.checkpoint.directory import FileEntry
from spark_elastic.checkpoint.parts import Part, Written, encode_part, join
from spark_elastic.checkpoint.tree import TreeDecoder
from spark_elastic.checkpoint.writer import CheckpointWriter, PartMeeting
from spark_elastic.errors import CheckpointError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.ticket import CheckpointPlan

# How long to wait while nothing is written, as in the product: longer than hang_timeout and than any write.
STALL_SECONDS = 15.0


class Writer(CheckpointWriter):
    """A ``CheckpointWriter`` whose writes take simulated time, and whose files are objects on the simulated disk."""

    _is_writing = False

    def __init__(self, plan: CheckpointPlan, report: Callable[..., None], beat: Callable[[], None]) -> None:
        self.attempt = plan.attempt
        self._best = None
        self._process = threads.current().process
        self._simulation = self._process.simulation
        self._interval = plan.interval
        self._due_at = 0.0
        self._beat = beat
        self._superseded = False
        self._durable_steps: int | None = None
        self._last_part: tuple[int, int] | None = None

    def __exit__(self, *_: object) -> None: ...

    def restore(self, device: Any) -> SavedState | None:
        self._process.pause(0.02, 0.2)
        disk = self._simulation.disk
        saved: SavedState | None = disk[max(disk)] if disk else None
        if saved is not None:
            self._process.holds = None  # any commit that the rank held is about to be overwritten
        return saved

    def is_due(self) -> bool:
        return not self._is_writing and bool(self._simulation.clock.now >= self._due_at)

    def wait(self, is_over: Callable[[], bool]) -> None:
        clock = self._simulation.clock
        began = clock.now
        while self._is_writing and not is_over() and clock.now - began < STALL_SECONDS:
            threads.sleep(0.05)
            self._beat()

    def warn_of_unwritten(self, steps: int, is_over: Callable[[], bool]) -> None:
        if self.lacks(steps) and not is_over():
            self._simulation.fail(f"worker {self._process.number} leaves the commit after {steps} steps unwritten")

    def begin(self, commit: CommitId, snapshots: Any) -> None:
        snapshot = snapshots.lend()
        # Through the process's loop, because a dead process writes nothing.
        self._process.loop.call_later(self._start(), self._end, commit, snapshot, snapshot.content(), snapshots)

    def begin_part(self, commit: CommitId, part: Part, meeting: PartMeeting) -> None:
        if part.rank != 0 and self._is_writing:
            self.leave_out(part.file, CheckpointError("it still writes"), meeting)
            return
        seconds = self._start()
        threads.Thread(lambda: self._write_slowly(commit, part, meeting, seconds), process=self._process).start()

    def _start(self) -> float:
        """Return how long the write that begins will take."""
        self._due_at = self._simulation.clock.now + self._interval
        self._is_writing = True
        seconds: float = self._simulation.random.uniform(0.01, 0.6) * self._process.machine.slowness
        return seconds

    def _end(self, commit: CommitId, snapshot: Any, lent: Any, snapshots: Any) -> None:
        content = snapshot.content()
        if repr(content) != repr(lent):  # tensors have no truth value
            self._simulation.fail(
                f"what worker {self._process.number} lent as {commit} was overwritten: {lent}, {content}"
            )
        self._put(commit, content["steps"], content["size"], content["objects"])
        snapshots.take_back()
        self._is_writing = False

    def _write_slowly(self, commit: CommitId, part: Part, meeting: PartMeeting, seconds: float) -> None:
        tensors = self._simulation.tensors.setdefault((self.attempt, commit), {})
        try:
            if part.rank != 0 and not meeting.is_wanted():
                self._is_writing = False
                return
            threads.sleep(seconds / 2)
            if part.rank != 0:
                meeting.tell()
            threads.sleep(seconds / 2)
            mine = encode_part(part)
            tensors.update(mine.tensors)
            if part.rank != 0:
                written = Written(part.file, str(commit), FileEntry(0, ""), tuple(mine.tensors), tuple(mine.dicts))
                meeting.bring(msgspec.json.encode(written))
            else:
                join(
                    mine,
                    [msgspec.json.decode(packed, type=Written) for packed in meeting.collect(lambda: None)],
                    str(commit),
                )
                decoder = TreeDecoder(tensors, mine.opaque, None)
                objects = {name: decoder.decode(node) for name, node in mine.objects.items()}
                self._put(commit, part.skeleton["steps"], part.skeleton["size"], objects)
        except (CheckpointError, WorkerLostError) as error:
            self._simulation.note("gives up", self._process, f"{commit}: {error}")
        self._is_writing = False

    def _put(self, commit: CommitId, steps: int, size: int, objects: Any) -> None:
        self._simulation.disk[commit] = SavedState(commit, steps, size, objects)  # type: ignore[arg-type]
        self._simulation.note("writes", self._process, str(commit))
        self._durable_steps = steps
