"""The disk of durable checkpoints, and who writes there: what is lent to a slow writer has to stay as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation.world import threads
from spark_elastic.checkpoint.content import SavedState
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.ticket import CheckpointPlan


class Writer:
    """Stands for ``CheckpointWriter``."""

    def __init__(self, plan: CheckpointPlan, report: Callable[..., None], beat: Callable[[], None]) -> None:
        self.attempt = plan.attempt
        self.metric = None
        self._process = threads.current().process
        self._simulation = self._process.simulation
        self._interval = plan.interval
        self._due_at = 0.0
        self._is_writing = False
        self._durable: int | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def restore(self, device: Any) -> SavedState | None:
        self._process.pause(0.02, 0.2)
        disk = self._simulation.disk
        saved: SavedState | None = disk[max(disk)] if disk else None
        if saved is not None:
            self._process.holds = None  # what the rank had, if anything, is about to be overwritten
        return saved

    def is_due(self) -> bool:
        return not self._is_writing and bool(self._simulation.clock.now >= self._due_at)

    def finish(self, commit: CommitId, snapshots: Any, is_over: Callable[[], bool]) -> None:
        steps = snapshots.current.skeleton["steps"]
        while self._durable != steps and not is_over():
            if not self._is_writing:
                self.begin(commit, snapshots)
            threads.sleep(0.05)

    def begin(self, commit: CommitId, snapshots: Any) -> None:
        self._due_at = self._simulation.clock.now + self._interval
        self._is_writing = True
        snapshot = snapshots.lend()
        seconds = self._simulation.random.uniform(0.01, 0.6) * self._process.machine.slowness
        # By way of the process's loop: a dead process writes nothing.
        self._process.loop.call_later(seconds, self._end, commit, snapshot, snapshot.content(), snapshots)

    def _end(self, commit: CommitId, snapshot: Any, lent: Any, snapshots: Any) -> None:
        content = snapshot.content()
        if repr(content) != repr(lent):  # tensors have no truth value
            self._simulation.fail(
                f"what worker {self._process.number} lent as {commit} was overwritten: {lent}, {content}"
            )
        saved = SavedState(commit, content["steps"], content["size"], content["objects"])  # type: ignore[arg-type]
        self._simulation.disk[commit] = saved
        self._simulation.note("writes", self._process, str(commit))
        snapshots.take_back()
        self._is_writing, self._durable = False, content["steps"]
