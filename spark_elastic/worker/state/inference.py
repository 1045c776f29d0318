"""Torch's inference mode, in which user code evaluates: what is made in it can be written to only in that mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function make ordinary tensors, which later commits may write to, wherever user code calls it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        # Leaving inference mode would also have gradients recorded, which user code does not expect there.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


@contextmanager
def writing_to(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Record no gradients, and allow writing to these tensors even if some of them were made in inference mode."""
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        yield


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return numbers that writes to the tensors change. Those that were made in inference mode have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
