"""Commits in place: no copy of weights and optimizer state is kept, so a commit costs next to nothing.

This rests on one rule: a rank applies step s only after all reductions of s have succeeded, so when a world breaks, survivors are
at s or at s-1, and a rank that has not begun its optimizer step still has the weights of the last commit. A rank that is caught
between optimizer step and commit holds no commit at all; it reports that, and receives the state from a rank that holds one. The
small parts that change at other times (buffers, learning rates, counters, the position of the loader) are copied as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from spark_elastic.checkpoint.skeleton import Lender, StateDict
from spark_elastic.errors import SparkElasticError, WorkerLostError
from spark_elastic.worker.job import present_world
from spark_elastic.worker.state.keepers.copies import OnDevice, WholeCopies
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.snapshot import KeptPart, Snapshot, SnapshotPair, Stateful, find_objects
from spark_elastic.worker.state.switches import switch, switches_of


class InPlace(OnDevice):
    """Copies only what is small; modules and optimizers serve as their own copy until the next step."""

    name = "in_place"
    is_waited_for = True
    watches_optimizers = True

    def __init__(self) -> None:
        super().__init__()
        self.guard = StepGuard(check_world)

    def begin(self, values: Mapping[str, object]) -> None:
        objects = find_objects(values).values()
        self.guard.watch(value for value in objects if isinstance(value, torch.optim.Optimizer))

    @property
    def pending(self) -> PendingCopy | None:
        """None after a step: its reductions have succeeded, so a copy that is enqueued behind them cannot be spoilt."""
        return None if self.guard.dirty else super().pending

    def settle(self) -> None:
        super().settle()
        self.guard.dirty = False

    @property
    def can_restore(self) -> bool:
        return not self.guard.dirty

    def lend(self, values: Mapping[str, object]) -> Lender:
        return WholeCopies(self.snapshots, partial(self._copy_whole, values))

    def for_repair(self, values: Mapping[str, object], is_sender: bool) -> SnapshotPair:
        """Copy everything for the ranks that lack it. A receiver gets temporary room, which is freed once it has loaded."""
        return SnapshotPair(self._copy_whole(values)) if is_sender else SnapshotPair()

    def part_of(self, value: Stateful) -> StateDict | KeptPart:
        return (
            small_part(value) if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) else super().part_of(value)
        )

    def _copy_whole(self, values: Mapping[str, object]) -> Snapshot:
        """Copy everything, weights and optimizer state included, as of the last commit."""
        light = self.current.skeleton
        whole = Snapshot()
        whole.take({"steps": light["steps"], "size": light["size"], "objects": values}, None)
        return whole


def check_world() -> None:
    """Raise ``WorkerLostError`` ahead of a step whose reductions may have failed unnoticed by the user's code."""
    world = present_world()
    if world is not None:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")


class StepGuard:
    """Watches optimizers: ``dirty`` tells that weights have changed since the last commit.

    ``before_step`` is called ahead of each step, and may raise to keep the weights as they are.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self.dirty = False
        self._before_step = before_step
        self._hooks: list[RemovableHandle] = []

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch these and no others."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [optimizer.register_step_pre_hook(self._stepping) for optimizer in optimizers]

    def _stepping(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self.dirty:
            raise SparkElasticError(
                'TorchState(commit="in_place") takes exactly one optimizer step for each commit(), and this is the second; '
                'commit after each, or use commit="copy"'
            )
        self._before_step()
        self.dirty = True


@dataclass(frozen=True, slots=True)
class SmallPart(KeptPart):
    """The small part of a module (switches and buffers) or of an optimizer (settings, such as rates)."""

    content: list[Any]  # of a module a ``Switches`` and its buffers, of an optimizer a dict for each group

    def load_into(self, target: Stateful) -> None:
        """Set the module or optimizer back to this part, and clear gradients."""
        assert isinstance(target, (torch.nn.Module, torch.optim.Optimizer)), target
        if isinstance(target, torch.nn.Module):
            switches, *buffers = self.content
            switch(target, switches)
            with torch.no_grad():
                for present, buffer in zip(target.buffers(), buffers, strict=True):
                    present.copy_(buffer)
        else:
            for group, settings in zip(target.param_groups, self.content, strict=True):
                group.update(settings)
        target.zero_grad(set_to_none=True)


def small_part(value: torch.nn.Module | torch.optim.Optimizer) -> SmallPart:
    """Return the part that is small enough to be copied at each commit."""
    if isinstance(value, torch.nn.Module):
        return SmallPart([switches_of(value), *value.buffers()])
    return SmallPart([{key: entry for key, entry in group.items() if key != "params"} for group in value.param_groups])
