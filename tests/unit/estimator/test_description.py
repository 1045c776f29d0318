"""Descriptions of Params differ where training differs, and are equal in every session where it is the same."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from spark_elastic import allreduce
from spark_elastic.estimator import EarlyStopping
from spark_elastic.estimator.description import describe

FACTOR = 1.0


def closure(delta: float) -> Any:
    return lambda output, label: functional.huber_loss(output, label, delta=delta)


def closure_of_a_tensor(weight: float) -> Any:
    weights = torch.tensor([1.0, weight])
    return lambda output, label: functional.cross_entropy(output, label, weight=weights)


def with_default(delta: float) -> Any:
    def loss(output: Any, label: Any, delta: float = delta) -> Any:
        return functional.huber_loss(output, label, delta=delta)

    return loss


def from_source(source: str) -> Any:
    """A function called ``loss`` of a module of its own."""
    module = types.ModuleType("__main__")
    module.__dict__.update(functional=functional, torch=torch, nn=nn)
    exec(compile(source, "script", "exec"), module.__dict__)
    return module.__dict__["loss"]


class Focal:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, output: Any, label: Any) -> Any:
        return ((1 - output) ** self.gamma).mean()

    def method(self, output: Any, label: Any) -> Any:
        return self(output, label)


@dataclass(frozen=True, slots=True)
class Slotted:
    gamma: float


class Silent:
    __slots__ = "gamma"

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma


class Margin(nn.Module):
    def __init__(self, margin: float) -> None:
        super().__init__()
        self._margin = margin


class Buffered(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale), persistent=False)


PAIRS = {
    "delta": (nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=2.0)),
    "beta": (nn.SmoothL1Loss(beta=1.0), nn.SmoothL1Loss(beta=0.5)),
    "reduction": (nn.MSELoss(), nn.MSELoss(reduction="sum")),
    "pos_weight": tuple(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([w])) for w in (1.0, 3.0)),
    "class weights": tuple(nn.CrossEntropyLoss(torch.tensor([1.0, w])) for w in (1.0, 3.0)),
    "label smoothing": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "ignore_index": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=0)),
    "closure": (closure(1.0), closure(2.0)),
    "closure of a tensor": (closure_of_a_tensor(1.0), closure_of_a_tensor(2.0)),
    "default": (with_default(1.0), with_default(2.0)),
    "keyword of a partial": tuple(functools.partial(functional.huber_loss, delta=d) for d in (1.0, 2.0)),
    "tensor of a partial": tuple(functools.partial(functional.mse_loss, weight=torch.tensor([d])) for d in (1.0, 2.0)),
    "constant": (lambda o, y: (o - y).abs() + 1, lambda o, y: (o - y).abs() + 2),
    "constant of a nested function": (lambda: lambda o: o + 1, lambda: lambda o: o + 2),
    "tuple of constants": (lambda o: o.sum((0, 1)), lambda o: o.sum((0, 2))),
    "name of a method": (lambda o: o.abs().mean(), lambda o: o.exp().mean()),
    "attribute": (Focal(1.0), Focal(2.0)),
    "method": (Focal(1.0).method, Focal(2.0).method),
    "slot": (Slotted(1.0), Slotted(2.0)),
    "slot without a repr": (Silent(1.0), Silent(2.0)),
    "attribute of a module": (Margin(1.0), Margin(2.0)),
    "buffer that is not saved": (Buffered(1.0), Buffered(2.0)),
    "part of a module": (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2))),
    "array": (np.arange(3), np.arange(3) + 1),
    "global value": tuple(from_source(f"D = {d}\ndef loss(o, y): return functional.huber_loss(o, y, delta=D)") for d in (1, 2)),
    "global function": tuple(from_source(f"def term(o): return o * {d}\ndef loss(o, y): return term(o)") for d in (1, 2)),
    "code of a class": tuple(
        from_source(f"class L(nn.Module):\n  def forward(self, o, y): return (o - y) * {d}\nloss = L()") for d in (1, 2)
    ),
    "base of a class": tuple(
        from_source(f"class A:\n  def f(self, o): return o * {d}\nclass B(A): pass\nloss = B().f") for d in (1, 2)
    ),
    "value of a class": tuple(
        from_source(f"class L:\n  g = {d}\n  def __call__(self, o, y): return o\nloss = L()") for d in (1, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_what_behaves_differently_is_described_differently(what: str) -> None:
    one, other = (json.dumps(describe(value)) for value in PAIRS[what])
    assert one != other
    assert json.dumps(describe(PAIRS[what][0])) == one


def test_networks_differ_by_their_parts_and_not_by_their_weights() -> None:
    def described(network: nn.Module) -> Any:
        return describe(network, weights=False)

    assert described(nn.Sequential(nn.Linear(2, 1))) == described(nn.Sequential(nn.Linear(2, 1)))
    assert described(nn.Sequential(nn.Linear(2, 1))) != described(nn.Sequential(nn.Linear(3, 1)))
    assert described(nn.Dropout(0.1)) != described(nn.Dropout(0.2))
    assert described(Buffered(1.0)) != described(Buffered(2.0))
    hooked = nn.Linear(1, 1)
    hooked.register_forward_hook(lambda module, given, output: output * 2)
    assert described(hooked) != described(nn.Linear(1, 1))
    frozen = nn.Linear(1, 1)
    frozen.bias.requires_grad_(False)
    assert described(frozen) != described(nn.Linear(1, 1)), "it trains other parameters"


def test_optimizers_differ_by_class_settings_and_groups() -> None:
    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    groups = [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[1].parameters(), "lr": 0.2}]
    variants = [
        torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.2), torch.optim.SGD(groups),
        torch.optim.AdamW(parameters, lr=0.1), torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD, torch.optim.AdamW,
    ]  # fmt: skip
    assert len({json.dumps(describe(variant)) for variant in variants}) == len(variants)


def test_cycles_are_described() -> None:
    knot: dict[str, Any] = {}
    knot["self"] = knot
    assert describe(knot) == {"self": ["again", "builtins.dict"]}

    def first(n: int) -> Any:
        return second(n)

    def second(n: int) -> Any:
        return first(n - 1)

    json.dumps(describe(first))


SCRIPT = """
import enum, functools, json, torch
from torch import nn
from spark_elastic import allreduce
from spark_elastic.estimator import EarlyStopping
from spark_elastic.estimator.description import describe

