"""Converters: define what the Params of estimators and models accept, and the form in which they store it.

A converter raises ``TypeError`` or ``ValueError`` with the reason, which ``params.param`` prefixes with the Param's name. It is
pickled with every estimator and model that has the Param, so those that are made with arguments are partials, not closures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from pyspark.ml.param import TypeConverters

from spark_elastic._json import Json
from spark_elastic.estimator.callbacks import HOOKS
from spark_elastic.estimator.store import Store
from spark_elastic.launchers.resources import TaskResources
from spark_elastic.loggers import Logger, list_of_loggers

if TYPE_CHECKING:
    import torch
    from pyspark.resource import ResourceProfile

T = TypeVar("T")
Converter = Callable[[object], T]
Function = Callable[..., object]


def whole(least: int, most: int = 2**63 - 1) -> Converter[int]:
    """Make a converter for whole numbers from ``least`` to ``most``."""
    return partial(_whole, least, most)


def _whole(least: int, most: int, value: object) -> int:
    try:
        converted = int(value) if hasattr(value, "__int__") and not isinstance(value, (bool, str)) else None
    except (ValueError, OverflowError):  # NaN and infinity
        converted = None
    if converted is None or converted != value:
        raise TypeError(f"must be a whole number, not {value!r}")
    if converted < least:
        raise ValueError(f"must be a whole number from {least} on, not {value!r}")
    if converted > most:
        raise ValueError(f"must be a whole number up to {most}, not {value!r}")
    return converted


def number(low: float = -math.inf, high: float = math.inf, *, low_open: bool = False) -> Converter[float]:
    """Make a converter for numbers between two bounds, excluding the upper one."""
    return partial(_number, low, high, low_open)


def _number(low: float, high: float, low_open: bool, value: object) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"must be a number, not {value!r}")
    converted = float(value)
    if math.isnan(converted) or converted < low or (low_open and converted == low) or converted >= high:
        bounds = f"{'above' if low_open else 'at least'} {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        raise ValueError(f"must be a number {bounds}, not {value!r}")
    return converted


def boolean(value: object) -> bool:
    """Convert a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"must be True or False, not {value!r}")
    return value


def text(value: object) -> str:
    """Convert a string."""
    if not isinstance(value, str):
        raise TypeError(f"must be a string, not {value!r}")
    return value


def folder(value: object) -> str:
    """Convert a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"must be a path, not {value!r}")
    return os.fspath(value)


def one_of(*choices: str) -> Converter[str]:
    """Make a converter that accepts one of these strings."""
    return partial(_one_of, choices)


def _one_of(choices: tuple[str, ...], value: object) -> str:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def names(value: object) -> list[str]:
    """Convert column names. A single name need not be in a list."""
    listed = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else None
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise TypeError(f"must be a list of column names, not {value!r}")
    return listed


def numbers(value: object) -> list[float]:
    """Convert a list of numbers."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"must be a list of numbers, not {value!r}")
    return [number()(entry) for entry in value]


def class_thresholds(value: object) -> list[float]:
    """Convert Spark ML's class thresholds."""
    listed: list[float] = TypeConverters.toListFloat(value)
    if not all(entry >= 0 for entry in listed) or listed.count(0) > 1:
        raise ValueError(f"must be numbers from 0 on with at most one 0, not {listed}")
    return listed


def class_weights(value: object) -> str | list[float] | dict[int, float]:
    """Convert "balanced", one number for each class, or a dict from classes to numbers."""
    if isinstance(value, str):
        return one_of("balanced")(value)
    weight = number(0.0)
    found: list[float] | dict[int, float]
    if isinstance(value, Mapping):
        found = {whole(0)(label): weight(entry) for label, entry in value.items()}
    elif isinstance(value, (list, tuple)):
        found = [weight(entry) for entry in value]
    elif hasattr(value, "tolist"):  # an array, such as scikit-learn computes
        found = [weight(entry) for entry in value.tolist()]
    else:
        raise TypeError(f"must be 'balanced', or a list or dict of numbers, not {value!r}")
    if not any(found.values() if isinstance(found, dict) else found):
        raise ValueError(f"must have a number above 0, not {value!r}")
    return found


