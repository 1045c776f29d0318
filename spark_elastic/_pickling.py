"""Pickles what a driver sends to workers, and what workers send to each other.

Torch's own pickling silently drops the hooks of parameters, and cloudpickle looks for functions with a cache (``lru_cache``) in a
module that workers do not have, the user's script. Here both travel.
"""

from __future__ import annotations

import functools
import io
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

from spark_elastic import _script

if TYPE_CHECKING:
    import torch

# A parameter's hooks by number, in torch's own dicts: those on its gradient, and those that run after accumulation. The handles
# that registration returned refer to these very dicts, and remove hooks from them.
Hooks = tuple["OrderedDict[int, Callable[..., object]] | None", "OrderedDict[int, Callable[..., object]] | None"]

_SPARKS_OWN = {
    "Accumulator": "to which only Spark's own tasks add: return the number, or give it to state.report",
    "Broadcast": "which only Spark's own tasks can read: give its value itself, broadcast.value",
    "DataFrame": "which only Spark's driver can use: write it to a dataset, and give a loader the path",
    "SparkSession": "which only Spark's driver can use: call Spark before run, and give the result as an argument",
}


def dumps(value: object) -> bytes:
    """Pickle a value with cloudpickle, parameters with their hooks. Does not import torch."""
    packed = io.BytesIO()
    _Pickler(packed).dump(value)
    return packed.getvalue()


def dumps_for_peers(value: object) -> bytes:
    """Pickle a value for another worker of the job, or for a later job, which has the classes of the user's script, too."""
    packed = io.BytesIO()
    _PeerPickler(packed).dump(value)
    return packed.getvalue()


def hooks_of(parameter: torch.Tensor) -> list[Callable[..., object]]:
    """Return the hooks registered on a parameter, except those that are marked as not to be pickled."""
    return [hook for registered in _registered(parameter) for hook in (registered or {}).values() if _travels(hook)]


def beside(parameter: torch.Tensor) -> dict[str, object]:
    """Return what code has attached to a parameter: its hooks and its public attributes."""
    found = {name: value for name, value in vars(parameter).items() if not name.startswith("_")}
    hooks = hooks_of(parameter)
    return found | ({"hooks": hooks} if hooks else {})


def _registered(parameter: Any) -> Hooks:
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def _travels(hook: object) -> bool:
    return not hasattr(hook, "__torch_unserializable__")


def _travelling(
    hooks: OrderedDict[int, Callable[..., object]] | None,
) -> OrderedDict[int, Callable[..., object]] | None:
    if not hooks or all(map(_travels, hooks.values())):
        return hooks
    return OrderedDict((number, hook) for number, hook in hooks.items() if _travels(hook))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, functools._lru_cache_wrapper):
            return self._reduce_cached(obj)
        _refuse_sparks_own(obj)
        nn = getattr(sys.modules.get("torch"), "nn", None)
        if nn is None or not isinstance(obj, nn.Parameter) or not hooks_of(obj):
            return super().reducer_override(obj)
        # Hooks are pickled as the state, after the parameter itself, because they may refer to the network.
        make, arguments, *_ = obj.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return make, arguments, tuple(map(_travelling, _registered(obj))), None, None, put_hooks

    def _reduce_cached(self, cached: Any) -> object:
        """Let a function with a cache travel, unless workers can import it. The copy's cache is empty."""
        found: Any = sys.modules.get(cached.__module__)
        for name in cached.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is cached and super().reducer_override(cached.__wrapped__) is NotImplemented:
            return NotImplemented
        # The function is the state, because it may call itself by the name of the cached one.
        parameters = cached.cache_parameters()
        return _make_cached, (parameters["maxsize"], parameters["typed"]), cached.__wrapped__, None, None, _put_function


def _refuse_sparks_own(value: object) -> None:
    """Raise ``TypeError`` for what works in tasks that Spark itself runs, and not in workers."""
    kind = type(value)
    if kind.__name__ in _SPARKS_OWN and kind.__module__.startswith("pyspark."):
        raise TypeError(f"it holds Spark's {kind.__name__}, {_SPARKS_OWN[kind.__name__]}")


class _PeerPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: object) -> object:
        return _script.reduced(obj) or super().reducer_override(obj)


class _Called:
    """Calls a function that is known later."""

    function: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)


def _make_cached(maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(_Called())


def _put_function(cached: Any, function: Callable[..., object]) -> None:
    cached.__wrapped__.function = function
    functools.update_wrapper(cached, function)


def put_hooks(parameter: Any, hooks: Hooks) -> None:
    """Put the hooks back on an unpickled parameter."""
    from torch.utils.hooks import RemovableHandle

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # the parameter may have been frozen after its hooks were registered
    on_gradient, accumulated = hooks
    if on_gradient:
        parameter._backward_hooks = on_gradient
    if accumulated:
        parameter._post_accumulate_grad_hooks = accumulated
    parameter.requires_grad_(is_trained)
    # Hooks that are registered later must not reuse these numbers.
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for each in hooks for number in each or ())])
