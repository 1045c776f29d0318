"""Trees of a state: what of them is copied, what is a leaf, and which keys can be read back."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from spark_elastic.checkpoint.skeleton import StateDict, has_plain_keys, is_plain, map_tree, pickled


def seen(tree: Any) -> list[Any]:
    """Return what ``map_tree`` hands to its function, in order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def test_a_tree_is_copied_in_its_types_with_all_leaves_replaced() -> None:
    tree = {"a": [1, (2, 3)], "b": StateDict(OrderedDict(x=4)), 5: {(1, "c"): 6}}
    copied = map_tree(lambda leaf: leaf * 10, tree)
    assert copied == {"a": [10, (20, 30)], "b": StateDict(OrderedDict(x=40)), 5: {(1, "c"): 60}}
    assert type(copied["b"].content) is OrderedDict
    assert (copied["a"] is tree["a"], copied[5] is tree[5]) == (False, False)
    assert tree["a"] == [1, (2, 3)]


def test_containers_of_other_types_and_dicts_with_keys_of_other_types_are_leaves() -> None:
    class Pair(tuple[int, int]):
        pass

    others = [defaultdict(list, a=[1]), {frozenset([1]): 2}, {object(): 3}, {1, 2}, Pair((1, 2))]
    assert seen(others) == others


def test_the_versions_of_a_modules_parts_are_copied_and_are_no_leaves() -> None:
    weights = torch.nn.BatchNorm1d(2).state_dict()
    copied = map_tree(lambda leaf: leaf, weights)
    assert copied._metadata == weights._metadata
    copied._metadata[""]["version"] = 99
    assert weights._metadata[""]["version"] != 99  # type: ignore[attr-defined]
    assert len(seen(weights)) == 5


def test_keys_are_plain_if_they_are_read_back_as_they_were() -> None:
    class Mode(str, enum.Enum):
        FAST = "fast"

    plain = [1, 0.5, "a", b"b", True, None, 1j, torch.int8, torch.device("cpu"), torch.Size([1]), (1, ("a", None))]
    assert all(map(is_plain, plain))
    assert has_plain_keys(dict.fromkeys(plain))
    for other in (Mode.FAST, frozenset([1]), (1, Mode.FAST)):
        assert not is_plain(other)
        assert not has_plain_keys({"a": 1, other: 2})


def test_an_error_that_no_object_of_the_state_explains_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"state\.lock cannot be pickled, so it cannot be sent .* in local="):
        pickled([threading.Lock()], {"objects": {"epoch": 1, "lock": threading.Lock()}}, "sent")
    with pytest.raises(TypeError, match=r"^cannot pickle '_thread\.lock' object"):
        pickled([threading.Lock()], {"objects": {"epoch": 1}}, "sent")
