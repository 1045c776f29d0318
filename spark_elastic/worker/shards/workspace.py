"""Memory in which shards are added up: flat tensors, one for each depth of the tree, that are kept from loop to loop.

Values laid out flat are added, sent and received in one piece. Keeping the memory matters as well: if it were freed and
allocated again for every shard, each 4 KB would cost a page fault, which takes longer than filling them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# Slots begin at multiples of this many elements, so that kernels find them aligned like tensors of their own.
_ALIGNMENT = 64


@dataclass(slots=True)
class Contribution:
    """The contribution of a shard, or a node of the tree, to the sums.

    ``flat``: a tensor for each kind of device and dtype. ``slots``: the parts of it that belong to one place each.
    ``others``: values for places without a slot, none of which stands for zeros.
    """

    flat: list[torch.Tensor]
    slots: dict[int, torch.Tensor]
    others: dict[int, torch.Tensor] = field(default_factory=dict)

    def put(self, place: int, value: torch.Tensor) -> None:
        """Set the value of a place."""
        slot = self.slots.get(place)
        if slot is None:
            self.others[place] = value.detach().clone()
        elif slot is not value:
            slot.copy_(value)

    def value(self, place: int) -> torch.Tensor:
        """Return the value of a place that has been set."""
        return self.others[place] if place in self.others else self.slots[place]

    def clear(self) -> None:
        """Contribute zeros everywhere."""
        self.others = {}
        for flat in self.flat:
            flat.zero_()

    def add(self, other: Contribution) -> Contribution:
        """Add the values of the node to the right to this one, and return it.

        If one of the two lacks a value, zeros are added: this turns -0.0 into 0.0, as in a slot, or on a rank that received the
        zeros.
        """
        for mine, theirs in zip(self.flat, other.flat, strict=True):
            mine.add_(theirs)
        for place in {**self.others, **other.others}:
            left, right = self.others.get(place), other.others.get(place)
            if left is None or right is None:
                value = right if left is None else left
                assert value is not None
                self.others[place] = value.add_(0.0)
            else:
                left.add_(right)
        return self


class Layout:
    """Where the values of some places lie. It is the same on all ranks that have equal shapes for the same places."""

    def __init__(self, like: Mapping[int, torch.Tensor], size: int) -> None:
        self._like = like
        self._size = size
        self._kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place in sorted(like):
            self._kinds.setdefault((like[place].device, like[place].dtype), []).append(place)

    def contribution(self) -> Contribution:
        """Return zeros, in memory of their own. The length of each flat tensor is a multiple of the number of ranks."""
        flat = []
        for (device, dtype), places in self._kinds.items():
            length = max(1, sum(map(self._room, places)))
            flat.append(torch.zeros(-(-length // self._size) * self._size, dtype=dtype, device=device))
        return Contribution(flat, self.slots_of(flat))

    def filled(self, values: Mapping[int, torch.Tensor]) -> Contribution:
        """Return the values that these places have, and zeros for those that have none."""
        found = self.contribution()
        for place, slot in found.slots.items():
            if place in values:
                slot.copy_(values[place])
        return found

    def slots_of(self, flat: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the parts of flat tensors that belong to each place."""
        slots = {}
        for tensor, places in zip(flat, self._kinds.values(), strict=True):
            start = 0
            for place in places:
                like = self._like[place]
                slots[place] = tensor[start : start + like.numel()].view(like.shape)
                start += self._room(place)
        return slots

    def _room(self, place: int) -> int:
        return -(-self._like[place].numel() // _ALIGNMENT) * _ALIGNMENT


class Workspace:
    """The memory of one kind of loop in one generation, and the places that such loops have touched; equal on all ranks."""

    def __init__(self) -> None:
        self.touched: set[int] = set()
        # How many loops have begun.
        self.loops = 0
        self.layout = Layout({}, 1)
        self._specs: dict[int, tuple[object, ...]] = {}
        self._depths: list[Contribution] = []
        self._received: dict[int, torch.Tensor] = {}

    def lay_out(self, like: Mapping[int, torch.Tensor], size: int) -> None:
        """Make slots for these places."""
        self._specs = _specs(like)
        self.layout = Layout(like, size)
        self._depths, self._received = [], {}

    def has_slots_for(self, like: Mapping[int, torch.Tensor]) -> bool:
        """Whether these are the places that have slots, with these shapes, dtypes and devices."""
        return self._specs == _specs(like)

    def at(self, depth: int) -> Contribution:
        """Return the memory for the value that the running sum keeps at this depth."""
        while len(self._depths) <= depth:
            self._depths.append(self.layout.contribution())
        found = self._depths[depth]
        found.others = {}
        return found

    def received(self, number: int, like: torch.Tensor, length: int) -> torch.Tensor:
        """Return memory of this length to receive other ranks' parts of the flat tensor of this number."""
        found = self._received.get(number)
        if found is None or found.numel() < length or found.device != like.device:
            found = self._received[number] = like.new_empty(length)
        return found[:length]


def _specs(like: Mapping[int, torch.Tensor]) -> dict[int, tuple[object, ...]]:
    """Return what a slot depends on, noted now: a parameter stays the same object when its dtype changes."""
    return {place: (tensor.shape, tensor.dtype, tensor.device) for place, tensor in like.items()}
