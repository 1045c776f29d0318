"""Optimizer steps, as the hooks of torch see them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

Closure = Callable[..., object]

# Where torch calls the hooks, in a function of this name around the step.
_FILE, _NAME = inspect.getfile(torch.optim.Optimizer), "wrapper"


def is_of_base_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook is called within a step of the same optimizer, which it has seen already.

    Torch calls the hooks for each class that defines ``step`` and of which the process has made an optimizer. So it calls them
    twice for a subclass that calls its base class's step. A compiler that traces the hook is told False: it knows no frames.
    """
    if torch.compiler.is_compiling() or not _has_steps_of_bases(type(optimizer)):
        return False
    callers, frame = 0, sys._getframe()
    while (outer := frame.f_back) is not None:
        frame, code = outer, outer.f_code
        if code.co_name == _NAME and code.co_filename == _FILE and frame.f_locals.get("self") is optimizer:
            callers += 1
    return callers > 1


def _has_steps_of_bases(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether more than one class of an optimizer's has a ``step`` of its own, so that one of them may call another."""
    classes = [each for each in optimizer_class.__mro__ if each is not torch.optim.Optimizer]
    return sum("step" in vars(each) for each in classes) > 1


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Take away what a ``GradScaler`` leaves on an optimizer whose step has raised: it would count again in the next step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def with_closure(
    args: Sequence[object], kwargs: Mapping[str, object], replace: Callable[[Closure], Closure]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Return the arguments of a step, as a hook sees them, with another closure; None if the step was given none."""
    own, *others = args
    if others and callable(others[0]):
        return (own, replace(others[0]), *others[1:]), dict(kwargs)
    closure = kwargs.get("closure")
    return (tuple(args), {**kwargs, "closure": replace(closure)}) if callable(closure) else None
