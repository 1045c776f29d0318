"""Parts: the loop over the shards of a batch that this rank computes, after which gradients are those of the whole batch.

Before each part, gradients are cleared, buffers are set back, and all random number generators are seeded by (the loader's
seed, epoch, first row of the batch, number of the loop over it, shard): what a part computes depends on its shard and on
nothing else. Its gradients and buffers are weighted by its rows, relative to those of the largest shard, so that shards of equal
size need no weights, and added in the order of the tree. When the loop ends, the sums of all ranks are added, which is a
collective, and divided. A loop that is left early changes nothing.

Which gradients and buffers the parts touch is not known in advance, and may differ between ranks. Therefore ranks first
exchange everything that earlier loops of the generation have touched, along with a header that counts what this loop has
touched; whatever is touched for the first time follows in a second exchange.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from spark_elastic.data.convert import jagged_tensor
from spark_elastic.data.deliveries import Delivery, deliveries
from spark_elastic.data.randomness import seed_all
from spark_elastic.data.shards import Cut, Part
from spark_elastic.data.stopwatch import note_gradients
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.fingerprint import sums_of_bits
from spark_elastic.worker.shards.exchange import Room, add_over_ranks
from spark_elastic.worker.shards.loops import HOW, loops
from spark_elastic.worker.shards.sources import Sources
from spark_elastic.worker.shards.tree import Node, RunningSum
from spark_elastic.worker.shards.workspace import Contribution, Layout, Workspace
from spark_elastic.worker.world import World

# How many numbers a part can note. The header has room for this many.
MOST_NOTED = 32
# In as many loops of each kind, parameters are compared with what they were before. Later ones are only asked for their versions,
# which do not tell of a change through ``.data``.
LOOPS_COMPARED = 3
# The header has the type of most gradients, with which it travels. Numbers that it cannot hold exactly are sent as two: counts
# as high and low halves, noted numbers as their rounded value and the remainder.
_HEADER, _HALF = torch.float32, 2**12

_NOT_CUT = "A batch of a loader outside the State, as for validation, is not cut: call the model on it, after eval()"


class Parts:
    """The shards of one batch that this rank computes, to be iterated once. Created by ``model.parts(batch)``."""

    def __init__(self, batch: object, sources: Sources, workspace: Workspace, world: World | None) -> None:
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
        self._rows = self._cut.shard_rows
        self._parts = self._cut.parts(self._rank, self._size)
        self._batches = divided(batch, self._parts, self._cut)
        self._sources = sources
        self._workspace = workspace
        self._noted: dict[str, float] = {}
        self._names: list[str] | None = None
        # The noted numbers of each part.
        self._notes: dict[int, list[float]] = {}
        self._means: dict[str, float] | None = None
        self._has_begun = False
        self._hooks: list[RemovableHandle] = []

    def note(self, **values: torch.Tensor | float) -> None:
        """Note numbers of the current part, such as its loss. After the loop, ``means`` has their means over all rows."""
        self._noted |= {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in values.items()
        }
        for name, value in self._noted.items():
            if math.isfinite(value) and abs(value) > torch.finfo(_HEADER).max:
                raise ValueError(
                    f"note({name}={value!r}) is beyond what ranks exchange, {torch.finfo(_HEADER).max:.2g}"
                )
        if len(self._noted) > MOST_NOTED:
            raise ValueError(f"a part can note {MOST_NOTED} numbers at most, not {sorted(self._noted)}")

    @property
    def rows(self) -> int:
        """The number of rows of the global batch."""
        return self._cut.rows

    @property
    def is_repeated(self) -> bool:
        """Whether this rank has no rows of the batch, so that its only part repeats another rank's and counts nothing."""
        return not any(part.weight for part in self._parts)

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
            self._lay_out()
            is_compared = self._workspace.loops < LOOPS_COMPARED
            self._workspace.loops += 1
            before = sums_of_bits(self._sources.parameters) if is_compared else []
            running = RunningSum(self._cut.shards, Contribution.add)
            computed = {part.shard: values for part, values in zip(self._parts, self._batches, strict=True)}
            weighed = {part.shard for part in self._parts if part.weight}
            for shard in self._cut.shards_of(self._rank, self._size):
                self._contribution = self._workspace.at(running.depth)
                if shard in computed:
                    self._enter(shard)
                    yield computed.pop(shard)
                    self._check()
                if shard in weighed:
                    self._take(shard)
                else:
                    self._contribution.clear()
                running.push(shard, self._contribution)
            if is_compared:
                self._refuse_changed(before, sums_of_bits(self._sources.parameters))
            note_gradients()
            loops.add_up()
            self._finish(running.nodes)
            loops.end(self)
        finally:
            loops.leave(self)
            self._remove_hooks()

    def put_back(self) -> None:
        """Undo what the parts have done so far to gradients and buffers."""
        self._remove_hooks()
        for parameter, gradient in zip(self._sources.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer in self._sources.buffers:
                if buffer.has_changed:
                    buffer.set()

    # ------------------------------------------------------------------ the places of gradients and buffers

    # The header has place 0. Behind it come the gradients, the rows that each gradient has if it is sparse, and the averaged
    # buffers.

    @property
    def _rows_from(self) -> int:
        return 1 + len(self._sources.parameters)

    @property
    def _buffers_from(self) -> int:
        return 1 + 2 * len(self._sources.parameters)

    def _like(self, place: int) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of the value at this place."""
        if place == 0:
            touched = self._buffers_from - 1 + len(self._sources.averaged)
            counted = 2 * len(self._sources.counters)
            return torch.empty(touched + counted + 3 + self._cut.shards * 2 * MOST_NOTED, dtype=_HEADER, device="cpu")
        if place >= self._buffers_from:
            return self._sources.averaged[place - self._buffers_from].tensor
        if place >= self._rows_from:
            parameter = self._sources.parameters[place - self._rows_from]
            return torch.empty(parameter.shape[:1], dtype=_HEADER, device=parameter.device)
        return self._sources.parameters[place - 1]

    def _lay_out(self) -> None:
        """Make slots for what earlier loops of the generation have touched, and move gradients into them as they arise."""
        like = {place: self._like(place) for place in {0, *self._workspace.touched}}
        if not self._workspace.has_slots_for(like):
            self._workspace.lay_out(like, self._size)
        self._counts = [0] * (self._buffers_from - 1 + len(self._sources.averaged))
        self._counted = [0] * len(self._sources.counters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._settle, place))
            for place, parameter in enumerate(self._sources.parameters, 1)
            if place in like and parameter.requires_grad
        ]

    def _settle(self, place: int, parameter: torch.Tensor) -> None:
        """Move a gradient that backward has just made into its slot. Its memory is reused for the next one."""
        gradient, slot = parameter.grad, self._contribution.slots[place]
        if gradient is None or gradient is slot or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        parameter.grad = slot.copy_(gradient)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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

    def _check(self) -> None:
        """Refuse what must not happen within a part."""
        self._refuse_changed(self._versions, [parameter._version for parameter in self._sources.parameters])
        appeared = self._sources.appeared()
        if appeared:
            raise TrainingCodeError(
                f"{appeared} was registered while a shard was computed, with a value that depends on the rank's shards: give it "
                "its value above the loop, or train without shards="
            )
        for buffer in self._sources.constant:
            if buffer.has_changed:
                raise TrainingCodeError(
                    f"the buffer {buffer.name} holds whole numbers, bools or complex numbers and changes while a shard is "
                    "computed, and nothing can be made of the changes of several shards; train without shards="
                )
        names = sorted(self._noted)
        if self._names is not None and self._names != names:
            raise TrainingCodeError(f"note() was called with {names}, and before with {self._names}")
        self._names = names

    def _refuse_changed(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Refuse parameters of which a number, a version or a sum of their bits, is not what it was before."""
        changed = [name for name, old, new in zip(self._sources.names, before, now, strict=True) if old != new]
        if changed:
            raise TrainingCodeError(
                f"the parameter {changed[0]} changed inside the loop over model.parts(batch). Either optimizer.step() was called "
                "there, which belongs after the loop, as does clamping weights, or a forward changes weights, as "
                "Embedding(max_norm=) and Keras's SpectralNormalization do: leave that out, or train without shards=. "
                f"{HOW}"
            )

    @torch.no_grad()
    def _take(self, shard: int) -> None:
        """Take the contribution of this shard's part: gradients, buffers, counts and noted numbers."""
        sources, taken = self._sources, self._contribution
        given = {0}
        for place, parameter in enumerate(sources.parameters, 1):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient, rows = _dense(gradient.detach())
                place_of_rows = place + self._rows_from - 1
                taken.put(place_of_rows, rows)
                given.add(place_of_rows)
                self._counts[place_of_rows - 1] += 1
            taken.put(place, gradient)
            given.add(place)
            self._counts[place - 1] += 1
        for place, buffer in enumerate(sources.averaged, self._buffers_from):
            taken.put(place, buffer.present)
            given.add(place)
            self._counts[place - 1] += buffer.has_changed
        for place, slot in taken.slots.items():
            if place not in given:
                slot.zero_()
        weight = self._rows[shard] / self._cut.largest
        if weight != 1:
            weighted = [place for place in given if 0 < place < self._rows_from or place >= self._buffers_from]
            if weighted:  # a part without backward has no gradients
                torch._foreach_mul_([taken.value(place) for place in weighted], weight)
        for number, counter in enumerate(sources.counters):
            self._counted[number] += int(counter.present) - int(counter.before)
        self._notes[shard] = [self._noted[name] for name in sorted(self._noted)]

    # ------------------------------------------------------------------ the end of the loop

    @torch.no_grad()
    def _finish(self, nodes: Mapping[Node, Contribution]) -> None:
        """Add up over all ranks, and set gradients, buffers, means and random numbers, alike on all ranks."""
        for number, contribution in enumerate(nodes.values()):
            header = contribution.slots[0]
            header.copy_(self._header()) if number == 0 else header.zero_()
        sums = self._add(self._workspace.layout, nodes, self._workspace.received)
        numbers, noted = sums[0][: -self._cut.shards * 2 * MOST_NOTED], sums[0][-self._cut.shards * 2 * MOST_NOTED :]
        touched, counted, described = _split(list(map(round, numbers.tolist())), len(self._counts), len(self._counted))
        *of_names, of_buffers = [number * self._filled for number in self._description]
        if described[-1] != of_buffers:
            raise TrainingCodeError(
                "the models' buffers were not the same on all ranks when the loop over model.parts(batch) began: a model, or "
                "the module inside its wrapper, was called in training mode outside such a loop (for validation call eval()), "
                "or a buffer that changes is registered with persistent=False, so that workers that arrive do not get it"
            )
        if described[:-1] != of_names:
            raise TrainingCodeError(
                f"ranks noted different numbers of their parts; this one noted {self._names}. Call parts.note() alike on all "
                "ranks"
            )
        means = self._means_of(noted.double().view(-1, MOST_NOTED, 2).sum(2).tolist())
        missing = {place for place, times in enumerate(touched, 1) if times} - self._workspace.touched
        if missing:
            layout = Layout({place: self._like(place) for place in missing}, self._size)
            sums |= self._add(layout, {node: layout.filled(each.others) for node, each in nodes.items()}, _new)
            self._workspace.touched |= missing
        # In the sum the largest shard has weight 1. This scale makes the sum a mean over rows.
        scale = self._cut.largest / self._cut.rows
        self._set_gradients(touched, sums, scale)
        self._set_buffers(touched[self._buffers_from - 1 :], counted, sums, scale)
        self._means = means
        # Code after the loop draws the same random numbers on all ranks.
        seed_all((*self._seeds, self._cut.shards))

    def _header(self) -> torch.Tensor:
        """Return how often this rank's parts have touched each place, the counters' progress, and the noted numbers."""
        noted = torch.zeros(self._cut.shards, MOST_NOTED, 2, dtype=_HEADER, device="cpu")
        for shard, numbers in self._notes.items():
            exact = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            near = exact.to(_HEADER)
            noted[shard, : len(numbers), 0] = near
            noted[shard, : len(numbers), 1] = torch.where(near.isfinite(), exact - near, 0.0)
        described = [number * len(self._notes) for number in self._description]
        counted = [part for count in self._counted for part in divmod(count, _HALF)]
        counts = torch.tensor([*self._counts, *counted, *described], dtype=_HEADER, device="cpu")
        return torch.cat([counts, noted.view(-1)])

    @functools.cached_property
    def _description(self) -> tuple[int, int, int]:
        """Three numbers that are equal on ranks that note the same names and began with the same buffers.

        They are small enough for float32 to add up those of all shards.
        """
        names = self._names or []
        return len(names), _small_digest("\n".join(names)), _small_digest(repr(self._sources.sums_before()))

    def _means_of(self, noted: list[list[float]]) -> dict[str, float]:
        """Return the means over rows of the numbers that all parts have noted."""
        shares = [rows / self._cut.rows for rows in self._rows]
        columns = zip(*(numbers for numbers, share in zip(noted, shares, strict=True) if share), strict=True)
        shares = [share for share in shares if share]
        means = [sum(map(operator.mul, column, shares)) for column in columns]
        return dict(zip(self._names or [], means, strict=False))

    def _add(self, layout: Layout, nodes: Mapping[Node, Contribution], room: Room) -> dict[int, torch.Tensor]:
        flat = add_over_ranks(self._cut, {node: each.flat for node, each in nodes.items()}, room, self._world)
        return layout.slots_of(flat)

    def _set_gradients(self, touched: Sequence[int], sums: Mapping[int, torch.Tensor], scale: float) -> None:
        for place, parameter in enumerate(self._sources.parameters, 1):
            before = self._gradients[place - 1]
            parameter.grad = before
            if not touched[place - 1]:
                continue
            # The gradient gets memory of its own, so that its alignment is the same in every world.
            gradient = torch.mul(sums[place], scale, out=torch.empty_like(parameter))
            place_of_rows = place + self._rows_from - 1
            if touched[place - 1] == touched[place_of_rows - 1]:  # the gradient was sparse in every shard that had one
                gradient = _sparse(gradient, sums[place_of_rows])
            parameter.grad = gradient if before is None else before.add_(gradient)

    def _set_buffers(
        self, touched: Sequence[int], counted: Sequence[int], sums: Mapping[int, torch.Tensor], scale: float
    ) -> None:
        for buffer in (*self._sources.averaged, *self._sources.counters):
            buffer.set()
        # All are reset before any is set, because modules may have a tensor in common that only one of them changes.
        for place, (buffer, times) in enumerate(zip(self._sources.averaged, touched, strict=True), self._buffers_from):
            if times:
                buffer.set(sums[place] * scale)
        for buffer, change in zip(self._sources.counters, counted, strict=True):
            if change % self._filled:
                raise TrainingCodeError(
                    f"the buffer {buffer.name} counts differently in the shards of a batch; train without shards="
                )
            if change:
                buffer.set((buffer.before.long() + change // self._filled).to(buffer.before.dtype))

    @property
    def _filled(self) -> int:
        """How many shards of the batch have rows."""
        return min(self._cut.shards, self._cut.rows)


def _new(number: int, like: torch.Tensor, length: int) -> torch.Tensor:
    return like.new_empty(length)


def _small_digest(text: str) -> int:
    return zlib.crc32(text.encode()) % 2**12


def _split(numbers: list[int], touched: int, counted: int) -> tuple[list[int], list[int], list[int]]:
    halves, described = numbers[touched : touched + 2 * counted], numbers[touched + 2 * counted :]
    return (
        numbers[:touched],
        [high * _HALF + low for high, low in zip(halves[::2], halves[1::2], strict=True)],
        described,
    )


def divided(batch: object, parts: Sequence[Part], cut: Cut) -> list[object]:
    """Return each part of a batch, in memory of its own: kernels may compute other bits if rows begin at another address."""
    if cut.is_divided:
        if not isinstance(batch, (list, tuple)) or len(batch) != len(parts):
            raise ValueError(
                f"the loader in the State delivered a list of {len(parts)} parts; give model.parts() a list of as many, in their "
                f"order. {_NOT_CUT}"
            )
        return [pytree.tree_map_only(torch.Tensor, torch.clone, part) for part in batch]
    leaves, structure = pytree.tree_flatten(batch)
    rows = parts[-1].stop
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.size(0) != rows:
            what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(
                f"a batch to be cut into parts consists of tensors of this rank's {rows} rows, and holds {what}. {_NOT_CUT}"
            )
    return [pytree.tree_unflatten([_rows(leaf, part.start, part.stop) for leaf in leaves], structure) for part in parts]


def _rows(leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if not leaf.is_nested:
        return leaf[start:stop].clone()
    offsets = leaf.offsets()[start : stop + 1]  # type: ignore[attr-defined]
    values = leaf.values()[int(offsets[0]) : int(offsets[-1])].clone()
    return jagged_tensor(values, offsets - offsets[0])


def _dense(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sparse gradient as a dense one, and a vector that is 1 for the rows that it has."""
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise TrainingCodeError(
            f"a gradient of layout {gradient.layout} cannot be added up in the order of shards; only gradients whose rows are "
            "sparse can, as those of Embedding(sparse=True)"
        )
    gradient = gradient.coalesce()
    rows = torch.zeros(gradient.shape[:1], dtype=_HEADER, device=gradient.device)
    return gradient.to_dense(), rows.index_fill_(0, gradient.indices()[0], 1.0)


def _sparse(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a gradient that any shard had, as a sparse one."""
    (present,) = rows.nonzero(as_tuple=True)
    shape = list(gradient.shape)
    # Torch warns unless it is told whether to check.
    return torch.sparse_coo_tensor(present[None], gradient[present], shape, is_coalesced=True, check_invariants=False)
