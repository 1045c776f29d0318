"""Worker: what the driver knows of a training process."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.driver.hosts import Place
from spark_elastic.driver.phases import WORKER, IllegalTransition, WorkerChange, WorkerPhase
from spark_elastic.protocol.messages import Activity, CommitId, Slices


@dataclass(slots=True)
class Worker:
    """What the driver knows of one training process."""

    worker: int
    host: int
    host_name: str
    place: Place
    started_at: float
    # When the process was last known to run, from the worker itself or, once the worker has connected, from its task.
    heard: float
    # When the worker itself last spoke. One long call may keep Python from running in a process that its task sees.
    spoke: float = 0.0
    phase: WorkerPhase = WorkerPhase.STARTING
    commit: CommitId | None = None
    # The slices that the worker holds of its last commits, as it has reported; None if it keeps the whole of ``commit``.
    slices: tuple[Slices, ...] | None = None
    activity: Activity = field(default_factory=Activity)
    beats: int = 0
    active_at: float = 0.0
    ready_at: float = 0.0
    # Since when the driver has waited for the worker to come back to its elastic function: since an abort, or the worker's
    # last heartbeat() after it.
    awaited_since: float | None = None
    # How many worlds in a row failed to form, for no known reason, while this worker had not connected.
    form_failures: int = 0
    # Whether the worker has been in a world that formed, and whether it has made a commit there.
    has_connected: bool = False
    has_progressed: bool = False

    def slices_of(self, commit: CommitId) -> Slices | None:
        """Return what this worker holds of a commit; None if it holds nothing."""
        if self.slices is None:
            return Slices(commit, (0,), 1) if self.commit == commit else None
        return next((slices for slices in self.slices if slices.commit == commit), None)

    def enter(self, change: WorkerChange) -> None:
        """Move on to the phase that follows a change. Raises ``IllegalTransition``. Nothing else sets ``phase``."""
        following = WORKER.get((self.phase, change))
        if following is None:
            raise IllegalTransition(f"worker {self.worker}", self.phase, change)
        self.phase = following
