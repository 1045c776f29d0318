"""The small collectives: what they give back, and what they leave alone."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker import collectives
from spark_elastic.worker.shards.loops import loops
from tests.support.forked_world import on_ranks, world


@pytest.fixture(params=[1, 2])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a world whose ranks all hold the same."""
    world = SimpleNamespace(size=request.param, is_broken=lambda: False, process=os.getpid())
    monkeypatch.setattr(collectives, "current_world", lambda: world)

    def all_reduce(tensor: torch.Tensor, operation: object) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(world.size)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", lambda everybody, mine: [each.copy_(mine) for each in everybody])
    return int(request.param)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_an_allreduce_leaves_its_argument_as_it_is_and_returns_another_tensor(op: str, size: int) -> None:
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    result = collectives.allreduce(given, op)
    assert result.tolist() == [1.0 * (size if op == "sum" else 1), 2.0 * (size if op == "sum" else 1)]
    result.zero_()
    assert given.tolist() == [1.0, 2.0]


def test_the_mean_of_whole_numbers_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="op='sum'"):
        collectives.allreduce(torch.tensor([1, 2]))


def test_the_sum_of_bools_is_refused(size: int) -> None:
    """Two ranks of which both say True are not one."""
    with pytest.raises(ValueError, match="convert the tensor to int64"):
        collectives.allreduce(torch.tensor([True]), "sum")
    assert collectives.allreduce(torch.tensor([True, False]), "max").tolist() == [True, False]


REFUSED = {
    "uint64": (torch.ones(1, dtype=torch.uint64), "sum", "not torch.uint64; convert it to int64"),
    "quantized": (torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8), "sum", "not torch.qint8"),
    "complex minimum": (torch.ones(1, dtype=torch.complex64), "min", "op='min' is not defined for torch.complex64"),
    "complex maximum": (torch.ones(1, dtype=torch.complex32), "max", "op='max' is not defined for torch.complex32"),
    "nested": (torch.nested.nested_tensor([torch.ones(1)]), "sum", "not a nested tensor; reduce its values"),
    "jagged": (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "mean", "not a nested tensor"),
    "sparse in rows": (torch.ones(2, 2).to_sparse_csr(), "sum", "not one of layout torch.sparse_csr"),
    "sparse maximum": (
        torch.ones(2).to_sparse(),
        "max",
        "op='max' cannot be computed of torch.sparse_coo; .* to_dense",
    ),
    "meta": (torch.ones(1, device="meta"), "mean", "it is on the meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reduced_is_refused_before_other_ranks_wait_for_it(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter(*arguments: Any) -> None:
        pytest.fail("a collective was entered")

    for collective in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, collective, enter)
    tensor, op, told = REFUSED[name]
    with pytest.raises(TypeError, match=told):
        collectives.allreduce(tensor, op)


# What rank 0 and rank 1 reduce, and what the error tells of it.
UNLIKE = {
    "another op": (
        [(torch.ones(2), "max"), (torch.ones(2), "sum")],
        'rank 0 allreduce with op="max" of torch.float32 [2] on cpu, rank 1 allreduce with op="sum" of torch.float32 [2]',
    ),
    "a mean and a sum": ([(torch.ones(2), "mean"), (torch.ones(2), "sum")], 'op="mean"'),
    "another length": ([(torch.ones(3), "sum"), (torch.ones(2), "sum")], r"[3] on cpu"),
    "another shape of the same length": ([(torch.ones(3, 2), "sum"), (torch.ones(2, 3), "sum")], "[3, 2] on cpu"),
    "another dtype": ([(torch.ones(2), "sum"), (torch.ones(2).double(), "sum")], "torch.float64 [2] on cpu"),
    "bits of the same length": ([(torch.ones(2), "sum"), (torch.ones(2, dtype=torch.int32), "sum")], "torch.int32"),
}


def test_ranks_that_reduce_differently_all_get_an_error_and_can_go_on() -> None:
    for errors in zip(*on_ranks(2, _reduce_differently), strict=True):
        (name, told), *others = errors
        assert all(other == (name, told) for other in others)
        assert UNLIKE[name][1] in told


def _reduce_differently(folder: Path, rank: int) -> list[tuple[str, str]]:
    told = []
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        for name, (calls, _) in UNLIKE.items():
            tensor, op = calls[rank]
            with pytest.raises(TrainingCodeError) as error:
                collectives.allreduce(tensor, op)
            told.append((name, str(error.value)))
            assert collectives.allreduce(torch.ones(1), "sum").tolist() == [2.0]
    return told


def _broadcast_from(src: int) -> Callable[[], object]:
    return lambda: collectives.broadcast_object("mine", src=src)


# What rank 0 and rank 1 call, and what the error tells of it.
OTHER_CALLS = {
    "each from itself": (
        [_broadcast_from(0), _broadcast_from(1)],
        "rank 0 broadcast_object with src=0, rank 1 broadcast_object",
    ),
    "a barrier": ([collectives.barrier, _broadcast_from(0)], "rank 0 barrier, rank 1 broadcast_object with src=0"),
    "gathered and broadcast": (
        [lambda: collectives.allgather_object([1]), _broadcast_from(0)],
        "rank 0 allgather_object, rank 1 broadcast_object",
    ),
    "gathered and reduced": (
        [lambda: collectives.allgather_object([1]), lambda: collectives.allreduce(torch.ones(1))],
        'rank 0 allgather_object, rank 1 allreduce with op="mean"',
    ),
}


CALLS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: collectives.allreduce(torch.ones(1)),
    "allgather_object": lambda: collectives.allgather_object(1),
    "broadcast_object": lambda: collectives.broadcast_object(1),
    "barrier": collectives.barrier,
}


