"""Torch's own DataLoaders that give every rank all rows, and that one of them trains a model.

Only those are looked for that were made above the elastic function, where there is no rank by which a data set could have been
divided, and whose order is torch's plain one: neither a sampler of the user's nor an iterable data set, which may know of ranks.
One that moves on from one step of an optimizer to the next, again and again, feeds the training, if no other loader moves along
and a model is given as many rows as its batches have: rows that were cut from a batch by rank are fewer. One that validates is
gone through between two steps, from its beginning to its end.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

if TYPE_CHECKING:
    from spark_elastic.worker.ddp import DistributedDataParallel

# The steps of a generation at which iterations are looked for: later ones are of another epoch.
LOOKS_AT = (2, 32)
# So many steps in a row, each with other batches, are no coincidence.
ENOUGH_MOVES = 2
LAST_STEP = LOOKS_AT[-1] + ENOUGH_MOVES


class PlainLoaders:
    """Follows the iterations over all loaders, and knows those that exist when this is made. Used by the user's thread."""

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

    @property
    def may_feed(self) -> bool:
        """Whether there is one, and later steps of this generation may still show that it feeds the training."""
        return self._steps < LAST_STEP and len(self._loaders) > 0

    def feeds_training(self, models: Sequence[DistributedDataParallel]) -> bool:
        """Whether one of them feeds ``models``, as far as can be seen at this step of an optimizer."""
        self._steps += 1
        for iteration, (given, moves) in list(self._followed.items()):
            moves = moves + 1 if iteration._num_yielded > given else 0
            self._followed[iteration] = iteration._num_yielded, moves
        if self._steps in LOOKS_AT:
            self._follow()
        moving = [(iteration, moves) for iteration, (_, moves) in self._followed.items() if moves]
        if len(moving) != 1 or moving[0][1] < ENOUGH_MOVES:
            return False
        iteration = moving[0][0]
        loader = next((one for one in self._loaders if one._index_sampler is iteration._index_sampler), None)
        if loader is None or not _may_be_given(_rows_of(loader), models):
            return False
        known = len(self._followed)
        self._follow()
        if len(self._followed) == known:
            return True
        # Another loader's epoch may have begun since the last look: whether that moves along has to be seen first.
        self._followed[iteration] = iteration._num_yielded, 0
        return False

    def _follow(self) -> None:
        for iteration in _iterations():
            self._followed.setdefault(iteration, (iteration._num_yielded, 0))


def _iterations() -> Iterator[Any]:
    """The iterations over any loader. One that another thread is just making has no number of batches yet."""
    for found in gc.get_objects():
        if issubclass(type(found), _BaseDataLoaderIter) and hasattr(found, "_num_yielded"):
            yield found


def _may_be_given(rows: int | None, models: Sequence[DistributedDataParallel]) -> bool:
    """Whether some model's last forward was given so many rows, as far as is known."""
    given = {number for model in models for number in model.rows_given}
    return rows is None or not given or rows in given


def _rows_of(loader: DataLoader[Any]) -> int | None:
    """The rows of a full batch; None where the data set makes the batches."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else min(size, len(loader.sampler))  # type: ignore[arg-type]


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader goes through the whole of its data set on every rank."""
    try:
        batches, rows = loader.batch_sampler, loader.sampler
    except AttributeError:
        return False  # it was refused while it was made, or another thread is making it
    return (
        loader._dataset_kind == _DatasetKind.Map
        and (batches is None or type(batches) is BatchSampler)
        and (type(rows) is SequentialSampler or (type(rows) is RandomSampler and not rows.replacement))
    )
