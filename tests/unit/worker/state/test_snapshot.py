"""Snapshots: what goes in comes out, by value, and the last intact copy is never touched."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair, TensorBuffer

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.complex64]

tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
leaves = tensors | st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def taken(tree: Any) -> Snapshot:
    snapshot = Snapshot()
    snapshot.take(tree, None)
    return snapshot


@given(trees)
@settings(max_examples=50, deadline=None)
def test_what_goes_in_comes_out(tree: Any) -> None:
    assert same(taken(tree).content(), tree)


@given(trees, trees)
@settings(max_examples=30, deadline=None)
def test_a_snapshot_can_be_taken_again_of_something_else(first: Any, second: Any) -> None:
    snapshot = taken(first)
    snapshot.take(second, None)
    assert same(snapshot.content(), second)


def test_later_changes_do_not_reach_the_snapshot() -> None:
    tensor, inner = torch.ones(3), {"n": [1]}
    snapshot = taken({"t": tensor, "inner": inner})
    tensor.zero_()
    inner["n"].append(2)
    assert same(snapshot.content(), {"t": torch.ones(3), "inner": {"n": [1]}})


def test_changes_of_what_came_out_do_not_reach_the_snapshot() -> None:
    snapshot = taken({"t": torch.ones(3), "n": [1]})
    content = snapshot.content()
    content["t"].zero_()
    content["n"].append(2)
    assert same(snapshot.content(), {"t": torch.ones(3), "n": [1]})


def test_tensors_of_any_layout_and_with_gradients_are_copied() -> None:
    tree = [torch.arange(12.0).view(3, 4).t(), torch.ones(2, requires_grad=True) * 2, torch.ones(1).expand(4)]
    assert same(taken(tree).content(), [tensor.detach().contiguous() for tensor in tree])


def test_a_tensor_that_is_learned_by_itself_comes_out_so() -> None:
    learned = torch.ones(2, requires_grad=True)
    linear = torch.nn.Linear(1, 1)
    out = taken({"learned": learned, "made": learned * 2, "fixed": torch.ones(2), "net": linear}).view()
    assert [out[name].requires_grad for name in ("learned", "made", "fixed")] == [True, False, False]
    assert out["learned"].is_leaf
    assert not any(value.requires_grad for value in out["net"].content.values())


def test_ordered_dicts_stay_what_they_are() -> None:
    content = taken(OrderedDict(b=torch.ones(1), a=1)).content()
    assert type(content) is OrderedDict
    assert list(content) == ["b", "a"]


def test_room_is_kept_when_the_shapes_stay() -> None:
    snapshot = taken({"a": torch.ones(3), "b": torch.ones(2, 2)})
    before = [flat.data_ptr() for flat in snapshot.buffer.flats]
    snapshot.take({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, None)
    assert [flat.data_ptr() for flat in snapshot.buffer.flats] == before


def test_tensors_of_one_kind_lie_in_one_flat_tensor() -> None:
    buffer = TensorBuffer()
    buffer.copy_from([torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2, 2)])
    assert sorted(len(flat) for flat in buffer.flats) == [2, 7]


class Stubborn:
    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("cannot be copied")


def test_a_copy_that_fails_leaves_the_current_snapshot_as_it_was() -> None:
    pair = SnapshotPair()
    pair.spare.take({"t": torch.ones(3)}, "own")
    pair.switch()
    with pytest.raises(TypeError, match="cannot be copied"):
        pair.spare.take({"t": torch.zeros(3), "x": Stubborn()}, None)
    assert same(pair.current.content(), {"t": torch.ones(3)})
    assert pair.current.own == "own"


def test_a_pair_is_empty_until_the_first_switch() -> None:
    pair = SnapshotPair()
    pair.spare.take({}, None)
    assert pair.is_empty
    pair.switch()
    assert not pair.is_empty


def test_the_two_of_a_pair_share_no_memory() -> None:
    pair = SnapshotPair()
    pair.spare.take(torch.ones(3), None)
    pair.switch()
    pair.spare.take(torch.zeros(3), None)
    assert same(pair.current.content(), torch.ones(3))
    pair.switch()
    assert same(pair.current.content(), torch.zeros(3))


def test_room_made_ahead_is_that_of_the_first_copies_and_holds_no_commit() -> None:
    pair = SnapshotPair()
    pair.make_room({"t": torch.ones(3)})
    assert pair.is_empty
    room = {pair.spare.buffer.flats[0].data_ptr()}
    for value in (1.0, 2.0):
        pair.spare.take({"t": torch.full((3,), value)}, None)
        pair.switch()
        room |= {pair.current.buffer.flats[0].data_ptr(), pair.spare.buffer.flats[0].data_ptr()}
    assert len(room) == 2
    assert same(pair.current.content(), {"t": torch.full((3,), 2.0)})


def test_the_versions_of_a_modules_parts_stay_with_its_state_dict() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    snapshot = Snapshot()
    snapshot.take({"model": StateDict(model.state_dict())}, None)
    assert snapshot.content()["model"].content._metadata == model.state_dict()._metadata
    assert snapshot.content()["model"].content._metadata["0"]["version"] >= 2
