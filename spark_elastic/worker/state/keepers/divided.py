"""Commits of a State whose optimizer is divided, where slices of the rest are not asked for: copies, on the device or the host.

Each rank copies its own parts of the optimizer's state, and everything else whole. A commit is whole on no rank, so what holds
for commits in slices holds for these as well: each rank keeps the last two, and the driver says to which of them all go back.
Nothing but parts of the optimizer's state is ever gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_elastic.worker.state.keepers.sharded import Sharded
from spark_elastic.worker.state.snapshot import Found, cloned
from spark_elastic.worker.zero import find_divisible


class DividedOnDevice(Sharded):
    """Keeps copies on the device of this rank's parts of divided optimizers, and of everything else."""

    name = "copy"

    def _find_sliced(self, found: Found) -> tuple[int, ...]:
        return ()

    def loaded(self, values: Mapping[str, object]) -> None:
        super().loaded(values)
        kept = self._current.parts.for_training() if self._is_held else {}
        for place, optimizer in enumerate(find_divisible(values)):
            if place in kept:
                optimizer.divide(optimizer.division, cloned(kept[place]))


class DividedOnHost(DividedOnDevice):
    """Keeps such copies in the host's memory, pinned where CUDA is in use."""

    name = "host"
    is_on_host = True


class DividedInPlace(Sharded):
    """Keeps slices where ``commit="in_place"`` was asked for.

    In a step of a divided optimizer each rank overwrites what no other has, and then waits for all others. If one is lost
    meanwhile, nobody has the weights of before the step, nor can anybody get those of after it: there has to be a copy.
    """

    name = "in_place"
