"""The state in the kept checkpoints of ``tests/kept``: a bit of everything that a State may hold."""

from __future__ import annotations

import collections
import decimal
import hashlib
import math
from typing import Any

import numpy
import torch

import spark_elastic
from spark_elastic.checkpoint.skeleton import map_tree
from spark_elastic.estimator import EarlyStopping, Store

SEED = 11
# With how many threads the kept files were computed: their last bits depend on it, and on the release of torch.
THREADS = 2
# What ``digest`` returns for the weights and the state of the optimizer in the kept files.
MODEL = "051709345a0131450095fd9547b226a9f8227ca921efb33e7de667f7efa6422d"
OPTIMIZER = "74cc8456a64d2f7df78fc85953e64bf9ac6330348116a7310261f47d9f60fd5e"


def network() -> torch.nn.Module:
    """The network of the kept checkpoints, with weights that are not those in them."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def trained(steps: int = 3) -> Any:
    """A wrapped network after some steps, its optimizer and scheduler, and objects of all kinds beside them."""
    torch.manual_seed(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    model = spark_elastic.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = spark_elastic.TorchState(model, optimizer, scheduler, **plain(), **odd())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    torch.set_num_threads(threads)
    return state


def digest(content: Any) -> str:
    """Return a text that is equal for equal bits in a tree of dicts, lists and tensors."""
    plain = map_tree(lambda value: value.tolist() if isinstance(value, torch.Tensor) else value, content)
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def plain() -> dict[str, Any]:
    """What can be read without running code."""
    return {
        "epoch": 7,
        "none": None,
        "flag": True,
        "word": "größer \ud800",
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
        "huge": [2**53 + 1, -(2**200), 10**500],
        "raw": b"\x00\xff",
        "wave": complex(1.5, -math.inf),
        "pair": (1, ("two", [3.0])),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "keys": {
            0: "int",
            (1, "x"): "tuple",
            None: "none",
            2.5: "float",
            True: "bool",
            b"k": "bytes",
            "$tag": "dollar",
        },
        "torches": [torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 0])],
        "tensors": {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes()},
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "twisted": torch.arange(6.0).view(2, 3).t(),
    }


def dtypes() -> list[torch.dtype]:
    names = (
        "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 bool int8 int16 int32 int64 "
        "uint8 uint16 uint32 uint64"
    )
    return [getattr(torch, name) for name in names.split()]


def odd() -> dict[str, Any]:
    """What the first format gave to pickle: values of NumPy, sets, and objects of classes, two of them our own."""
    return {
        "array": numpy.arange(6, dtype="<f4").reshape(2, 3),
        "number": numpy.float64(2.5),
        "names": {"a", "b"},
        "counts": collections.Counter("abca"),
        "money": decimal.Decimal("1.10"),
        "nested": [{"generator": numpy.random.default_rng(5)}],
        "store": Store.create("file:///data/store"),
        "stopping": EarlyStopping(patience=3),
    }
