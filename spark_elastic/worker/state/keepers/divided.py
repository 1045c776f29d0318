"""Commits of a State with a divided optimizer whose other parts are not sliced: copies, on the device or the host.

Each rank copies its own parts of the optimizer's state, and everything else whole. No rank holds a whole commit, so the rule
for commits in slices applies: each rank keeps the last two, and the driver decides to which of them all go back. Only parts of
the optimizer's state are ever gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_elastic.worker.optimizers.zero import find_divisible
from spark_elastic.worker.state.keepers.sharded import Sharded
from spark_elastic.worker.state.snapshot import Found, cloned


class DividedOnDevice(Sharded):
    """Keeps copies on the device of this rank's parts of divided optimizers, and of everything else."""

    name = "copy"

    def _find_sliced(self, found: Found) -> tuple[int, ...]:
        return ()

    def loaded(self, values: Mapping[str, object]) -> None:
        super().loaded(values)
        kept = self._current.parts.for_training() if self._loads_current else {}
        for place, optimizer in enumerate(find_divisible(values)):
            if place in kept:
                optimizer.divide(optimizer.division, cloned(kept[place]))


class DividedOnHost(DividedOnDevice):
    """Keeps such copies in the host's memory, pinned if CUDA is in use."""

    name = "host"
    is_on_host = True


class DividedInPlace(Sharded):
    """Keeps slices although ``commit="in_place"`` was requested.

    In a step of a divided optimizer, each rank overwrites what no other rank has, and then waits for all others. If one is lost
    meanwhile, no rank has the weights from before the step, and none can get those from after it. So there has to be a copy.
    """

    name = "in_place"
