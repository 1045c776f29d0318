"""``ElasticDataLoader``: torch's DataLoader over a map-style dataset, each item once per epoch in any world.

A Sampler alone cannot do this, because it sees what worker processes prefetch, not what was delivered. Here the position
advances when a batch is yielded, and after a reset a new DataLoader gets the remaining indices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as
from spark_elastic.data.loader import PositionedLoader
from spark_elastic.data.order import EpochOrder, OrderSpec
from spark_elastic.data.plan import BatchPlan, Step, check_switches, draw
from spark_elastic.data.randomness import own_generators, random_states, seed_all, seed_own, set_random_states
from spark_elastic.data.same_items import described
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.errors import DataError

_OURS = ("sampler", "batch_sampler", "drop_last", "batch_size")
_BLOCK = 64


@saved_as("spark_elastic.data")
class ElasticDataLoader(PositionedLoader[Any]):
    """Iterates over the rest of the current epoch of a map-style dataset, yielding the results of ``collate_fn``.

    Args:
        dataset: a map-style dataset, with a length and items by index.
        batch_size, global_batch_size: the items in a batch, on each rank or on all ranks together. Give exactly one of them.
        shards: cut every global batch into this many shards, at least ``max_np``. One rank computes each whole shard, in a loop
            over ``model.parts(batch)``. The trained weights then have the same bits in every world. Within a State, a batch is
            then a list with ``collate_fn``'s result for each shard. Random numbers in the dataset and ``collate_fn`` depend on
            ``seed``, the epoch and the item, also those of generators that these hold, so items are fetched one by one.
        shards_strict: refuse to continue from a state that was made with different kernels (torch and its libraries, their
            instruction set, threads, device, deterministic switches), which produce different bits; False warns once.
        balance: "auto" adapts each rank's share of the global batch, in rows or shards, to its speed, on CPUs in a State with
            wrapped models; None keeps shares even.
        shuffle: visit the items in a random order that depends on ``seed`` and the epoch only.
        seed: determines the order of the items, and the random numbers of the workers.
        drop_last: drop the items that do not fill a last global batch.
        shard: a (rank, size) for use outside a State: yield that rank's part of each batch, without repeated batches.
        dataloader_kwargs: as for ``torch.utils.data.DataLoader`` (num_workers, collate_fn, pin_memory, …), except those that
            choose items or their order. If ``collate_fn`` leaves items out, this does not change the weight of the batch: tell
            ``model.set_rows`` how many are left.

    Each ``iter()`` starts the workers, which stop with it. Their base seed is derived from ``seed`` and the position, and the
    global random state is left alone. The dataset must have a length and must not change it, and all workers must make it with
    the same items in the same order: give random splits a seed. Raises ValueError for arguments
    that do not fit, and whatever torch's DataLoader raises for its arguments.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shards: int | None = None,
        shards_strict: bool = True,
        balance: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        """Get the dataset's length, and let torch check the arguments. Reads no items and starts no workers.

        Raises ValueError for arguments that do not fit and for a dataset without a length, and whatever torch's DataLoader
        raises.
        """
        check_switches(shuffle=shuffle, drop_last=drop_last)
        seed = whole_number("seed", seed, 0)
        plan = BatchPlan(batch_size, global_batch_size, drop_last, shards, balance)
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "an ElasticDataLoader takes a dataset and makes the DataLoader itself: give loader.dataset, and the loader's "
                "collate_fn= and num_workers="
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(f"{type(dataset).__name__} is not a map-style dataset: it needs __getitem__ and __len__")
        for name in _OURS:
            if name in dataloader_kwargs:
                raise ValueError(f"{name}= is chosen by ElasticDataLoader itself and cannot be given")
        if not dataloader_kwargs.get("in_order", True):
            raise ValueError(
                "in_order=False would hand out batches in another order than their rows are counted in, so that a reset "
                "would lose some rows and double others; leave it out"
            )
        self.dataset = dataset
        self._kwargs = {**dataloader_kwargs, "persistent_workers": False}
        # This raises for wrong arguments now rather than at the first batch.
        DataLoader(dataset, batch_sampler=[], **self._kwargs)
        self._given_generator = dataloader_kwargs.get("generator")
        rows = len(dataset)
        # One lane whose single window is the epoch: a permutation of all items.
        spec = OrderSpec(seed, False, 1, max(1, rows), shuffle)
        identity = {
            "kind": "map-style",
            "dataset": hashlib.blake2b(type(dataset).__qualname__.encode(), digest_size=8).hexdigest(),
            **described(dataset),
            "rows": rows,
            "seed": seed,
            "shuffle": shuffle,
        }
        super().__init__(RowGroupTracker(np.array([rows], np.int64), spec, plan), identity, shard, shards_strict)
        self._permutation: tuple[EpochOrder, np.ndarray] | None = None

    _delivers_parts = True

    @contextlib.contextmanager
    def _open(self) -> Iterator[Iterator[tuple[Step, int, object]]]:
        tracker = self._tracker
        if len(self.dataset) != tracker.total:
            raise DataError(
                f"the dataset had {tracker.total} items when the loader was made, now {len(self.dataset)}; it must not "
                "change its length: make it with all items, and train with those that arrive later in a run() of their own"
            )
        generator = self._given_generator
        if generator is None:
            generator = torch.Generator()
            place = [tracker.spec.seed, tracker.epoch, tracker.position, tracker.rank]
            generator.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1)))
        # Two iterators follow the same steps: the sampler's runs ahead with the workers, and the one below gives each batch its
        # step.
        batches = _Batches(tracker, self._order(), self._indices)
        dataset, sharded = self.dataset, self.shards is not None and self._in_state
        if sharded:
            dataset = _SeededItems(dataset, (tracker.spec.seed, tracker.epoch), self._kwargs.get("collate_fn"))
        loader = DataLoader(dataset, batch_sampler=batches, **{**self._kwargs, "generator": generator})
        iterator = iter(loader)
        fetch = iterator.__next__
        if sharded and not loader.num_workers:
            fetch = functools.partial(_with_own_random_numbers, iterator.__next__)

        def deliver() -> Iterator[tuple[Step, int, object]]:
            for step, ticket_sum, indices in _walk(tracker, self._order()):
                parts = [fetch() for _ in self._indices(step, indices)]
                yield step, ticket_sum, parts if sharded else parts[0]

        try:
            yield deliver()
        finally:
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()

    def _indices(self, step: Step, indices: list[int]) -> list[list[int]]:
        """The indices of each part of this rank's batch, which are collated separately."""
        cut = self._cut(step)
        if cut is None:
            return [indices]
        return [indices[part.start : part.stop] for part in cut.parts(self._tracker.rank, self._tracker.size)]

    def _order(self) -> np.ndarray:
        order = self._tracker.order
        if self._permutation is None or self._permutation[0] is not order:
            self._permutation = (order, order.window_order(0, 0) if order.total else np.zeros(0, np.int64))
        return self._permutation[1]


