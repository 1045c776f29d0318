"""Gradients that were accumulated before a commit and are used after it, where several optimizers step at different times.

A commit holds no gradients, and a reset clears them, so the rows behind them would be lost without a sign. Often gradients are
left behind that nobody uses: the loss of a generator reaches its critic, too. So what counts is the step that uses them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from spark_elastic.errors import TrainingCodeError


class CarriedGradients:
    """Watches a few parameters of each optimizer of a State, in one generation."""

    def __init__(self) -> None:
        # By the ids of optimizers. These do not change within a generation.
        self._probed: dict[int, Sequence[torch.Tensor]] = {}
        # The ids of the optimizers that have stepped since the last commit.
        self._stepped: set[int] = set()
        # By the ids of parameters: gradients that were there at a commit and that no backward pass has reached since, and those
        # to which one has added. A gradient that is assigned, or made anew, is another tensor.
        self._held: dict[int, weakref.ref[torch.Tensor]] = {}
        self._added: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks: dict[int, RemovableHandle] = {}

    def watch(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Watch these parameters of an optimizer."""
        self._probed[id(optimizer)] = parameters

    def end(self) -> None:
        """Stop watching."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def committed(self) -> None:
        """Note a commit, with a backward pass since the one before. Only optimizers that have not stepped since need a look."""
        for optimizer, parameters in self._probed.items():
            if optimizer not in self._stepped:
                for parameter in parameters:
                    self._hold(parameter)
        self._stepped.clear()

    def _hold(self, parameter: torch.Tensor) -> None:
        number, gradient = id(parameter), parameter.grad
        if gradient is None or not parameter.requires_grad or number in self._added:
            return
        self._held[number] = weakref.ref(gradient)
        if number not in self._hooks:
            self._hooks[number] = parameter.register_hook(functools.partial(self._reached, parameter))

    def _reached(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look at what a parameter holds before a backward pass adds to it."""
        held, added = self._held.pop(id(parameter), None), self._added.pop(id(parameter), None)
        before = held or added
        if before is not None and _is_still_set(parameter, before):
            self._added[id(parameter)] = before

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step with gradients that were there at a commit."""
        if not self._held and not self._added:
            return
        for parameter in self._probed.get(id(optimizer), ()):
            before = self._added.get(id(parameter)) or self._held.get(id(parameter))
            if before is not None and _is_still_set(parameter, before):
                raise TrainingCodeError(
                    f"an optimizer ({type(optimizer).__name__}) steps with gradients that were there at a commit already: "
                    "gradients are not part of a commit, so the rows that have been accumulated would be lost after a reset. "
                    "Call state.commit() only where all optimizers have stepped; if these gradients are left over from "
                    "another loss, drop them with optimizer.zero_grad() before the next backward()"
                )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has used its gradients."""
        self._stepped.add(id(optimizer))
        if self._held or self._added:
            for parameter in self._probed.get(id(optimizer), ()):
                self._held.pop(id(parameter), None)
                self._added.pop(id(parameter), None)


def _is_still_set(parameter: torch.Tensor, before: weakref.ref[torch.Tensor]) -> bool:
    """Whether a parameter has the gradient that it had before, and this was not set to zero."""
    gradient = parameter.grad
    return gradient is not None and before() is gradient and is_any_set(gradient)


def is_any_set(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient has a number other than 0 on this rank."""
    return gradient is not None and bool(numbers_of(gradient).any())


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor that this rank holds, without asking others: all, or its part, or those of a sparse one."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.coalesce().values() if part.layout == torch.sparse_coo else part
