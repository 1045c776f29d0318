"""Optimizer steps, as the hooks of torch see them."""

from __future__ import annotations

import inspect
import sys

import torch

# Where torch calls the hooks, in a function of this name around the step.
_FILE, _NAME = inspect.getfile(torch.optim.Optimizer), "wrapper"


def is_of_base_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook is called within a step of the same optimizer, which it has seen already.

    Torch calls the hooks for each class that defines ``step`` and of which the process has made an optimizer. So it calls them
    twice for a subclass that calls its base class's step. A compiler that traces the hook is told False: it knows no frames.
    """
    if torch.compiler.is_compiling():
        return False
    callers, frame = 0, sys._getframe()
    while (outer := frame.f_back) is not None:
        frame, code = outer, outer.f_code
        if code.co_name == _NAME and code.co_filename == _FILE and frame.f_locals.get("self") is optimizer:
            callers += 1
    return callers > 1