def test_ranks_that_make_different_calls_all_get_an_error_and_can_go_on() -> None:
    """Those that broadcast from different ranks waited until the job was lost."""
    for errors in zip(*on_ranks(2, _call_differently), strict=True):
        (name, told), *others = errors
        assert all(other == (name, told) for other in others)
        assert OTHER_CALLS[name][1] in told


def _call_differently(folder: Path, rank: int) -> list[tuple[str, str]]:
    told = []
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        for name, (calls, _) in OTHER_CALLS.items():
            with pytest.raises(TrainingCodeError) as error:
                calls[rank]()
            told.append((name, str(error.value)))
            assert collectives.broadcast_object(rank, src=1) == 1
            collectives.barrier()
    return told


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_in_another_process_than_the_workers_they_are_refused(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's worker has only copies of the connections, and waited in vain."""
    world = SimpleNamespace(size=2, rank=0, process=os.getppid())
    monkeypatch.setattr(collectives, "current_world", lambda: world)
    with pytest.raises(
        TrainingCodeError, match=r"\(\) came in another process than the worker's, such as one of a DataLoader"
    ):
        call()


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_inside_a_loop_over_parts_they_are_refused(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have unequal numbers of parts, and waited for each other until the job was lost."""
    monkeypatch.setattr(loops, "open", SimpleNamespace())
    monkeypatch.setattr(loops, "_thread", threading.get_ident())
    with pytest.raises(TrainingCodeError, match=r"\(\) came inside a loop over model.parts"):
        call()
    monkeypatch.setattr(loops, "open", None)
    monkeypatch.setattr(loops, "_was_left", True)  # as all ranks may have, at the end
    monkeypatch.setattr(collectives, "current_world", lambda: None)
    call()


def test_torchs_default_device_makes_no_difference() -> None:
    """What is compared first was made on that device, where a library may not be able to send it from."""
    assert on_ranks(2, _call_with_a_default_device) == [([0, 1], 1, 1.0)] * 2


def _call_with_a_default_device(folder: Path, rank: int) -> tuple[list[int], int, float]:
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        values = torch.ones(1)
        with torch.device("meta"):
            collectives.barrier()
            return (
                collectives.allgather_object(rank),
                collectives.broadcast_object(rank, src=1),
                collectives.allreduce(values).item(),
            )


def test_values_are_reduced_whatever_their_order_in_memory_their_type_and_nan() -> None:
    for found in on_ranks(2, _reduce_awkward_values):
        assert found["transposed"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
        assert (found["half"], found["short"]) == (40000.0, 60000 - 2**16)
        assert (found["max"], found["min"]) == (["nan", "5.0", "-inf"], ["nan", "-3.0", "-inf"])


def _reduce_awkward_values(folder: Path, rank: int) -> dict[str, Any]:
    values = torch.arange(6.0).view(2, 3)
    extremes = torch.tensor([[float("nan"), -3.0, -math.inf], [1.0, 5.0, -math.inf]])[rank]
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        return {
            "transposed": collectives.allreduce(values if rank else values.t().contiguous().t(), "sum").tolist(),
            "half": collectives.allreduce(torch.tensor(40000.0, dtype=torch.float16)).item(),
            "short": collectives.allreduce(torch.tensor(30000, dtype=torch.int16), "sum").item(),
            **{op: list(map(str, collectives.allreduce(extremes, op).tolist())) for op in ("max", "min")},
        }


# Values of rank 0 and rank 1 in a dtype, the operation, and the result, which is in the same dtype.
IN_FEW_BITS = [
    (torch.uint16, "sum", (40000, 20000), 60000),
    (torch.uint16, "sum", (40000, 40000), 80000 - 2**16),
    (torch.uint16, "max", (40000, 20000), 40000),
    (torch.uint32, "sum", (2**31, 2**30), 2**31 + 2**30),
    (torch.uint32, "min", (2**31, 2**31 + 1), 2**31),
    (torch.float8_e4m3fn, "mean", (448.0, 256.0), 352.0),
    (torch.float8_e4m3fnuz, "sum", (1.0, 0.5), 1.5),
    (torch.float8_e5m2, "mean", (49152.0, 49152.0), 49152.0),
    (torch.float8_e5m2fnuz, "min", (-1.0, 0.5), -1.0),
    (torch.float8_e8m0fnu, "max", (2.0, 0.5), 2.0),
    (torch.complex32, "mean", (40000 + 1j, 40000 + 1j), 40000 + 1j),
]


def test_numbers_of_few_bits_and_without_a_sign_are_reduced_exactly() -> None:
    for found in on_ranks(2, _reduce_few_bits):
        assert found == [(str(dtype), result) for dtype, _, _, result in IN_FEW_BITS]


def _reduce_few_bits(folder: Path, rank: int) -> list[tuple[str, Any]]:
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        reduced = [
            collectives.allreduce(torch.tensor([values[rank]]).to(dtype), op) for dtype, op, values, _ in IN_FEW_BITS
        ]
    return [(str(each.dtype), each.item()) for each in reduced]


def test_sparse_tensors_are_added_up() -> None:
    for found in on_ranks(2, _reduce_sparse):
        assert found == [0.5, 0.0, 0.5]


def _reduce_sparse(folder: Path, rank: int) -> list[float]:
    with world(folder, rank, 2, []) as formed:
        collectives.current_world = lambda: formed
        mine = torch.tensor([1.0, 0.0, 0.0] if rank else [0.0, 0.0, 1.0], dtype=torch.float16).to_sparse()
        found: list[float] = collectives.allreduce(mine).to_dense().tolist()
        return found
