"""``WeightedSamplingLoader``: batches whose rows come from several loaders, in given proportions."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spark_elastic._integers import whole_number
from spark_elastic._saved_names import saved_as
from spark_elastic.data.engine_loader import EngineLoader
from spark_elastic.data.loader import PositionedLoader
from spark_elastic.data.mix import MixOrder, rows_of_epoch
from spark_elastic.data.order import EpochOrder, OrderSpec
from spark_elastic.data.plan import Step
from spark_elastic.data.reader import Batch, BlockBuilder, ReadAhead, ReadyBatch
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.errors import DataError

# The steps in which a part is read have three ranks: those before this rank, this rank itself, and those after it.
_OWN = 1


@saved_as("spark_elastic.data")
class WeightedSamplingLoader(PositionedLoader[Batch]):
    """Iterates over the rest of the current epoch of a mix, yielding ``dict[str, torch.Tensor]`` with rows of all loaders.

        parts = [se.data.ParquetLoader(url, global_batch_size=256) for url in (usual, rare)]
        loader = se.data.WeightedSamplingLoader(parts, [0.9, 0.1], seed=0)

    This is Petastorm's ``WeightedSamplingReader`` with an order that depends on seed and epoch only, so that a position is valid
    in any world. Every 1,024 rows have the given proportions, as nearly as whole rows allow, in random order. An epoch is as
    long as it can be without repeating a row: it has all rows of one loader, and of the others as many as the proportions say.
    The next epoch continues there, so that all rows of a loader come once before any comes again.

    Args:
        loaders: two or more ``ParquetLoader``s, or other ``EngineLoader``s, with the same batch size and columns, which only the
            mix may then read. Each keeps its own ``seed``, ``filters``, ``transform`` and the like. The mix is ``shards_strict``
            if any of them is.
        probabilities: the proportion of each loader's rows, above 0. They are divided by their sum. Each loader must have a row
            in every epoch.
        seed: determines the order in which the loaders take turns.
        prefetch: batches read ahead; by default as in the loaders.
        shard: a (rank, size) for use outside a State: yield that rank's part of each batch, without repeated batches.

    If the loaders have ``with_row_ids=True``, a batch also has int64 ``_dataset``, the index of each row's loader in the list.
    Raises ValueError for loaders that do not fit together, and DataError at the first batch in which their columns differ.
    """

    def __init__(
        self,
        loaders: Sequence[EngineLoader],
        probabilities: Sequence[float],
        *,
        seed: int = 0,
        prefetch: int | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Compute how many rows of each loader an epoch has, without reading anything.

        Raises ValueError for loaders that do not fit together, and for proportions that are not above 0 or leave a loader
        without a row.
        """
        self._loaders = _checked(loaders)
        weights = _normalized(probabilities, len(self._loaders))
        seed = whole_number("seed", seed, 0)
        if prefetch is not None:
            prefetch = whole_number("prefetch", prefetch, 1)
        self._counts = _all_with_rows(rows_of_epoch(weights, [loader.rows_total for loader in self._loaders]), weights)
        plan = self._loaders[0].tracker.plan
        spec = OrderSpec(seed, True, 1, 1, False)
        parts = [{**loader.identity} for loader in self._loaders]
        contents = [part.pop("content", None) for part in parts]
        identity = {
            "kind": "mix",
            "dataset": "+".join(str(loader.identity["dataset"]) for loader in self._loaders),
            **({"content": "+".join(map(str, contents))} if all(contents) else {}),
            "probabilities": " ".join(f"{weight:.9g}" for weight in weights),
            "loaders": hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest(),
            "rows": sum(self._counts),
            "seed": seed,
        }
        self._prefetch = prefetch
        strict = any(loader.shards_strict for loader in self._loaders)
        super().__init__(RowGroupTracker(np.array([sum(self._counts)]), spec, plan), identity, shard, strict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError and ValueError as the loaders do, and for a mix of other loaders."""
        same = ("kind", "dataset", "rows")
        if state.get("loaders") != self._identity["loaders"] and all(
            state.get(key) == self._identity[key] for key in same
        ):
            raise ValueError(
                "the mix was saved with loaders of other settings: give each the seed, shuffle, filters, shuffle_rows and other "
                "arguments that it had, in the same order"
            )
        super().load_state_dict(state)

    def close(self) -> None:
        """End the current iteration, close files, and drop the rows held."""
        super().close()
        for loader in self._loaders:
            loader.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[Iterator[tuple[Step, int, Batch]]]:
        tracker = self._tracker
        order = MixOrder(self._counts, self._own_spec.seed, tracker.epoch)
        builder = _MixBuilder(order, [_Part(loader) for loader in self._loaders], self.shards is not None)
        prefetch = self._prefetch or min(loader.prefetch_in(tracker) for loader in self._loaders)
        ahead = ReadAhead(builder, tracker, prefetch)
        try:
            with ahead:
                yield ((delivery.step, delivery.ticket_sum, delivery.batch) for delivery in ahead)
        finally:
            if not ahead.abandoned:
                for loader in self._loaders:
                    loader.close()


class _Part:
    """One loader's rows, pass after pass: row r of pass p is row p * rows + r of the whole sequence."""

    def __init__(self, loader: EngineLoader) -> None:
        self.loader = loader
        self.jagged = loader.jagged
        self._tracker = loader.tracker
        self._builder: tuple[int, BlockBuilder] | None = None

    @property
    def rows(self) -> int:
        """The rows of a pass."""
        return self._tracker.total

    def build(self, passed: int, steps: list[Step], jagged: frozenset[str], in_shards: bool) -> list[Batch]:
        """Return this rank's rows of consecutive steps within one pass."""
        if self._builder is None or self._builder[0] != passed:
            order = EpochOrder(self._tracker.rows, passed, self._tracker.spec)
            store = self.loader.open_store(order)
            self._builder = passed, self.loader.builder(store, jagged, pinned=False, in_shards=in_shards)
        return [ready.batch for ready in self._builder[1].build(steps, _OWN)]


class _MixBuilder:
    """Makes a rank's batches of consecutive steps by merging the batches of the parts; see ``BlockBuilder``."""

    def __init__(self, order: MixOrder, parts: list[_Part], in_shards: bool) -> None:
        self._order = order
        self._parts = parts
        self._in_shards = in_shards
        self._jagged = frozenset().union(*(part.jagged for part in parts))
        self._pinned = parts[0].loader.pinned

    def build(self, steps: list[Step], rank: int) -> list[ReadyBatch]:
        """Return the batches of consecutive steps. Blocks on reading; raises DataError."""
        ranges = [_own_range(step, rank) for step in steps]
        found = [
            self._of_part(part, number, list(zip(steps, ranges, strict=True)))
            for number, part in enumerate(self._parts)
        ]
        ready = []
        for place, (step, (start, stop)) in enumerate(zip(steps, ranges, strict=True)):
            datasets = self._order.datasets(start, stop)
            batch = self._merged(datasets, [of_part[place] for of_part in found])
            tickets = (start + stop - 1) * (stop - start) // 2 if step.rank_rows[rank] else 0
            ready.append(ReadyBatch(step, tickets, batch))
        return ready

    def _of_part(self, part: _Part, number: int, steps: list[tuple[Step, tuple[int, int]]]) -> list[list[Batch]]:
        """Return this rank's rows of the part for each step, in one batch, or in several if a pass ends within the step."""
        found: list[list[Batch]] = [[] for _ in steps]
        asked: list[tuple[int, int, Step]] = []
        for place, (step, own) in enumerate(steps):
            edges = (step.start, *own, step.start + step.rows)
            begin, low, high, end = (int(self._order.given(ticket)[number]) for ticket in edges)
            before = self._order.epoch * self._order.counts[number]
            asked += [
                (passed, place, cut)
                for passed, cut in _in_passes(before + begin, before + low, before + high, before + end, part.rows)
                if cut.rank_rows[_OWN]
            ]
        for passed, group in itertools.groupby(asked, key=lambda each: each[0]):
            places, cuts = zip(*((place, cut) for _, place, cut in group), strict=True)
            for place, batch in zip(places, part.build(passed, list(cuts), self._jagged, self._in_shards), strict=True):
                found[place].append(batch)
        return found

    def _merged(self, datasets: np.ndarray, found: list[list[Batch]]) -> Batch:
        """Put the rows of the parts in the order of their tickets."""
        batches = [batch for of_part in found for batch in of_part]
        names = batches[0].keys()
        for batch in batches:
            if batch.keys() != names:
                raise DataError(
                    f"the loaders of a mix have different columns: {', '.join(names)}, and {', '.join(batch)}"
                )
        order = torch.from_numpy(np.argsort(np.argsort(datasets, kind="stable"), kind="stable"))
        merged = {name: self._column(name, [batch[name] for batch in batches], order) for name in names}
        if "_row_group" in merged:
            merged["_dataset"] = torch.from_numpy(datasets.astype(np.int64))
        return merged

    def _column(self, name: str, columns: list[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
        jagged = any(column.is_nested for column in columns)
        kinds = {(column.dtype, column.dim() if jagged else column.shape[1:]) for column in columns}
        if len(kinds) > 1:
            raise DataError(
                f"column {name!r} is not alike in the loaders of a mix: {' and '.join(sorted(set(map(_kind, columns))))}; "
                "give a transform= that makes it so"
            )
        if jagged:
            rows = [row for column in columns for row in column.unbind()]
            return torch.nested.nested_tensor([rows[place] for place in order.tolist()], layout=torch.jagged)
        found = torch.cat(columns)[order]
        return found.pin_memory() if self._pinned else found


def _kind(column: torch.Tensor) -> str:
    shape = "in lists of several lengths" if column.is_nested else f"of shape {tuple(column.shape[1:])}"
    return f"{column.dtype} {shape}"


def _own_range(step: Step, rank: int) -> tuple[int, int]:
    """Return a rank's tickets of a step; if it has none, up to two others, for a batch of weight 0."""
    before, own = sum(step.rank_rows[:rank]), step.rank_rows[rank]
    start, rows = (step.start + before, own) if own else (step.start, min(2, step.rows))
    return start, start + rows


def _in_passes(begin: int, low: int, high: int, end: int, rows: int) -> Iterator[tuple[int, Step]]:
    """Cut rows [begin, end) of a part, of which [low, high) are this rank's, at the ends of passes of ``rows`` rows."""
    while begin < end:
        passed, start = divmod(begin, rows)
        stop = min(end, (passed + 1) * rows)
        edges = [begin, *(min(max(edge, begin), stop) for edge in (low, high)), stop]
        yield passed, Step(start, stop - begin, tuple(after - before for before, after in itertools.pairwise(edges)))
        begin = stop


def _checked(loaders: Sequence[EngineLoader]) -> list[EngineLoader]:
    found = list(loaders)
    if len(found) < 2:
        raise ValueError(f"loaders must be two or more, not {len(found)}")
    if len({id(loader) for loader in found}) < len(found):
        raise ValueError("loaders must be different objects; make one for each place in the mix")
    for place, loader in enumerate(found):
        if not isinstance(loader, EngineLoader):
            raise ValueError(
                f"loaders[{place}] must be an EngineLoader, such as a ParquetLoader, not {type(loader).__name__}"
            )
        if loader.tracker.plan != found[0].tracker.plan:
            raise ValueError(
                f"loaders[{place}] has another batch size, shards=, balance= or drop_last= than loaders[0]: "
                f"{loader.tracker.plan}, {found[0].tracker.plan}"
            )
        if not loader.rows_total:
            raise ValueError(f"loaders[{place}] has no rows")
        if loader.tracker.size > 1:
            raise ValueError(f"loaders[{place}] has a shard= of its own; give shard= to the mix")
    return found


def _normalized(probabilities: Sequence[float], count: int) -> list[float]:
    try:
        weights = [float(weight) for weight in probabilities]
    except (TypeError, ValueError, OverflowError) as failure:
        raise ValueError(f"probabilities must be a list of numbers, not {probabilities!r}") from failure
    if len(weights) != count:
        raise ValueError(f"probabilities must have one number for each of the {count} loaders, not {len(weights)}")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"probabilities must be above 0, not {probabilities!r}")
    normalized = [weight / sum(weights) for weight in weights]
    if not all(normalized):
        raise ValueError(f"probabilities must have a sum and quotients that floats can hold, not {probabilities!r}")
    return normalized


def _all_with_rows(counts: tuple[int, ...], weights: Sequence[float]) -> tuple[int, ...]:
    for place, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        if not count:
            raise ValueError(
                f"loaders[{place}] would never have a row: an epoch has {sum(counts)}, so that none of the others has a row "
                f"twice, and {weight:.3g} of these rounds to 0; give it a greater probability, or the others more rows"
            )
    return counts