class _Batches:
    """The batch sampler: this rank's indices of each step from the tracker's position at the time it was made."""

    def __init__(
        self,
        tracker: RowGroupTracker,
        permutation: np.ndarray,
        divide: Callable[[Step, list[int]], list[list[int]]],
    ) -> None:
        self._tracker, self._permutation, self._divide = tracker, permutation, divide
        self._length = tracker.plan.steps(tracker.left, tracker.size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        for step, _, indices in _walk(self._tracker, self._permutation):
            yield from self._divide(step, indices)


class _SeededItems(Dataset[object]):
    """A dataset whose items draw the same random numbers in any process and after any other items.

    The random numbers of ``collate_fn`` follow from the last item of its shard. Both may have generators of their own, in
    attributes, such as those of albumentations.
    """

    def __init__(self, dataset: Any, seeds: tuple[int, ...], collate_fn: object) -> None:
        self._dataset, self._seeds, self._collate_fn = dataset, seeds, collate_fn
        # Found in the process that draws from them.
        self._generators: list[object] | None = None

    def __getitem__(self, index: int) -> object:
        if self._generators is None:
            self._generators = own_generators(self._dataset, self._collate_fn)
        seed_all((*self._seeds, index))
        seed_own(self._generators, (*self._seeds, index))
        return self._dataset[index]


def _with_own_random_numbers(fetch: Callable[[], object]) -> object:
    """Call ``fetch``, which seeds the generators of this process, and restore their states afterwards."""
    states = random_states()
    try:
        return fetch()
    finally:
        set_random_states(states)


def _walk(tracker: RowGroupTracker, permutation: np.ndarray) -> Iterator[tuple[Step, int, list[int]]]:
    """Yield (step, ticket sum, indices) of this rank, from the position that the tracker has at the first ``next``."""
    position, rank, order = tracker.position, tracker.rank, tracker.order
    while steps := tracker.upcoming(position, _BLOCK):
        drawn = draw(order, steps, rank)
        for number, step in enumerate(steps):
            part = slice(drawn.offsets[number], drawn.offsets[number + 1])
            yield step, drawn.ticket_sums[number], permutation[drawn.positions[part]].tolist()
        position = steps[-1].start + steps[-1].rows
