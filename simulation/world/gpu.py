"""A GPU and NCCL, as far as commits are concerned: copies are made after they were requested, behind their step's reductions.

A reduction waits for lost ranks until it is aborted. An abort completes it with garbage, on its own rank and on others.
"""

from __future__ import annotations

from simulation.world.process import Process
from simulation.world.threads import Condition
from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.snapshot import Snapshot

NONSENSE = -1


class GpuCopy(PendingCopy):
    """The copy of a commit. Stopping the process does not stop its GPU."""

    def __init__(self, process: Process, snapshot: Snapshot, step_seconds: float) -> None:
        assert process.group is not None
        self._group = process.group
        self._snapshot = snapshot
        self._changed = Condition()
        self._is_made = False
        simulation = process.simulation
        self._waits_for_all = simulation.random.random() < 0.5
        simulation.clock.after(simulation.random.uniform(0.0, 2 * step_seconds), self._come)

    def is_made(self) -> bool:
        return self._is_made

    def wait(self) -> None:
        self._changed.wait_for(lambda: self._is_made)

    def _come(self) -> None:
        if self._waits_for_all and self._group.lost and not self._group.is_device_aborted:
            self._group.stuck.append(self.make)
        else:
            self.make()

    def make(self) -> None:
        model = self._snapshot.skeleton["objects"]["model"]
        # Content that is kept in place was reduced before its step.
        if self._group.has_nonsense() and isinstance(model, StateDict):
            model.content["weights"] = NONSENSE
        self._is_made = True
        self._changed.notify_all()