def json_dict(value: object) -> dict[str, Json]:
    """Convert keyword arguments that JSON can represent."""
    if not isinstance(value, Mapping):
        raise TypeError(f"must be a dict, not {value!r}")
    try:
        json.dumps(value)
    except TypeError as error:
        raise TypeError(f"must hold numbers, strings, lists and dicts only, so that it can be saved: {error}") from None
    return dict(value)


def keywords(value: object) -> dict[str, object]:
    """Convert a dict of keyword arguments."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"must be a dict of keyword arguments, not {value!r}")
    return dict(value)


def function(value: object) -> Function:
    """Convert a callable."""
    if not callable(value):
        hint = f"; give the class {type(value).__name__}" if hasattr(value, "step") else ""
        raise TypeError(f"must be callable, not {value!r}{hint}")
    return value


def made(value: object) -> Function:
    """Convert a function or a callable object. Refuse a loss or metric class, which is often given by mistake."""
    if isinstance(value, type) and any(hasattr(value, name) for name in ("forward", "update")):
        raise TypeError(f"must be a function or an object, not the class {value.__name__}: write {value.__name__}()")
    return function(value)


def functions(value: object) -> Function | list[Function]:
    """Convert a function or a list of functions."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("must not be empty")
        return [made(entry) for entry in value]
    return made(value)


def metrics(value: object) -> dict[str, Function]:
    """Convert metrics to a dict. Metrics in a list are named after their function or class."""
    if isinstance(value, Mapping):
        return {text(name): made(metric) for name, metric in value.items()}
    found: dict[str, Function] = {}
    for metric in map(made, value if isinstance(value, (list, tuple)) else [value]):
        name = getattr(metric, "__name__", type(metric).__name__)
        if name in found:
            raise ValueError(f"two metrics are called {name}; give a dict of names and metrics")
        found[name] = metric
    return found


def inputs(value: object) -> dict[str, Json]:
    """Convert ``{"x": [columns]}`` or ``{"x": ([columns], "int64")}``."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"must be a dict from keywords of forward to columns, not {value!r}")
    found: dict[str, Json] = {}
    for keyword, columns in value.items():
        if isinstance(columns, (list, tuple)) and len(columns) == 2 and isinstance(columns[0], (list, tuple)):
            found[text(keyword)] = [names(columns[0]), one_of("int64", "float32", "bool")(columns[1])]
        else:
            found[text(keyword)] = names(columns)
    return found


def store(value: object) -> Store:
    """Convert a Store, its URL, or the path of a folder."""
    if isinstance(value, (str, os.PathLike)):
        return Store.create(value)
    if not isinstance(value, Store):
        raise TypeError(f"must be a Store or its URL, not {value!r}")
    return value


def callback_list(value: object) -> list[object]:
    """Convert a callback or a list of callbacks."""
    listed = list(value) if isinstance(value, Sequence) else [value]
    for entry in listed:
        if not any(callable(getattr(entry, hook, None)) for hook in HOOKS):
            raise TypeError(f"must be objects with on_epoch_end(ctx), or another of {', '.join(HOOKS)}, not {entry!r}")
    return listed


def logger_list(value: object) -> list[Logger]:
    """Convert a logger or a list of loggers."""
    return list_of_loggers([value] if isinstance(value, Logger) else value)


def task_resources(value: object) -> dict[str, float] | ResourceProfile:
    """Convert ``{"cpus": 2, "gpus": 1}``, or a ``ResourceProfile``."""
    TaskResources.of(value, "it")
    return dict(value) if isinstance(value, Mapping) else cast("ResourceProfile", value)


def optimizer(value: object) -> Function | torch.optim.Optimizer:
    """Convert an optimizer: a class, an instance, or a function of parameters."""
    import torch

    if not callable(value) and not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"must be a class, a function of the parameters or a torch.optim.Optimizer, not {value!r}")
    return value


def module(value: object) -> torch.nn.Module:
    """Convert a network."""
    import torch

    if not isinstance(value, torch.nn.Module):
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            raise TypeError(
                f"must be an instance of torch.nn.Module, not the class {value.__name__}: write {value.__name__}(…)"
            )
        raise TypeError(f"must be a torch.nn.Module, not {value!r}")
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError(
            "is a TorchScript module, which cannot be pickled: give the torch.nn.Module that it was made of"
        )
    return value
