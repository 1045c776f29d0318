"""Slices: a list of tensors, cut into parts of equal size, of which each rank keeps a few.

The tensors of one dtype and device form a sequence, laid out as in ``TensorBuffer``, which is cut into ``of`` parts. A slice
consists of the parts with the same number from all sequences. A cut may go through a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from spark_elastic.checkpoint.skeleton import TensorSpec
from spark_elastic.worker.checks.fingerprint import sums_of_bits
from spark_elastic.worker.state.snapshot import TensorBuffer


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a tensor that lies in a slice: its entries from ``start`` to ``end``, and where they are in the slice."""

    tensor: int
    start: int
    end: int
    place: int


def sequences(specs: Iterable[TensorSpec]) -> dict[tuple[torch.dtype, str], list[tuple[int, int]]]:
    """Return the sequences of tensors, by dtype and device: the number and length of each tensor."""
    found: dict[tuple[torch.dtype, str], list[tuple[int, int]]] = {}
    for number, spec in enumerate(specs):
        found.setdefault((spec.dtype, spec.device), []).append((number, math.prod(spec.shape)))
    return found


def bounds(length: int, number: int, of: int) -> tuple[int, int]:
    """Return where slice ``number`` of a sequence begins and ends."""
    return length * number // of, length * (number + 1) // of


def find_spans(tensors: Sequence[tuple[int, int]], first: int, last: int) -> list[Span]:
    """Return the parts of tensors, given as number and length, that lie between two positions of their sequence."""
    found, place = [], 0
    for number, length in tensors:
        start, end = max(first - place, 0), min(last - place, length)
        if start < end:
            found.append(Span(number, start, end, place + start - first))
        place += length
    return found


def choose_slices(place: int, size: int, redundancy: int) -> tuple[int, ...]:
    """Return the slices, of as many as there are ranks, that the rank in this place of a ring keeps."""
    return tuple(sorted({(place + step) % size for step in range(min(redundancy, size - 1) + 1)}))


@dataclass(slots=True)
class SliceBuffer:
    """Room for the slices numbered ``held`` of a list of tensors: for each slice one flat tensor per dtype and device."""

    specs: tuple[TensorSpec, ...] = ()
    held: tuple[int, ...] = ()
    of: int = 1
    flats: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    # The parts of tensors, in the order of ``_views``, which are their places in the flat tensors.
    _spans: list[Span] = field(default_factory=list)
    _views: list[torch.Tensor] = field(default_factory=list)

    def fit(self, specs: tuple[TensorSpec, ...], held: tuple[int, ...], of: int) -> None:
        """Make room for these slices of tensors of these specs. Present room for the same is kept."""
        if (specs, held, of) == (self.specs, self.held, self.of):
            return
        self.flats, self._views, self._spans = {}, [], []  # the old room is freed before the new one is allocated
        self.specs, self.held, self.of = specs, held, of
        for number in held:
            self.flats[number] = []
            for (dtype, device), tensors in sequences(specs).items():
                first, last = bounds(sum(length for _, length in tensors), number, of)
                flat = torch.empty(last - first, dtype=dtype, device=device)
                self.flats[number].append(flat)
                for span in find_spans(tensors, first, last):
                    self._spans.append(span)
                    self._views.append(flat[span.place : span.place + span.end - span.start])

    def copy_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the slices out of the tensors, all of which are given. A GPU may still be copying when this returns."""
        if self._views:
            with torch.no_grad():
                torch._foreach_copy_(self._views, self._parts(tensors), non_blocking=True)

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the slices have the bits of the tensors, all of which are given. Waits for a GPU."""
        return not self._views or sums_of_bits(self._views) == sums_of_bits(self._parts(tensors))

    def copy_to(self, room: TensorBuffer) -> None:
        """Copy the slices to where they belong in room for the whole tensors."""
        for number, flats in self.flats.items():
            for place, flat in zip(places_of(room, number, self.of), flats, strict=True):
                place.copy_(flat)

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = {span.tensor: tensors[span.tensor].detach().reshape(-1) for span in self._spans}
        return [flat[span.tensor][span.start : span.end] for span in self._spans]


def slice_of(
    tensors: Sequence[torch.Tensor], specs: tuple[TensorSpec, ...], number: int, of: int
) -> list[torch.Tensor]:
    """Copy one slice out of the tensors, as a flat tensor per dtype and device."""
    buffer = SliceBuffer()
    buffer.fit(specs, (number,), of)
    buffer.copy_from(tensors)
    return buffer.flats[number]


def places_of(room: TensorBuffer, number: int, of: int) -> list[torch.Tensor]:
    """Return where a slice belongs in room for the whole tensors."""
    return [flat[slice(*bounds(flat.numel(), number, of))] for flat in room.flats]