FACTORS = {"one", "two", "three"}

class Kind(enum.Enum):
    ONE = 1

class Loss(nn.Module):
    names = frozenset({"a", "b", "c"})

    def __init__(self):
        super().__init__()
        self.weight = torch.tensor([1.0, 2.0])
        self.kind = Kind.ONE
        self.anything = object()

    def forward(self, output, label):
        return helper(output, label) if label in {"x", "y", "z"} else super().forward(output)

def helper(output, label):
    return [(output - label) * len(FACTORS) for each in FACTORS]

hooked = Loss()
hooked.register_forward_hook(lambda module, given, output: output)
partial = functools.partial(helper, label=nn.CrossEntropyLoss(torch.ones(3)))
print(json.dumps([describe(hooked), describe(partial), describe(lambda o, y, w=FACTORS: helper(o, y))]))
"""


def test_descriptions_are_equal_in_every_session(tmp_path: Path) -> None:
    found = set()
    for seed, lines in (("1", ""), ("2", "\n\nimport collections\n")):
        (tmp_path / "script.py").write_text(lines + SCRIPT)
        command = [sys.executable, str(tmp_path / "script.py")]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 1


def test_a_description_does_not_tell_in_which_of_our_modules_something_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps(describe(allreduce))
    monkeypatch.setattr(allreduce, "__module__", "spark_elastic.somewhere.else")
    assert json.dumps(describe(allreduce)) == told


def test_what_saved_files_know_is_called_by_its_public_package() -> None:
    assert "spark_elastic.estimator.EarlyStopping" in json.dumps(describe(EarlyStopping("val_loss")))


def test_values_that_are_neither_attributes_nor_shown_count_too() -> None:
    import pandas as pd
    import pyarrow as pa

    def closed_over(value: object) -> Any:
        return describe(lambda rows: value)

    assert closed_over(pd.Series([1.0])) == closed_over(pd.Series([1.0])) != closed_over(pd.Series([10.0]))
    assert (
        closed_over(pa.array(range(100))) == closed_over(pa.array(range(100))) != closed_over(pa.array([*range(99), 1]))
    )
    long = "a" * 300
    assert describe(re.compile(long)) == describe(re.compile(long)) != describe(re.compile(long + "b"))


def test_keys_count_with_their_types() -> None:
    assert describe({1: "a"}) != describe({"1": "a"})
    assert describe({1: "a", 2: "b"}) == describe({2: "b", 1: "a"})
    assert describe({("a", 1): 2}) != describe({("a", 2): 2})


def test_hooks_on_gradients_and_what_parameters_have_besides_their_numbers_count() -> None:
    def layer(change: Any = None) -> nn.Module:
        made = nn.Linear(2, 1)
        if change is not None:
            change(made)
        return made

    changes = [
        lambda made: made.register_full_backward_hook(lambda *_: None),
        lambda made: made.weight.register_hook(lambda gradient: gradient * 2),
        lambda made: made.weight.register_hook(lambda gradient: gradient * 3),
        lambda made: made.weight.register_post_accumulate_grad_hook(lambda weight: None),
        lambda made: setattr(made.weight, "rate", 0.0),
    ]
    found = [json.dumps(describe(layer(change), weights=False)) for change in (None, *changes)]
    assert len(set(found)) == len(found)
    assert found == [json.dumps(describe(layer(change), weights=False)) for change in (None, *changes)]
