"""Pickles what a driver sends to workers, including parameters' hooks, which torch's own pickling silently drops."""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    import torch

# A parameter's hooks by number, in torch's own dicts: those on its gradient, and those that run after accumulation. The handles
# that registration returned refer to these very dicts, and remove hooks from them.
Hooks = tuple["OrderedDict[int, Callable[..., Any]] | None", "OrderedDict[int, Callable[..., Any]] | None"]


def dumps(value: object) -> bytes:
    """Pickle a value with cloudpickle, parameters with their hooks. Does not import torch."""
    if getattr(sys.modules.get("torch"), "nn", None) is None:
        return bytes(cloudpickle.dumps(value))
    packed = io.BytesIO()
    _Pickler(packed).dump(value)
    return packed.getvalue()


def hooks_of(parameter: torch.Tensor) -> list[Callable[..., Any]]:
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


def _travelling(hooks: OrderedDict[int, Callable[..., Any]] | None) -> OrderedDict[int, Callable[..., Any]] | None:
    if not hooks or all(map(_travels, hooks.values())):
        return hooks
    return OrderedDict((number, hook) for number, hook in hooks.items() if _travels(hook))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules["torch"]
        if not isinstance(obj, torch.nn.Parameter) or not hooks_of(obj):
            return super().reducer_override(obj)
        # Hooks are pickled as the state, after the parameter itself, because they may refer to the network.
        make, arguments, *_ = obj.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return make, arguments, tuple(map(_travelling, _registered(obj))), None, None, put_hooks


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
