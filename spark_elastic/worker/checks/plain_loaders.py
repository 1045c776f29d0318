"""Torch's own DataLoaders that give every rank all rows, and that one of them trains a model.

Only those are looked for that were made above the elastic function, where there is no rank by which a data set could have been
divided, and whose order is torch's plain one: neither a sampler of the user's nor an iterable data set, which may know of ranks.
One that moves on from one step of an optimizer to the next, again and again, feeds the training. One that validates is gone
through between two steps, from its beginning to its end.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

# The steps of a generation at which iterations are looked for: later ones are of another epoch.
LOOKS_AT = (2, 32)
# So many steps in a row, each with other batches, are no coincidence.
ENOUGH_MOVES = 2


class PlainLoaders:
    """Follows the iterations over the loaders that exist when this is made. Used by the user's thread."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet(
            found for found in gc.get_objects() if type(found) is DataLoader and _is_plain(found)
        )
        self._steps = 0
        # Iterations, the batches that they had given at the last step, and how often these were more than before.
        self._followed: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """A generation begins."""
        self._steps = 0
        self._followed.clear()

    def feeds_training(self) -> bool:
        """Whether one of them does, as far as can be seen at this step of an optimizer."""
        if not self._loaders:
            return False
        self._steps += 1
        if self._steps in LOOKS_AT:
            samplers = {id(loader._index_sampler) for loader in self._loaders}
            for found in gc.get_objects():
                if issubclass(type(found), _BaseDataLoaderIter) and id(found._index_sampler) in samplers:
                    self._followed.setdefault(found, (found._num_yielded, 0))
        for iteration, (given, moves) in list(self._followed.items()):
            moves = moves + 1 if iteration._num_yielded > given else 0
            self._followed[iteration] = iteration._num_yielded, moves
            if moves == ENOUGH_MOVES:
                return True
        return False


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader goes through the whole of its data set on every rank."""
    batches, rows = loader.batch_sampler, loader.sampler
    return (
        loader._dataset_kind == _DatasetKind.Map
        and (batches is None or type(batches) is BatchSampler)
        and (type(rows) is SequentialSampler or (type(rows) is RandomSampler and not rows.replacement))
    )
