"""Commits in place: no copy of weights and optimizer state is kept, so a commit costs next to nothing.

It rests on one rule: a rank applies step s only after all reductions of s have succeeded, so when a world breaks, survivors stand
at s or at s-1, and a rank that has not begun its optimizer step still has the weights of the last commit. Who is caught between
optimizer step and commit holds no commit at all; it says so, and is repaired by a rank that does. What is small and changes at
other times (buffers, learning rates, counters, the loader's place) is copied as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.frozen import freeze, frozen_names
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair


class StepGuard:
    """Watches optimizers: ``dirty`` tells that weights have changed since the last commit.

    ``before_step`` is called ahead of each step, and may raise to keep the weights as they are.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self.dirty = False
        self._before_step = before_step
        self._hooks: list[Any] = []

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch these and no others."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [optimizer.register_step_pre_hook(self._stepping) for optimizer in optimizers]

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.dirty:
            raise SparkElasticError(
                'TorchState(commit="in_place") takes exactly one optimizer step for each commit(), this is the second; commit '
                'after each, or use commit="copy"'
            )
        self._before_step()
        self.dirty = True


@dataclass(frozen=True, slots=True)
class SmallPart:
    """What of a module or an optimizer is copied at each commit: what is frozen and buffers; or settings, such as rates."""

    content: list[Any]


def is_kept_in_place(value: Any) -> bool:
    """Whether commits leave a value where it is, instead of copying it."""
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def small_part(value: Any) -> SmallPart:
    """Return what is small enough to be copied at each commit."""
    if isinstance(value, torch.nn.Module):
        return SmallPart([frozen_names(value), *value.buffers()])
    return SmallPart([{key: entry for key, entry in group.items() if key != "params"} for group in value.param_groups])


def load_small_part(value: Any, saved: SmallPart) -> None:
    """Set it back, and clear gradients."""
    if isinstance(value, torch.nn.Module):
        names, *buffers = saved.content
        freeze(value, names)
        with torch.no_grad():
            for present, buffer in zip(value.buffers(), buffers, strict=True):
                present.copy_(buffer)
    else:
        for group, settings in zip(value.param_groups, saved.content, strict=True):
            group.update(settings)
    value.zero_grad(set_to_none=True)


class WholeCopies:
    """Lends a copy of the whole state, made when it is asked for: the step's thread pays one memcpy for a durable checkpoint."""

    def __init__(self, small: SnapshotPair, copy: Callable[[], Snapshot]) -> None:
        self._small = small
        self._copy = copy

    @property
    def current(self) -> Snapshot:
        """The last commit of what is copied."""
        return self._small.current

    def lend(self) -> Snapshot:
        """Return a whole copy for a newcomer to read."""
        whole = self._copy()
        whole.wait()
        return whole

    def take_back(self) -> None:
        """The copy goes with its last reader."""
