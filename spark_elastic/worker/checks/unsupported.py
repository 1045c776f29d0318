"""Objects that a State cannot hold, refused in one sentence rather than by an error from inside torch."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from spark_elastic._code import globals_of
from spark_elastic.data.loader import PositionedLoader, shards_of_loader
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.checks.reachable import find_optimizers
from spark_elastic.worker.checks.user_frames import depth_of_user

# Torch's classes that divide a model among ranks, so that no rank could send the whole of it to a newcomer.
_SHARDED = ("ZeroRedundancyOptimizer", "FullyShardedDataParallel")
_SHAPELESS = "a parameter that has no shape before the model's first call"
_DTENSOR = "a DTensor, as FSDP and tensor parallelism make them"
_METRIC = "a torchmetrics metric whose values its state dict leaves out"
_PARTIAL_METRIC = "a torchmetrics metric, of this rank's rows only"
_PART_BY_PART = (
    "reset, update and compute it between two commits; or call its persistent(True) and give it under local="
)
_DENSE = ", which a State does not support: every worker holds the whole model, in dense tensors"
_HOW_TO_DIVIDE = (
    ". A model that fully_shard divides goes into a spark_elastic.ShardedState, and the norm of its gradients as "
    "float(norm)"
)
# The rest of the sentence, by the kind of object.
_ADVICE = {
    _SHAPELESS: ", which a State does not support: call the model once, with a batch, before it is wrapped",
    _DTENSOR: _DENSE + _HOW_TO_DIVIDE,
    "torch's FullyShardedDataParallel": _DENSE + _HOW_TO_DIVIDE,
    "torch's ZeroRedundancyOptimizer": (
        ", whose parts end with the first loss; write spark_elastic.ZeroRedundancyOptimizer, which takes the same arguments"
    ),
    _METRIC: (
        f", so that no commit would keep them, and they are of this rank's rows only: {_PART_BY_PART}, where a rank that is "
        "lost takes its part with it"
    ),
    _PARTIAL_METRIC: (
        f", which a reset would replace by another rank's: {_PART_BY_PART}, where a rank that is lost takes its part with it"
    ),
}


def why_unsupported(value: object) -> str | None:
    """Describe a tensor, or an object with a state dict, that a State cannot hold; None if it can."""
    kind = type(value)
    if not isinstance(value, torch.Tensor):
        if kind.__name__ in _SHARDED and kind.__module__.startswith("torch."):
            return f"torch's {kind.__name__}"
        return _METRIC if _forgets_its_values(value) else None
    if kind.__name__ == "DTensor" and isinstance(value, getattr(sys.modules.get(kind.__module__), "DTensor", ())):
        return _DTENSOR
    if torch.nn.parameter.is_lazy(value):
        return _SHAPELESS
    if value.is_nested:
        return "a nested tensor"
    if value.is_quantized:
        return "a quantized tensor"
    if value.layout is not torch.strided:
        return f"a sparse tensor ({value.layout})"
    return "a tensor without data, on the meta device" if value.is_meta else None


def _forgets_its_values(value: object) -> bool:
    return not all(flag for metric in _metrics_in(value) for flag in metric._persistent.values())


def _metrics_in(value: object) -> list[Any]:
    """Return a torchmetrics metric, or those of a collection; an empty list for anything else."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        return []
    return list(value.values()) if isinstance(value, torchmetrics.MetricCollection) else [value]


def check_is_shared(value: object, name: str) -> None:
    """Raise ``TypeError`` for a value that is never the same on all ranks, such as a metric."""
    if _metrics_in(value):
        raise TypeError(f"{name} is {_PARTIAL_METRIC}{_ADVICE[_PARTIAL_METRIC]}")


def warn_of_metrics(value: object, name: str) -> None:
    """Warn of a metric in a module whose state dict has its values: they are of this rank's rows only."""
    for part, metric in value.named_modules() if isinstance(value, torch.nn.Module) else ():
        if any(any(each._persistent.values()) for each in _metrics_in(metric)):
            warnings.warn(
                f"{name}.{part} is {_PARTIAL_METRIC}. It is persistent, so a reset would replace its values by another rank's: "
                "call persistent(False) of the metric, and reset, update and compute it between two commits",
                stacklevel=depth_of_user(),
            )


def warn_of_training(state: object, trains: bool, divides_rows: bool) -> None:
    """Warn of what a State holds although it does not look at training, or does not divide the rows of its loaders."""
    kind = type(state).__name__
    values = {name: value for name, value in vars(state).items() if not name.startswith("_")}
    if trains or find_optimizers(values):
        warnings.warn(
            f"{kind} does not look for mistakes in what it trains, such as a model that is not wrapped, nor compare the ranks' "
            "weights. Write state = se.TorchState(…), or a subclass of it, which does, and takes any other objects, too",
            stacklevel=depth_of_user(),
        )
    loaders = [name for name, value in values.items() if not divides_rows and isinstance(value, PositionedLoader)]
    if loaders:
        warnings.warn(
            f"{kind} does not divide the rows of its {loaders[0]}: every rank gets all of them, unless your code divides them by "
            "se.rank() and se.size(). Write state = se.TorchState(loader=…, …), or a subclass of it, which does",
            stacklevel=depth_of_user(),
        )


def check_shards(state: object, loader: object) -> None:
    """Raise ``SparkElasticError`` for a loader with ``shards=`` in a State that does not let models train on them."""
    if (shards := shards_of_loader(loader)) is not None:
        raise SparkElasticError(
            f"models train with shards={shards} in a TorchState only, or a subclass of it, which a {type(state).__name__} is "
            "not: nothing would reduce their gradients. Write state = se.TorchState(loader=…, …)"
        )


def check_supported(value: object, name: str) -> None:
    """Raise ``TypeError`` for a value that a State cannot hold: every worker holds the whole state, in dense tensors."""
    what = why_unsupported(value)
    if what is not None:
        raise TypeError(f"{name} is {what}{_ADVICE.get(what, _DENSE)}")
    if isinstance(value, torch.nn.Module):
        parts = [*list(value.named_modules())[1:], *value.named_parameters(), *value.named_buffers()]
        for part, entry in parts:
            if why_unsupported(entry) not in (None, _METRIC):  # a module's metrics come and go with its steps
                check_supported(entry, f"{name}.{part}")


def check_functions(value: object) -> None:
    """Raise ``TypeError`` for a function, or an object with one, that would travel with a copy of what trains."""
    if isinstance(value, type):
        return
    entries = (value, *vars(value).values()) if hasattr(value, "__dict__") else (value,)
    for function in entries:
        if not isinstance(function, types.FunctionType):
            continue
        held = next((used for used in _used_by(function) if _trains(used)), None)
        if held is not None:
            kind = type(held).__name__
            raise TypeError(
                f"a function in the State, {function.__qualname__}, uses a {kind}, and other ranks would get it with a copy of "
                f"that {kind}, which nobody trains: keep the function out of the State, and the numbers that it needs in it"
            )


def _trains(value: object) -> bool:
    """Whether a value is trained, or moves on as training does."""
    if isinstance(value, torch.nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, (torch.nn.Parameter, torch.optim.Optimizer, PositionedLoader))


def _used_by(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function holds that travels with it: its closure, its defaults, and if it is the script's, its globals."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the name has no value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    found = getattr(sys.modules.get(function.__module__), function.__qualname__, None)
    if found is not function or function.__module__ == "__main__":
        yield from (function.__globals__.get(name) for name in globals_of(function.__code__))
