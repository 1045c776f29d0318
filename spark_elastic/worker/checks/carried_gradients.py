"""Gradients that were accumulated before a commit and are used after it, where several optimizers step at different times.

A commit holds no gradients, and a reset clears them, so the rows behind them would be lost without a sign. Often gradients are
left behind that nobody uses: the loss of a generator reaches its critic, too. So what counts is the step that uses them.
"""

from __future__ import annotations

import functools
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
        # The ids of parameters that had gradients at the last commit and that no backward pass has reached since, and of those
        # to whose gradients one has added.
        self._held: set[int] = set()
        self._added: set[int] = set()
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
        """Note a commit. Optimizers that have stepped since the one before need no look, so that most code costs nothing."""
        for optimizer, parameters in self._probed.items():
            if optimizer not in self._stepped:
                for parameter in parameters:
                    if parameter.grad is not None and parameter.requires_grad:
                        self._hold(parameter)
        self._stepped.clear()

    def _hold(self, parameter: torch.Tensor) -> None:
        self._held.add(id(parameter))
        if id(parameter) not in self._hooks:
            self._hooks[id(parameter)] = parameter.register_hook(functools.partial(self._reached, parameter))

    def _reached(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look at what a parameter holds before a backward pass adds to it."""
        number = id(parameter)
        if number not in self._held and number not in self._added:
            return
        self._held.discard(number)
        if is_any_set(parameter.grad):
            self._added.add(number)
        else:
            self._added.discard(number)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step with gradients that were there at a commit."""
        if not self._held and not self._added:
            return
        for parameter in self._probed.get(id(optimizer), ()):
            number = id(parameter)
            if number in self._added or (number in self._held and is_any_set(parameter.grad)):
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
            numbers = {id(parameter) for parameter in self._probed.get(id(optimizer), ())}
            self._held -= numbers
            self._added -= numbers


def is_any_set(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient has a number other than 0 on this rank."""
    return gradient is not None and bool(numbers_of(gradient).any())


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor that this rank holds, without asking others: all, or its part, or those of a sparse one."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.coalesce().values() if part.layout == torch.sparse_coo else part
