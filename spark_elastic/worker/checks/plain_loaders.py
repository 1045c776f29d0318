"""Detects that a model trains on a plain torch DataLoader, which gives every rank all rows.

Only those loaders are considered that were made above the elastic function, where there is no rank yet to divide a dataset by,
and whose order is torch's plain one: a user's sampler or an iterable dataset may take ranks into account. A loader that
advances from one step of an optimizer to the next, again and again, feeds the training, provided that no other loader advances
with it and that a model is given as many rows as the loader's batches have: a rank that cuts its rows out of a batch has fewer.
A loader for validation is iterated between two steps, from its beginning to its end.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

if TYPE_CHECKING:
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

# The steps of a generation at which to look for new iterations. An iteration that begins later belongs to a later epoch.
LOOKS_AT = (2, 32)
# A loader that advances at this many steps in a row does not do so by coincidence.
ENOUGH_MOVES = 2
LAST_STEP = LOOKS_AT[-1] + ENOUGH_MOVES


class PlainLoaders:
    """Follows the iterations over all loaders, given the loaders that exist when this is created. Used by the user's thread."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[DataLoader[object]] = weakref.WeakSet(
            found for found in gc.get_objects() if type(found) is DataLoader and _is_plain(found)
        )
        self._steps = 0
        # By iteration, how many batches it had yielded at the last step, and at how many steps in a row that number had grown.
        self._followed: weakref.WeakKeyDictionary[_BaseDataLoaderIter, tuple[int, int]] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Begin a generation."""
        self._steps = 0
        self._followed.clear()

    @property
    def may_feed(self) -> bool:
        """Whether later steps of this generation may still show that some loader feeds the training."""
        return self._steps < LAST_STEP and len(self._loaders) > 0

    def feeds_training(self, models: Sequence[DistributedDataParallel]) -> bool:
        """Whether one of the loaders feeds ``models``, as far as this step of an optimizer shows."""
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
        # Another loader has begun an epoch since the last look. First see whether that one advances, too.
        self._followed[iteration] = iteration._num_yielded, 0
        return False

    def _follow(self) -> None:
        for iteration in _iterations():
            self._followed.setdefault(iteration, (iteration._num_yielded, 0))


def _iterations() -> Iterator[_BaseDataLoaderIter]:
    """Yield the iterations over any loader. One that another thread is still creating has no number of batches yet."""
    for found in gc.get_objects():
        if issubclass(type(found), _BaseDataLoaderIter) and hasattr(found, "_num_yielded"):
            yield found


def _may_be_given(rows: int | None, models: Sequence[DistributedDataParallel]) -> bool:
    """Whether the last forward of some model may have been given this many rows."""
    given = {number for model in models for number in model.rows_given}
    return rows is None or not given or rows in given


def _rows_of(loader: DataLoader[object]) -> int | None:
    """Return the number of rows in a full batch; None if the dataset makes the batches."""
    size = getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else min(size, len(loader.sampler))  # type: ignore[arg-type]


def _is_plain(loader: DataLoader[object]) -> bool:
    """Whether a loader iterates over its whole dataset on every rank."""
    try:
        batches, rows = loader.batch_sampler, loader.sampler
    except AttributeError:
        return False  # the loader's constructor has raised, or is still running on another thread
    return (
        loader._dataset_kind == _DatasetKind.Map
        and (batches is None or type(batches) is BatchSampler)
        and (type(rows) is SequentialSampler or (type(rows) is RandomSampler and not rows.replacement))
    )
