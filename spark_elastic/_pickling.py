"""What a driver sends to workers, pickled with the hooks of parameters, which torch's own pickling leaves out without a word."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    import torch

# Hooks of a parameter: on its gradient, and after that was added to what it has accumulated.
Hooks = tuple[list[Callable[..., Any]], list[Callable[..., Any]]]


def dumps(value: object) -> bytes:
    """Pickle a value as cloudpickle does, and parameters with their hooks. Imports no torch: without it there are none."""
    if "torch" not in sys.modules:
        return bytes(cloudpickle.dumps(value))
    packed = io.BytesIO()
    _Pickler(packed).dump(value)
    return packed.getvalue()


def hooks_of(parameter: torch.Tensor) -> Hooks | None:
    """Return the hooks that code has registered on a parameter; None if there are none."""
    registered: Any = parameter
    found = (
        list((registered._backward_hooks or {}).values()),
        list((registered._post_accumulate_grad_hooks or {}).values()),
    )
    return found if any(found) else None


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules["torch"]
        hooks = hooks_of(obj) if isinstance(obj, torch.nn.Parameter) else None
        if hooks is None:
            return super().reducer_override(obj)
        # Hooks are the state, which is pickled when the parameter itself is known: they may hold the network.
        make, arguments, *_ = obj.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return make, arguments, hooks, None, None, register_hooks


def register_hooks(parameter: torch.Tensor, hooks: Hooks) -> None:
    """Register hooks on a parameter that was unpickled."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a parameter may have been frozen after they were registered
    on_gradient, accumulated = hooks
    for hook in on_gradient:
        parameter.register_hook(hook)
    for hook in accumulated:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(is_trained)
