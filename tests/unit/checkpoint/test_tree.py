"""The tree of a state: what a forger has written into it is damage."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import torch
from tampered_checkpoint import NEWER, Saved

from spark_elastic import DamagedError
from spark_elastic.checkpoint.content import decode
from spark_elastic.checkpoint.skeleton import Leaf
from spark_elastic.checkpoint.tree import TreeDecoder, TreeEncoder


@pytest.mark.parametrize(
    "node",
    [
        {"$tensor": "nothing"}, {"$tensor": 3}, {"$tensor": ["w"]}, {"$array": "weights.w", "dtype": "O", "shape": [1]},
        {"$array": "weights.w", "dtype": "<f4", "shape": [2**40]}, {"$array": "weights.w", "dtype": "<f4", "shape": [-6]},
        {"$array": "weights.w", "dtype": "<f4", "shape": [-2, -3]}, {"$array": "weights.w"}, {"$scalar": "", "dtype": "<f4"},
        {"$scalar": "AA==", "dtype": "V1"}, {"$unknown": 1}, {"$tuple": 3}, {"$tuple": None}, {"$dict": [[1]]}, {"$dict": 1},
        {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[[], 2]]}, {"$set": [[1]]}, {"$ordered_dict": [["a", 1]], "metadata": 3, "x": 1},
        {"$ordered_dict": [["a", 1], ["a", 2]]}, {"$bytes": "\ud800"}, {"$bytes": "a"}, {"$bytes": 3}, {"$complex": [1]},
        {"$complex": ["a", "b"]}, {"$float": "many"}, {"$float": 1.0}, {"$int": "x"}, {"$int": 1}, {"$dtype": "Tensor"},
        {"$dtype": "load"}, {"$device": "moon"}, {"$size": ["a"]}, {"$size": [1.5]}, {"$object": "x", "kind": 3, "more": 1},
        {"$object": 0, "kind": "a", "$int": "1"}, {"a": 1, "$int": "0x1"}, {"$state_dict": {"$tuple": 1}},
    ],
    ids=lambda node: json.dumps(node)[:60],
)  # fmt: skip
def test_a_forged_tree_is_damage(saved: Saved, node: Any) -> None:
    saved.change_tree(objects={"epoch": 2, "forged": [node]})
    saved.assert_damaged()


def test_an_object_that_is_not_in_its_file_is_damage(saved: Saved) -> None:
    for number in (1, -2, 2**70, "0"):
        saved.change_tree(objects={"own": {"$object": number, "kind": "x"}})
        with pytest.raises(DamagedError):
            decode(saved.directory, NEWER, unpickle=True)


@pytest.mark.parametrize(
    "value",
    [
        numpy.str_(""), numpy.bytes_(b""), [numpy.str_("a"), numpy.str_("")], numpy.float64(-0.0), numpy.array(["", "b"]),
        {float("nan"): 1, numpy.float32("nan"): 2, -float("inf"): 3, float("-nan"): 4},
    ],
    ids=repr,
)  # fmt: skip
def test_odd_values_come_back(value: Any) -> None:
    encoder = TreeEncoder((), ())
    node = json.loads(json.dumps(encoder.encode(value)))
    found = TreeDecoder(encoder.tensors, [], None).decode(node)
    assert repr(found) == repr(value)


def test_a_tensor_that_collects_gradients_does_so_again() -> None:
    encoder = TreeEncoder((torch.ones(2), torch.ones(3)), ("cpu", "cpu"))
    node = json.loads(json.dumps(encoder.encode([Leaf(0, is_learned=True), Leaf(1)])))
    learned, other = TreeDecoder(encoder.tensors, None, None).decode(node)
    assert (learned.requires_grad, learned.is_leaf, other.requires_grad) == (True, True, False)
