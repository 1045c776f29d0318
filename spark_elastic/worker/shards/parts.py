"""Parts: the loop over the shards of a batch that this rank computes, after which gradients are those of the whole batch.

Before each part, gradients are cleared, buffers are set back, and all random number generators are seeded by (the loader's
seed, epoch, first row of the batch, number of the loop over it, shard): what a part computes depends on its shard and on
nothing else. After it, its gradients and buffers are taken, weighted by its rows, and added in the order of the tree. When the
loop ends, the sums of all ranks are added, which is a collective. A loop that is left early changes nothing.

Which gradients and buffers the parts touch is not known in advance, and may differ between ranks. Therefore ranks first
exchange everything that earlier loops of the generation have touched, along with a header that counts what this loop has
touched; whatever is touched for the first time follows in a second exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spark_elastic.data.deliveries import Delivery, deliveries
from spark_elastic.data.randomness import seed_all
from spark_elastic.data.shards import Cut, Part
from spark_elastic.data.stopwatch import note_gradients
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.shards.exchange import Values, add, add_over_ranks
from spark_elastic.worker.shards.loops import HOW, loops
from spark_elastic.worker.shards.sources import Sources
from spark_elastic.worker.shards.tree import RunningSum
from spark_elastic.worker.world import World

# How many numbers a part can note. The header has room for this many.
MOST_NOTED = 8


class Parts:
    """The shards of one batch that this rank computes, to be iterated once; ``model.parts(batch)`` makes it."""

    def __init__(self, batch: object, sources: Sources, touched: set[int], world: World | None) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        delivery = deliveries.find_cut(leaves)
        if delivery is None or delivery.cut is None:
            raise TrainingCodeError(
                "model.parts(batch) was given something else than one batch of a loader in the State that was made with "
                f"shards=, as the loader delivered it. {HOW}"
            )
        self._rank, self._size = (0, 1) if world is None else (world.rank, world.size)
        self._world = world
        self._cut: Cut = delivery.cut
        self._delivery: Delivery = delivery
        self._parts = self._cut.parts(self._rank, self._size)
        self._batches = divided(batch, self._parts, self._cut)
        self._sources = sources
        # The places of what the loops of this generation have touched so far; equal on all ranks.
        self._touched = touched
        self._noted: dict[str, float] = {}
        self._names: list[str] | None = None
        self._means: dict[str, float] | None = None
        self._has_begun = False

    def note(self, **values: torch.Tensor | float) -> None:
        """Note numbers of the present part, such as its loss, whose means over all rows ``means`` has after the loop."""
        self._noted |= {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in values.items()
        }
        if len(self._noted) > MOST_NOTED:
            raise ValueError(f"a part can note {MOST_NOTED} numbers at most, not {sorted(self._noted)}")

    @property
    def means(self) -> Mapping[str, float]:
        """The means of the noted numbers over all rows of the global batch, equal on all ranks; known after the loop."""
        if self._means is None:
            raise TrainingCodeError("the means over a batch are known after the loop over its parts")
        return self._means

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise TrainingCodeError("a loop over the parts of a batch runs once; call model.parts(batch) for another")
        self._has_begun = True
        loops.begin(self)
        try:
            self._seeds = (*self._cut.place, self._delivery.loops)
            self._delivery.loops += 1
            self._gradients = [parameter.grad for parameter in self._sources.parameters]
            with torch.no_grad():
                for buffer in self._sources.buffers:
                    buffer.note()
            running: RunningSum[Values] = RunningSum(self._cut.shards, add)
            computed = {part.shard: values for part, values in zip(self._parts, self._batches, strict=True)}
            weights = {part.shard: part.weight for part in self._parts}
            for shard in self._cut.shards_of(self._rank, self._size):
                contribution = self._nothing()
                if shard in computed:
                    self._enter(shard)
                    yield computed.pop(shard)
                    contribution = self._take(weights[shard])
                running.push(shard, contribution)
            note_gradients()
            self._finish(running)
            loops.end(self)
        finally:
            loops.leave(self)

    def put_back(self) -> None:
        """Undo what the parts have done so far to gradients and buffers."""
        for parameter, gradient in zip(self._sources.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer in self._sources.buffers:
                buffer.set()

    # ------------------------------------------------------------------ one part

    def _enter(self, shard: int) -> None:
        seed_all((*self._seeds, shard))
        self._noted = {}
        self._versions = [parameter._version for parameter in self._sources.parameters]
        for parameter in self._sources.parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer in (*self._sources.averaged, *self._sources.counters):
                buffer.set()

    def _nothing(self) -> Values:
        # The header, each gradient, the rows of each gradient that is sparse, and each averaged buffer.
        return [None] * (1 + 2 * len(self._sources.parameters) + len(self._sources.averaged))

    def _check(self) -> None:
        """Refuse what must not happen within a part."""
        if [parameter._version for parameter in self._sources.parameters] != self._versions:
            raise TrainingCodeError(
                f"parameters changed inside the loop over model.parts(batch): optimizer.step() belongs after it. {HOW}"
            )
        for buffer in self._sources.constant:
            if buffer.has_changed:
                raise TrainingCodeError(
                    f"the buffer {buffer.name} holds whole numbers or bools and changes while a shard is computed, and nothing "
                    "can be made of the changes of several shards; train without shards="
                )
        if self._names is not None and self._names != sorted(self._noted):
            raise TrainingCodeError(f"note() was called with {sorted(self._noted)}, and before with {self._names}")

    @torch.no_grad()
    def _take(self, weight: float) -> Values:
        """Take what a part of this weight contributes, its header first. A part of weight 0 contributes nothing."""
        self._check()
        self._names = sorted(self._noted)
        values = self._nothing()
        if not weight:
            return values
        sources, count = self._sources, len(self._sources.parameters)
        for place, parameter in enumerate(sources.parameters, 1):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout is torch.strided:
                values[place] = gradient.detach()
            elif gradient is not None:
                values[place], values[count + place] = _dense(gradient.detach())
        is_touched = [float(value is not None) for value in values[1 : 1 + 2 * count]]
        for place, buffer in enumerate(sources.averaged, 1 + 2 * count):
            values[place] = buffer.present.detach().clone()
            is_touched.append(float(buffer.has_changed))
        weighted = [value for value in (*values[: 1 + count], *values[1 + 2 * count :]) if value is not None]
        if weighted:
            torch._foreach_mul_(weighted, weight)
        counters = [float(buffer.present - buffer.before) for buffer in sources.counters]
        noted = [self._noted[name] * weight for name in self._names]
        room = [0.0] * (MOST_NOTED - len(noted))
        values[0] = torch.tensor([*is_touched, *counters, *_described(self._names), *noted, *room])
        return values

    # ------------------------------------------------------------------ the end of the loop

    @torch.no_grad()
    def _finish(self, running: RunningSum[Values]) -> None:
        """Add up over all ranks, and set gradients, buffers, means and random numbers, alike on all ranks."""
        sources = self._sources
        rows = [torch.empty(parameter.shape[:1], device=parameter.device) for parameter in sources.parameters]
        like = [*sources.parameters, *rows, *(buffer.tensor for buffer in sources.averaged)]
        header = torch.empty(len(like) + len(sources.counters) + 2 + MOST_NOTED)
        sums = self._add(running, [header, *like], [0, *sorted(self._touched)])
        numbers = sums[0].tolist()
        noted, names = numbers[-MOST_NOTED:], self._names or []
        touched, counted, described = _split(list(map(round, numbers[:-MOST_NOTED])), len(like), len(sources.counters))
        if described != [number * self._filled for number in _described(names)]:
            raise TrainingCodeError(
                f"ranks noted different numbers of their parts; this one noted {names}. Call parts.note() alike on all ranks"
            )
        missing = {place for place, times in enumerate(touched, 1) if times} - self._touched
        if missing:
            sums |= self._add(running, [header, *like], sorted(missing))
            self._touched |= missing
        self._set_gradients(touched, sums)
        self._set_buffers(touched[2 * len(sources.parameters) :], counted, sums)
        self._means = dict(zip(names, noted, strict=False))
        # Code after the loop draws the same random numbers on all ranks.
        seed_all((*self._seeds, self._cut.shards))

    def _add(
        self, running: RunningSum[Values], like: Sequence[torch.Tensor], places: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        nodes = {node: [values[place] for place in places] for node, values in running.nodes.items()}
        sums = add_over_ranks(self._cut, nodes, [like[place] for place in places], self._world)
        return dict(zip(places, sums, strict=True))

    def _set_gradients(self, touched: Sequence[int], sums: Mapping[int, torch.Tensor]) -> None:
        count = len(self._sources.parameters)
        for place, parameter in enumerate(self._sources.parameters):
            before = self._gradients[place]
            parameter.grad = before
            if not touched[place]:
                continue
            # The copy has memory of its own, so that it begins at the same alignment in every world.
            gradient = torch.empty_like(parameter).copy_(sums[1 + place])
            if touched[place] == touched[count + place]:  # the gradient was sparse in every shard that had one
                gradient = _sparse(gradient, sums[1 + count + place])
            parameter.grad = gradient if before is None else before.add_(gradient)

    def _set_buffers(self, touched: Sequence[int], counted: Sequence[int], sums: Mapping[int, torch.Tensor]) -> None:
        first = 1 + 2 * len(self._sources.parameters)
        for place, (buffer, times) in enumerate(zip(self._sources.averaged, touched, strict=True)):
            buffer.set(sums[first + place] if times else None)
        for buffer, change in zip(self._sources.counters, counted, strict=True):
            if change % self._filled:
                raise TrainingCodeError(
                    f"the buffer {buffer.name} counts differently in the shards of a batch; train without shards="
                )
            buffer.set(buffer.before + change // self._filled if change else None)

    @property
    def _filled(self) -> int:
        """How many shards of the batch have rows."""
        return min(self._cut.shards, self._cut.rows)


def _described(names: Sequence[str]) -> tuple[int, int]:
    """Return two numbers that are equal for the same names, and small enough for float32 to add up those of all shards."""
    return len(names), zlib.crc32("\n".join(names).encode()) % 2**12


def _split(numbers: list[int], touched: int, counted: int) -> tuple[list[int], list[int], list[int]]:
    return numbers[:touched], numbers[touched : touched + counted], numbers[touched + counted :]


def divided(batch: object, parts: Sequence[Part], cut: Cut) -> list[object]:
    """Return each part of a batch, in memory of its own: kernels may compute other bits where rows begin at another address."""
    if cut.is_divided:
        if not isinstance(batch, (list, tuple)) or len(batch) != len(parts):
            raise ValueError(
                f"the loader delivered a list of {len(parts)} parts; give model.parts() a list of as many, in their order"
            )
        return [pytree.tree_map_only(torch.Tensor, torch.clone, part) for part in batch]
    leaves, structure = pytree.tree_flatten(batch)
    rows = parts[-1].stop
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.size(0) != rows:
            what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(
                f"a batch to be cut into parts consists of tensors of this rank's {rows} rows, and holds {what}"
            )
    return [pytree.tree_unflatten([_rows(leaf, part.start, part.stop) for leaf in leaves], structure) for part in parts]


def _rows(leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if not leaf.is_nested:
        return leaf[start:stop].clone()
    offsets = leaf.offsets()[start : stop + 1]  # type: ignore[attr-defined]
    values = leaf.values()[int(offsets[0]) : int(offsets[-1])].clone()
    return torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])


def _dense(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sparse gradient as a dense one, and a vector that is 1 for the rows that it has."""
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise TrainingCodeError(
            f"a gradient of layout {gradient.layout} cannot be added up in the order of shards; only gradients whose rows are "
            "sparse can, as those of Embedding(sparse=True)"
        )
    gradient = gradient.coalesce()
    rows = torch.zeros(gradient.shape[:1], device=gradient.device)
    return gradient.to_dense(), rows.index_fill_(0, gradient.indices()[0], 1.0)


def _sparse(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a gradient that any shard had, as a sparse one."""
    (present,) = rows.nonzero(as_tuple=True)
    shape = list(gradient.shape)
    return torch.sparse_coo_tensor(present[None], gradient[present], shape, is_coalesced=True)
