"""Small collectives for user code, over all ranks of the current generation. A loss raises ``WorkerLostError``."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from spark_elastic._integers import whole_number
from spark_elastic._pickling import dumps_for_peers
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.backends.backend import DTYPES
from spark_elastic.worker.checks.manual_averaging import reductions
from spark_elastic.worker.context import current_world
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.world import World, translated_errors

T = TypeVar("T")

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

# In what other dtypes are reduced: small floats overflow in sums of a few large values, and Gloo has few dtypes.
_COMPUTED_AS = {
    **{dtype: dtype for dtype in DTYPES},
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e8m0fnu), torch.float32),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), torch.float32),
    torch.complex32: torch.complex64,
    torch.int16: torch.int32,
    **dict.fromkeys((torch.uint16, torch.uint32), torch.int64),
}


def allreduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """Reduce ``tensor`` over all ranks and return the result, with the same shape and dtype. The argument is not changed.

    All ranks have to call it with equal shapes, dtypes and ``op``; if these differ, it raises ``TrainingCodeError`` on all
    ranks. The call blocks until all ranks have called it. ``op`` is "mean", "sum", "min" or "max"; a mean of whole numbers and
    a sum of bools raise ``ValueError``. A sum of small whole numbers may overflow, as in torch: convert them to int64 first.
    Raises ``TypeError`` for what libraries cannot reduce: uint64, quantized numbers, tensors that are nested, on the meta
    device or sparse in another layout than COO, and with "min" and "max" also complex numbers and sparse tensors. Raises
    ``WorkerLostError`` when a rank is lost, and ``NotInWorldError`` above the elastic function.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
    if op not in _OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(_OPERATIONS)}, not {op!r}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} is not a whole number; convert the tensor, or use op='sum'")
    if op == "sum" and tensor.dtype is torch.bool:
        raise ValueError(
            "the sum of bools is a number, which no bool can hold; convert the tensor to int64, or use op='max'"
        )
    _check_kind(tensor, op)
    world = _world_for("allreduce()")
    reductions.note(tensor.numel())
    if world is None or world.size == 1:
        return tensor.detach().clone()
    # Use one memory order on all ranks, because libraries add up raw memory, and a dtype that the libraries support.
    layout = torch.contiguous_format if tensor.layout is torch.strided else torch.preserve_format
    result = tensor.detach().to(_COMPUTED_AS[tensor.dtype], copy=True, memory_format=layout)
    keeps_nan = op in ("min", "max") and result.is_floating_point() and tensor.layout is torch.strided
    with translated_errors(world):
        _check_equal_calls(
            f'allreduce with op="{op}" of {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}', world.size
        )
        if keeps_nan:  # whether min and max return NaN depends on the order of their arguments
            sign = 1.0 if op == "max" else -1.0
            unknown = result.isnan()
            both = torch.stack([result.nan_to_num(-sign * math.inf, math.inf, -math.inf), sign * unknown])
            dist.all_reduce(both, _OPERATIONS[op])
            result = both[0].masked_fill(both[1] != 0, math.nan)
        else:
            dist.all_reduce(result, _OPERATIONS[op])
    if op == "mean":
        result /= world.size
    return result.to(tensor.dtype)


def _world_for(call: str) -> World | None:
    """Return the world for a call of this module. Raises ``TrainingCodeError`` where other ranks would wait for it in vain."""
    world = current_world()
    if world is not None and world.process != os.getpid():
        raise TrainingCodeError(
            f"{call} came in another process than the worker's, such as one of a DataLoader with num_workers, and only the "
            "worker's is connected to the other ranks. Call it in the training loop, and give the process what it returns"
        )
    loops.refuse_within(f"{call} came")
    return world


def _check_kind(tensor: torch.Tensor, op: str) -> None:
    """Raise ``TypeError``, before other ranks wait for this one, for a tensor that no library reduces."""
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        kind = "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"tensor must be strided or sparse in COO, not {kind}; reduce its values()")
    if tensor.is_meta:
        raise TypeError(
            "tensor must hold values, and it is on the meta device; give one on the CPU or the worker's device"
        )
    if tensor.dtype not in _COMPUTED_AS:
        raise TypeError(
            f"tensor must be of a dtype that libraries reduce, not {tensor.dtype}; convert it to int64 or float32"
        )
    if op in ("min", "max") and tensor.is_complex():
        raise TypeError(f"op={op!r} is not defined for {tensor.dtype}; reduce the tensor's abs(), or its real and imag")
    if op in ("min", "max") and tensor.layout is not torch.strided:
        raise TypeError(f"op={op!r} cannot be computed of {tensor.layout}; reduce the tensor's to_dense()")


def _check_equal_calls(mine: str, size: int) -> None:
    """Raise ``TrainingCodeError`` on all ranks if they do not call the same function of this module alike.

    No library detects this: Gloo adds up even if one rank asks for a sum and another for a maximum, and misreads other dtypes.
    Ranks that take objects from different sources would wait for each other.
    """
    digest = int.from_bytes(hashlib.blake2b(mine.encode(), digest_size=7).digest(), "big")
    # On the CPU, whatever the user's default device is.
    digests = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
    dist.all_gather(digests, torch.tensor([digest], device="cpu"))
    if len({int(each) for each in digests}) > 1:
        everybody = [mine] * size
        dist.all_gather_object(everybody, mine)
        odd = next(rank for rank, each in enumerate(everybody) if each != everybody[0])
        raise TrainingCodeError(
            f"ranks called different functions, or one differently: rank 0 {everybody[0]}, rank {odd} {everybody[odd]}. All "
            "ranks have to make the same calls in the same order: allreduce with equal shapes and dtypes and the same op, "
            "broadcast_object with the same src"
        )


def allgather_object(obj: T) -> list[T]:
    """Return the ``obj`` of every rank, in rank order. Objects travel by cloudpickle, since all workers belong to one job.

    The call blocks until all ranks have called it. If they call another function of these instead, it raises
    ``TrainingCodeError`` on all ranks.
    """
    world = _world_for("allgather_object()")
    if world is None or world.size == 1:
        return [obj]
    packed = dumps_for_peers(obj)
    gathered = [packed] * world.size
    with translated_errors(world):
        _check_equal_calls("allgather_object", world.size)
        dist.all_gather_object(gathered, packed)
    return [pickle.loads(each) for each in gathered]


def broadcast_object(obj: T, src: int = 0) -> T:
    """Return the ``obj`` of rank ``src`` on all ranks. It travels by cloudpickle.

    The call blocks until all ranks have called it. If they give different ``src``, or call another function of these instead, it
    raises ``TrainingCodeError`` on all ranks.
    """
    world = _world_for("broadcast_object()")
    size = 1 if world is None else world.size
    if not 0 <= whole_number("src", src) < size:
        raise ValueError(f"src must be a rank from 0 to {size - 1}, not {src!r}")
    if size == 1:
        return obj
    assert world is not None
    is_source = world.rank == src
    box = [dumps_for_peers(obj) if is_source else b""]
    with translated_errors(world):
        _check_equal_calls(f"broadcast_object with src={src}", world.size)
        dist.broadcast_object_list(box, src)
    return obj if is_source else cast("T", pickle.loads(box[0]))


def barrier() -> None:
    """Wait until all ranks have called this function."""
    world = _world_for("barrier()")
    if world is not None and world.size > 1:
        with translated_errors(world):
            _check_equal_calls("barrier", world.size)  # no rank returns before all have begun it
