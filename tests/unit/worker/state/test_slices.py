"""Which part of which tensor is in which slice, and that slices put together are the tensors again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.checkpoint.skeleton import TensorSpec
from spark_elastic.protocol.messages import CommitId, Member, Slices
from spark_elastic.worker.state.gathering import plan_gather
from spark_elastic.worker.state.keepers.sharded import place_in_ring
from spark_elastic.worker.state.slices import SliceBuffer, choose_slices, places_of, slice_of
from spark_elastic.worker.state.snapshot import TensorBuffer

NEW, OLD = CommitId(2, 5), CommitId(2, 4)
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


def member(rank: int, commit: CommitId | None, *held: int, of: int = 4) -> Member:
    return Member(rank, rank, 0, 1, 0, 1, commit, Slices(commit, held, of) if commit and held else None)


def test_survivors_of_a_loss_take_what_each_of_them_lacks() -> None:
    """Rank 1 of four was lost, whose own slice rank 0 holds, too. A newcomer has taken its place."""
    plan = plan_gather([member(0, NEW, 0, 1), member(1, NEW, 2, 3), member(2, NEW, 0, 3), member(3, None)], NEW)
    assert plan.of == 4
    assert plan.donors == {3: 0}
    assert plan.sources == {
        (0, 2): 1, (0, 3): 2,
        (1, 0): 2, (1, 1): 0,
        (2, 1): 0, (2, 2): 1,
        (3, 0): 2, (3, 1): 0, (3, 2): 1, (3, 3): 1,
    }  # fmt: skip


def test_nobody_gathers_after_a_planned_change_and_newcomers_take_from_all_others() -> None:
    plan = plan_gather([*(member(rank, NEW, 0, of=1) for rank in range(3)), member(3, None)], NEW)
    assert (plan.of, plan.donors) == (3, {3: 0})
    assert sorted(plan.sources) == [(3, 0), (3, 1), (3, 2)]
    assert sorted(plan.sources.values()) == [0, 1, 2]


def test_a_rank_one_behind_takes_everything() -> None:
    plan = plan_gather([member(0, NEW, 0, 1, of=3), member(1, NEW, 1, 2, of=3), member(2, OLD, 0, 2, of=3)], NEW)
    assert plan.donors == {2: 0}
    assert {number for receiver, number in plan.sources if receiver == 2} == {0, 1, 2}


@given(st.integers(2, 8), st.integers(1, 2), st.data())
def test_whatever_is_sent_is_held_and_everybody_gets_all(size: int, redundancy: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, size - 1))
    left = [rank for rank in range(size) if rank != lost]
    members = [member(place, NEW, *choose_slices(rank, size, redundancy), of=size) for place, rank in enumerate(left)]
    members.append(member(len(left), None))
    plan = plan_gather(members, NEW)
    for (_, number), source in plan.sources.items():
        slices = members[source].slices
        assert slices is not None
        assert number in slices.held
    for receiver in members:
        arriving = {number for rank, number in plan.sources if rank == receiver.rank}
        if receiver.slices is None or not receiver.slices.is_whole:
            assert arriving | set(receiver.slices.held if receiver.slices else ()) == set(range(plan.of))
        else:
            assert not arriving


def test_neighbours_in_the_ring_are_on_different_hosts() -> None:
    """Two hosts of two ranks: 0 and 1, 2 and 3."""
    members = [Member(rank, rank, rank % 2, 2, rank // 2, 2, None) for rank in range(4)]
    assert [place_in_ring(members, rank) for rank in range(4)] == [0, 2, 1, 3]
