"""A GPU, as far as commits are concerned: copies are made after they were asked for, and an abort spoils those not yet made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.threads import Condition

if TYPE_CHECKING:
    from simulation.processes import WorkerProcess
    from spark_elastic.snapshot import Snapshot

NONSENSE = -1


class CopyEvent:
    """Stands for the ``torch.cuda.Event`` behind a copy. Stopping the process does not stop its GPU."""

    def __init__(self, process: WorkerProcess, snapshot: Snapshot, step_seconds: float) -> None:
        self._group = process.group
        self._snapshot = snapshot
        self._changed = Condition()
        self._is_made = False
        simulation = process.simulation
        simulation.clock.after(simulation.random.uniform(0.0, 2 * step_seconds), self._make)

    def query(self) -> bool:
        return self._is_made

    def synchronize(self) -> None:
        self._changed.wait_for(lambda: self._is_made)

    def _make(self) -> None:
        model = self._snapshot.skeleton["objects"]["model"]
        # What is kept in place has been reduced before its step.
        if self._group is not None and self._group.is_aborted and isinstance(model.content, dict):
            model.content["weights"] = NONSENSE
        self._is_made = True
        self._changed.notify_all()
