"""Which part of which tensor is in which slice, and that slices put together are the tensors again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.checkpoint.skeleton import TensorSpec
from spark_elastic.worker.state.slices import SliceBuffer, choose_slices, places_of, slice_of
from spark_elastic.worker.state.snapshot import TensorBuffer

shapes = st.lists(st.sampled_from([(), (1,), (3,), (2, 5), (0,), (4, 1, 3)]), max_size=7)


def tensors_of(given_shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors of two dtypes, all values different; some are not contiguous."""
    made, count = [], 0
    for number, shape in enumerate(given_shapes):
        tensor = torch.arange(
            count, count + torch.Size(shape).numel(), dtype=(torch.float32, torch.float64)[number % 2]
        )
        count += tensor.numel()
        made.append(tensor.view(shape[::-1]).permute(tuple(range(len(shape)))[::-1]))
    return made


def specs_of(tensors: list[torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tensor.dtype, "cpu", tuple(tensor.shape)) for tensor in tensors)


@given(shapes, st.integers(1, 6), st.data())
def test_slices_of_all_ranks_put_together_are_the_tensors(
    given_shapes: list[tuple[int, ...]], of: int, data: st.DataObject
) -> None:
    tensors = tensors_of(given_shapes)
    specs, room = specs_of(tensors), TensorBuffer()
    room.fit(specs)
    for rank in range(of):
        buffer = SliceBuffer()
        buffer.fit(specs, choose_slices(rank, of, data.draw(st.integers(1, 2))), of)
        buffer.copy_from(tensors)
        for place, flat, alone in zip(
            places_of(room, rank, of), buffer.flats[rank], slice_of(tensors, specs, rank, of), strict=True
        ):
            assert torch.equal(flat, alone)
            place.copy_(flat)
    assert all(map(torch.equal, room.views, tensors))


@given(shapes, st.integers(1, 6))
def test_slices_are_equally_long(given_shapes: list[tuple[int, ...]], of: int) -> None:
    tensors = tensors_of(given_shapes)
    lengths = [[flat.numel() for flat in slice_of(tensors, specs_of(tensors), number, of)] for number in range(of)]
    for numbers in zip(*lengths, strict=True):
        assert max(numbers) - min(numbers) <= 1
