"""What drivers send to workers: parameters with the hooks that code has registered on them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
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
    ],
)
def test_what_works_in_sparks_own_tasks_only_is_refused(kind: str, module: str, words: str) -> None:
    """An accumulator was pickled, and what workers added to it was lost without a word."""
    value = object.__new__(getattr(pytest.importorskip(module), kind))
    with pytest.raises(TypeError, match=words):
        dumps({"mine": [value]})


CLASSES = """
import enum, pickle, sys
from spark_elastic._pickling import dumps_for_peers
class Phase(enum.Enum):
    WARM = 1
class Item:
    pass
if len(sys.argv) == 1:
    sys.stdout.buffer.write(dumps_for_peers([Phase.WARM, Item(), Item]))
else:
    phase, item, kind = pickle.loads(sys.stdin.buffer.read())
    print(phase is Phase.WARM, type(item) is Item, kind is Item)
"""


def test_peers_that_run_one_script_have_classes_in_common(tmp_path: Path) -> None:
    """On other ranks, an enum's member was none of the script's, and every comparison with it was False."""
    script = tmp_path / "script.py"
    script.write_text(CLASSES)
    packed = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True).stdout
    shown = subprocess.run([sys.executable, script, "load"], input=packed, stdout=subprocess.PIPE, check=True).stdout
    assert shown.split() == [b"True"] * 3
    phase, *_ = pickle.loads(packed)
    assert str(phase) == "Phase.WARM", "who runs another script gets the class itself"


FUNCTION = """
import enum, functools, gc, pickle, sys
import cloudpickle
from spark_elastic._pickling import dumps_for_peers
from spark_elastic._script import remember_script
class Phase(enum.Enum):
    WARM = 1
class Path:
    pass
def helper():
    return 1
def stage(number):
    class Stage:
        def scale(self):
            return 10 * number
    return Stage
def train(packed):
    gc.collect()  # the class of the last call, so that there is one by its name
    class Local(enum.Enum):
        WARM = 1
    if packed is None:
        return dumps_for_peers([Phase.WARM, Path(), Path, helper, {Local.WARM: 1}, stage(1)(), stage(2)()])
    own = stage(1)  # of the same name as stage(2)
    phase, path, kind, function, counts, one, other = pickle.loads(packed)
    stages = type(one) is own and (one.scale(), other.scale()) == (10, 20)
    return phase is Phase.WARM, type(path) is Path, kind is Path, function is helper, Local.WARM in counts, stages
class Train:
    def __call__(self, packed):
        return train(packed)
sent = [train, functools.partial(train), Train(), Train().__call__, functools.wraps(train)(lambda packed: train(packed))]
sys.stdout.buffer.write(cloudpickle.dumps(sent))
"""
WORKER = """
import pickle, sys
from pathlib import Path
from spark_elastic._script import remember_script
sent, packed = Path(sys.argv[1]), Path(sys.argv[2])
for number, function in enumerate(pickle.loads(sent.read_bytes())):
    remember_script(function)
    if not packed.exists():
        packed.write_bytes(function(None))
    print(*function(packed.read_bytes()))
"""


def test_a_later_job_has_the_classes_of_its_own_script(tmp_path: Path) -> None:
    """In a job that resumed, an enum's member from the checkpoint was none of the script's."""
    for attempt in (1, 2):
        (tmp_path / "script.py").write_text(FUNCTION)
        sent = subprocess.run([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, check=True).stdout
        (tmp_path / f"sent{attempt}").write_bytes(sent)
        (tmp_path / "worker.py").write_text(WORKER)
        worker = [sys.executable, tmp_path / "worker.py", tmp_path / f"sent{attempt}", tmp_path / "packed"]
        shown = subprocess.run(worker, stdout=subprocess.PIPE, check=True).stdout
        assert shown.split() == [b"True"] * 30


LOOKALIKES = """
import pickle, sys, torch
from spark_elastic._pickling import dumps_for_peers
def kinds():
    found = []
    for number in range(2):
        if number:
            class Kind:
                def call(self, x=2): return torch.tanh(x), (lambda: 2)()
        else:
            class Kind:
                def call(self, x=1): return torch.relu(x), (lambda: 1)()
        found.append(Kind)
    return found
def recursive():
    def down(n): return down(n - 1) if n else n
    class Kind:
        call = staticmethod(down)
    return Kind
first, second = kinds()
packed = [dumps_for_peers(kind) for kind in (first, second)]
only = recursive()
print(pickle.loads(packed[0]) is first, pickle.loads(packed[1]) is second, pickle.loads(dumps_for_peers(only)) is only)
del first
print(pickle.loads(packed[0]) is second)
"""


def test_classes_of_functions_that_differ_in_names_defaults_or_inner_functions_are_not_one(tmp_path: Path) -> None:
    """One that applies tanh was taken for another of its name that applies relu."""
    script = tmp_path / "script.py"
    script.write_text(LOOKALIKES)
    shown = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True).stdout
    assert shown.split() == [b"True", b"True", b"True", b"False"]
