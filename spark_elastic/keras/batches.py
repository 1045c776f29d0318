"""Batches of a loader for ``fit``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import keras

from spark_elastic.data.loader import PositionedLoader, shards_of_loader

T = TypeVar("T")
# A batch as Keras takes it: (x, y) or (x, y, sample_weight), each of them anything that Keras can nest.
Converted: TypeAlias = tuple[Any, ...]
# Turns a batch of a loader, of whatever kind, into one for Keras.
Convert: TypeAlias = Callable[[Any], Converted]


def as_it_is(batch: T) -> T:
    """Convert nothing."""
    return batch


class Batches(keras.utils.PyDataset):
    """The rest of a loader's epoch, for ``model.fit``. Each call of ``fit`` trains one epoch and needs a new ``Batches``.

    ``convert`` turns a batch of the loader into ``(x, y)`` or ``(x, y, sample_weight)``. A batch is taken from the loader when
    Keras begins its step, never earlier, so that a commit counts exactly the batches that were trained on. (From a Python
    generator, Keras would take two before the first step.)

    For a loader with ``shards=``, ``convert`` gets the shards one by one, and each whole batch as well, unless the loader
    delivers it as a list of shards.
    """

    def __init__(self, loader: PositionedLoader[T], convert: Callable[[T], Converted]) -> None:
        """Begin to iterate over the rest of the loader's epoch, which ends a running iteration.

        Raises ``DataError`` if the epoch has already been iterated to its end, as the loader does.
        """
        super().__init__()
        newest[loader] = weakref.ref(self)
        self._convert = convert
        self._is_in_shards = shards_of_loader(loader) is not None
        # The last batch given to Keras, unconverted, for steps that convert its shards.
        self._untaken: T | None = None
        self._iterator = iter(loader)
        self._steps: int = loader.steps_left
        self._given = 0
        self._shown: Converted | None = None

    @property
    def num_batches(self) -> int:
        """The number of batches for ``fit``: the epoch's remaining steps in the current world."""
        return self._steps

    def __getitem__(self, index: int) -> Converted:
        """Return the next batch, whatever the index: the loader has shuffled them already."""
        if self._shown is None:
            if self._given == self._steps:
                raise ValueError("the loader's epoch is over; call fit for one epoch, with new Batches each time")
            self._given += 1
            batch = next(self._iterator)
            self._untaken = batch
            self._batch = self._convert(batch[0] if self._is_in_shards and isinstance(batch, list) else batch)
        shown, self._shown = self._shown or self._batch, None
        return shown

    def take(self) -> tuple[object, Convert] | None:
        """Return the last batch given to Keras, and the function that converts its shards; None if it was already taken."""
        batch, self._untaken = self._untaken, None
        return None if batch is None else (batch, self._convert)

    def on_epoch_end(self) -> None:
        # Keras takes one batch to build losses and metrics, and then begins the epoch, which has to start with that batch.
        if self._given == 1:
            self._shown = self._batch


# The newest ``Batches`` of each loader.
newest: weakref.WeakKeyDictionary[object, weakref.ref[Batches]] = weakref.WeakKeyDictionary()
