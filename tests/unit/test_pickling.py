"""What drivers send to workers: parameters with the hooks that code has registered on them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from spark_elastic._pickling import dumps, hooks_of


class Masked(nn.Module):
    """Hooks hold the network itself, and one parameter has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(3, 1), torch.tensor([[1.0, 0.0, 1.0]])
        self.other = nn.Linear(3, 1)
        self.other.weight = self.layer.weight
        self.steps = 0
        self.layer.weight.register_hook(lambda gradient: gradient * self.mask)
        self.layer.bias.register_post_accumulate_grad_hook(self.count)

    def count(self, bias: torch.Tensor) -> None:
        self.steps += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def enlarge(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(5)


def copied(value: Any) -> Any:
    return cloudpickle.loads(dumps(value))


def test_hooks_of_parameters_travel_and_belong_to_the_copy() -> None:
    network, _ = copied((Masked(), "and more"))
    assert network.other.weight is network.layer.weight
    network(torch.ones(2, 3)).sum().backward()
    assert network.layer.weight.grad.tolist() == [[2.0, 0.0, 2.0]]
    assert network.steps == 1
    network.mask = torch.zeros(1, 3)
    network.zero_grad()
    network(torch.ones(2, 3)).sum().backward()
    assert network.layer.weight.grad.tolist() == [[0.0, 0.0, 0.0]], "the hook is that of this network"


def test_a_parameter_that_was_frozen_later_and_attributes_are_as_they_were() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.register_hook(lambda gradient: gradient * 0)
    layer.weight.rate = 0.5
    layer.weight.requires_grad_(False)
    made = copied(layer)
    assert not made.weight.requires_grad
    assert made.weight.rate == 0.5
    assert (len(hooks_of(made.weight)), hooks_of(made.bias)) == (1, [])


def test_a_handle_that_travels_removes_the_hook_of_the_copy_and_new_hooks_take_the_place_of_none() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.handle = layer.weight.register_hook(lambda gradient: gradient * 2)
    layer.after = layer.weight.register_post_accumulate_grad_hook(enlarge)
    made = copied(layer)
    made.weight.register_hook(lambda gradient: gradient * 3)
    made(torch.ones(1, 1)).backward()
    assert made.weight.grad.item() == 30
    made.handle.remove()
    made.after.remove()
    made.zero_grad()
    made(torch.ones(1, 1)).backward()
    assert made.weight.grad.item() == 3


def test_hooks_that_are_marked_as_not_to_be_pickled_stay_here() -> None:
    layer = nn.Linear(1, 1)
    generator = (_ for _ in ())
    layer.weight.register_hook(unserializable_hook(lambda gradient: generator.send(gradient)))  # type: ignore[no-untyped-call]
    layer.weight.register_hook(torch.neg)
    assert hooks_of(copied(layer).weight) == [torch.neg]


def test_what_cannot_travel_is_an_error() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.register_hook((_ for _ in ()).send)
    with pytest.raises(TypeError, match="generator"):
        dumps(layer)


def test_a_driver_without_torch_stays_without_it() -> None:
    code = "import sys; from spark_elastic._pickling import dumps; dumps(print); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


SCRIPT = """
import functools
import pickle
import sys
from spark_elastic._pickling import dumps

@functools.lru_cache(maxsize=7)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Table:
    @functools.cache
    def double(self, n):
        return 2 * n

def use(n):
    return fibonacci(n), fibonacci.cache_info().maxsize, Table().double(n), escape("a.b")

from re import escape
assert fibonacci(9) == 34
sys.stdout.buffer.write(dumps((use, functools.lru_cache(escape))))
"""


def test_functions_with_a_cache_travel_with_the_script_that_defines_them() -> None:
    packed = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True).stdout
    use, cached_escape = cloudpickle.loads(packed)
    assert cached_escape("a.b") == r"a\.b"
    assert use(30) == (832040, 7, 60, r"a\.b")
    assert use.__globals__["fibonacci"].cache_info().currsize == 7
    assert use.__globals__["fibonacci"].__name__ == "fibonacci"


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        (
            "Broadcast",
            "pyspark.core.broadcast",
            r"only Spark's own tasks can read: give its value itself, broadcast\.value",
        ),
        ("Accumulator", "pyspark.accumulators", "only Spark's own tasks add: return the number"),
        ("DataFrame", "pyspark.sql.classic.dataframe", "only Spark's driver can use: write it to a dataset"),
        ("DataFrame", "pyspark.sql.connect.dataframe", "only Spark's driver can use: write it to a dataset"),
        ("SparkSession", "pyspark.sql.session", "only Spark's driver can use: call Spark before run"),
        ("SparkSession", "pyspark.sql.connect.session", "only Spark's driver can use: call Spark before run"),
    ],
)
def test_what_works_in_sparks_own_tasks_or_driver_only_is_refused(kind: str, module: str, words: str) -> None:
    """Accumulators and what belongs to Spark Connect can be pickled: additions are lost, and workers have no server."""
    value = object.__new__(getattr(pytest.importorskip(module), kind))
    with pytest.raises(TypeError, match=words):
        dumps({"mine": [value]})
