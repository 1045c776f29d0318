"""Commits in place: no copy of weights and optimizer state is kept, so a commit costs next to nothing.

This rests on one rule: a rank applies step s only after all reductions of s have succeeded, so when a world breaks, survivors
are at s or at s-1, and a rank that has not begun its optimizer step still has the weights of the last commit. A rank that is
caught between optimizer step and commit holds no commit at all; it reports that, and receives the state from a rank that holds
one. Small parts that change at other times (buffers, learning rates, counters, the loader's position) are copied as usual, and
so are weights that change without an optimizer (see ``unstepped.py``).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spark_elastic.checkpoint.skeleton import PLAIN, Lender, StateDict
from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, TrainingCodeError, WorkerLostError, final
from spark_elastic.worker.job import current_job, present_world
from spark_elastic.worker.module_registers import same_objects, stepped
from spark_elastic.worker.optimizers.steps import Closure, forget_scale, is_of_base_class, with_closure
from spark_elastic.worker.state.inference import writing_to
from spark_elastic.worker.state.keepers.copies import PartlyCopied, WholeCopies
from spark_elastic.worker.state.keepers.keeper import Content, Tell
from spark_elastic.worker.state.keepers.stepped import SteppedWeights
from spark_elastic.worker.state.keepers.unstepped import UnsteppedWeights
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import KeptPart, Snapshot, Stateful, leaves
from spark_elastic.worker.state.switches import Switches, switch, switches_of
from spark_elastic.worker.state.templates import (
    OfModule,
    Take,
    Template,
    has_extra_state,
    has_usual_state_dict,
    template_of,
)

if TYPE_CHECKING:
    from spark_elastic.worker.world import World

# How the names of extra state end in a state dict.
EXTRA_STATE = "_extra_state"
# Returns those of a module's weights that a commit has to copy, by their numbers.
ToCopy = Callable[[torch.nn.Module, Sequence[torch.Tensor]], dict[int, torch.Tensor]]


class InPlace(PartlyCopied):
    """Copies only small parts; modules and optimizers serve as their own copy until the next step."""

    name = "in_place"
    is_waited_for = True
    watches_optimizers = True

    def __init__(self) -> None:
        super().__init__()
        self._unstepped = UnsteppedWeights()
        self._stepped = SteppedWeights()
        self.guard = StepGuard(check_world, self._unstepped.is_uncopied)

    def template_of(
        self, value: Stateful, written: object, tensors: Sequence[torch.Tensor], start: int
    ) -> Template | None:
        return small_template(value, written, tensors, start, self._unstepped.to_copy)

    def begin(self, values: Mapping[str, object]) -> None:
        self.guard.begin(_optimizers_in(values))

    def take(self, content: Content, places: Places, own: object) -> bool:
        optimizers = _optimizers_in(content["objects"])
        self.guard.follow(optimizers)
        weights = [weight for optimizer in optimizers for weight in stepped(optimizer)]
        self._unstepped.watch(weights)
        job = current_job()
        if job is None or job.checkpoints is not None:  # only a durable checkpoint asks what has changed since
            self._stepped.note(weights)
        return super().take(content, places, own)

    def keep_live(self) -> None:
        self.guard.is_over = True

    @property
    def pending(self) -> PendingCopy | None:
        """None after a step: the step's reductions have succeeded, so an abort cannot spoil a copy enqueued after them."""
        return None if self.guard.dirty else super().pending

    def settle(self) -> None:
        super().settle()
        self.guard.settle()
        self._unstepped.settle()

    @property
    def has_stepped(self) -> bool:
        return self.guard.dirty

    @property
    def can_restore(self) -> bool:
        return not self.guard.dirty and not self._unstepped.changed(on_devices=False)

    def can_go_back(self) -> bool:
        return not self.guard.dirty and not self._unstepped.changed()

    def catch_up(self, world: World, values: Mapping[str, object], tell: Tell) -> Snapshot | None:
        arrived = super().catch_up(world, values, tell)
        if arrived is not None:
            self._unstepped.forget()
        return arrived

    def why_lost(self) -> str:
        if self.guard.dirty:
            return "all ranks were caught between optimizer step and commit"
        changed = self._unstepped.changed()
        return (
            f"{changed}, was changed without an optimizer for the first time after the last commit" if changed else ""
        )

    def part_of(self, value: Stateful) -> StateDict | KeptPart:
        if isinstance(value, torch.nn.Module):
            return small_module(value, self._unstepped.to_copy)
        return small_part(value) if isinstance(value, torch.optim.Optimizer) else super().part_of(value)

    def lend(self, values: Mapping[str, object]) -> Lender:
        return WholeCopies(self.snapshots, partial(self._copy_unchanged, values))

    def _copy_unchanged(self, values: Mapping[str, object]) -> Snapshot:
        """Copy the whole state for a durable checkpoint. The last one is written when the user's function has returned."""
        if self._stepped.have_changed():
            # Final, as the others would take the changed weights for those of the commit and go on.
            raise final(
                SparkElasticError(
                    f'commit="{self.name}": weights have changed since the last commit(), of which there is no copy to write '
                    "to a durable checkpoint; commit after the last change"
                )
            )
        return self.copy_whole(values)

    def copy_whole(self, values: Mapping[str, object]) -> Snapshot:
        whole = Snapshot()
        whole.take({**self.current.skeleton, "objects": values}, None)
        return whole


def check_world() -> None:
    """Raise ``WorkerLostError`` ahead of a step whose reductions may have failed unnoticed by the user's code."""
    world = present_world()
    if world is not None:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")


def _optimizers_in(values: Mapping[str, object]) -> set[torch.optim.Optimizer]:
    return {value for _, value in leaves(values) if isinstance(value, torch.optim.Optimizer)}


class StepGuard:
    """Watches optimizers: ``dirty`` says whether weights have changed since the last commit.

    ``before_step`` is called before each step, and may raise to keep the weights unchanged. ``is_uncopied`` tells whether the
    last commit has no copy of a weight. ``is_over``: the generation has been interrupted, so that a step comes from code that
    has swallowed the interrupt.
    """

    def __init__(self, before_step: Callable[[], None], is_uncopied: Callable[[torch.Tensor], bool]) -> None:
        self.dirty = self.is_over = False
        self._before_step, self._is_uncopied = before_step, is_uncopied
        # Whether an optimizer of the State has stepped since the last commit.
        self._has_stepped = False
        # Of the State's optimizers; None before the first generation.
        self._hooks: dict[torch.optim.Optimizer, RemovableHandle] | None = None

    def begin(self, optimizers: set[torch.optim.Optimizer]) -> None:
        """Watch these optimizers, and any others that step weights of the last commit, in a new generation."""
        self.is_over = False
        if self._hooks is None:
            self._hooks = {}
            _guards.add(self)
            _hook_all_steps()
        self.follow(optimizers)

    def follow(self, optimizers: set[torch.optim.Optimizer]) -> None:
        """Take these optimizers for those of the State from now on, if a generation has begun."""
        if self._hooks is None or (optimizers == self._hooks.keys() and all(map(self._watches, optimizers))):
            return
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {optimizer: optimizer.register_step_pre_hook(self._step_of_own) for optimizer in optimizers}

    def settle(self) -> None:
        """Note a new commit."""
        self.dirty = self._has_stepped = False

    def look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer that is not in the State, if it changes weights of which the last commit has no copy."""
        if self.dirty or self._watches(optimizer):
            return
        changing = (weight for weight in stepped(optimizer) if weight.requires_grad or weight.grad is not None)
        if any(map(self._is_uncopied, changing)):
            self._step()

    def _watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer of the State still has its hook, which it loses when it is set up anew by ``__init__``."""
        hook = (self._hooks or {}).get(optimizer)
        return hook is not None and hook.id in (hook.hooks_dict_ref() or ())

    def _step_of_own(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if is_of_base_class(optimizer):
            return None
        # Torch's own optimizers change nothing before they have called a closure for the first time.
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        changed = with_closure(args, kwargs, self._step_after) if is_torchs else None
        if changed is None:
            self._step(is_own=True)
        return changed

    def _step_after(self, closure: Closure) -> Closure:
        """Return a closure whose first return, with gradients that have been reduced, begins the step."""
        is_first = True

        @functools.wraps(closure)
        def call(*args: object, **kwargs: object) -> object:
            nonlocal is_first
            loss = closure(*args, **kwargs)
            if is_first:
                is_first = False
                self._step(is_own=True)
            return loss

        return call

    def _step(self, is_own: bool = False) -> None:
        job = current_job()
        if job is not None and job.finished:
            return  # no commit follows any more
        if self.is_over:
            raise HostsUpdatedInterrupt
        self._before_step()
        if is_own and self._has_stepped:
            raise TrainingCodeError(
                'TorchState(commit="in_place") takes exactly one optimizer step for each commit(), and this is the second; '
                'commit after each, or use commit="copy"'
            )
        self.dirty = True
        self._has_stepped |= is_own


_guards: weakref.WeakSet[StepGuard] = weakref.WeakSet()


@functools.cache
def _hook_all_steps() -> None:
    """Have all guards look at all optimizers. A hook of each guard would change torch's hooks in mid-step as it is freed."""
    register_optimizer_step_pre_hook(_look_at)


def _look_at(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for guard in tuple(_guards):
        guard.look_at(optimizer)


@dataclass(frozen=True, slots=True)
class SmallPart(KeptPart):
    """The small part of an optimizer: the settings of each group, such as rates."""

    content: list[dict[str, object]]

    def load_into(self, target: Stateful) -> None:
        """Set the optimizer back to these settings, and clear gradients."""
        assert isinstance(target, torch.optim.Optimizer), target
        for group, settings in zip(target.param_groups, self.content, strict=True):
            group.update(settings)
        forget_scale(target)
        target.zero_grad(set_to_none=True)


def small_part(value: torch.optim.Optimizer) -> SmallPart:
    """Return the part of an optimizer that is small enough to be copied at each commit."""
    return SmallPart(_settings(value))


@dataclass(frozen=True, slots=True)
class SmallModule(KeptPart):
    """The small part of a module.

    buffers: in the module's order. weights: those that have to be copied, by their numbers. extra: the extra state of its parts,
    by their names. others: what hooks and users' methods put into its state dict; None if there are none.
    """

    switches: Switches
    buffers: list[torch.Tensor]
    weights: dict[int, torch.Tensor]
    extra: dict[str, object]
    others: dict[str, object] | None = None

    def load_into(self, target: Stateful) -> None:
        """Set the module back to this part, and clear gradients."""
        assert isinstance(target, torch.nn.Module), target
        switch(target, self.switches)
        weights, buffers = list(target.parameters()), list(target.buffers())
        with writing_to(weights + buffers):
            for present, buffer in zip(buffers, self.buffers, strict=True):
                present.copy_(buffer)
            for number, weight in self.weights.items():
                weights[number].copy_(weight)
        for name, extra in self.extra.items():
            target.get_submodule(name).set_extra_state(copy.deepcopy(extra))
        if self.others:
            state = target.state_dict()
            state.update(copy.deepcopy(self.others))
            target.load_state_dict(state)
        target.zero_grad(set_to_none=True)


def small_module(module: torch.nn.Module, to_copy: ToCopy) -> SmallModule:
    """Return the part of a module that each commit copies, uncopied."""
    others = None if has_usual_state_dict(module, with_extra=True) else _others_in(module)
    weights = to_copy(module, list(module.parameters()))
    buffers = [each.detach() for each in module.buffers()]
    return SmallModule(switches_of(module), buffers, weights, _extra_of(dict(module.named_modules())), others)


def _extra_of(parts: Mapping[str, torch.nn.Module]) -> dict[str, object]:
    return {name: part.get_extra_state() for name, part in parts.items() if has_extra_state(part)}


def _others_in(module: torch.nn.Module) -> dict[str, object]:
    """Return what a module's state dict has besides its tensors, in whatever form, and extra state."""
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    memory = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    return {
        name: value
        for name, value in module.state_dict().items()
        if not (isinstance(value, torch.Tensor) and (name in own or value.untyped_storage().data_ptr() in memory))
        and not name.endswith(EXTRA_STATE)
    }


class SmallModuleTemplate(OfModule):
    """The template of a module's small part, of which only tensors are copied."""

    def __init__(self, module: torch.nn.Module, part: SmallModule, start: int, to_copy: ToCopy) -> None:
        super().__init__(module, start)
        self._module, self._to_copy = module, to_copy
        self._switches = part.switches
        self._buffers = list(module.buffers())
        self._extra = {name: each for name, each in module.named_modules() if name in part.extra}

    def _fill(self, tensors: list[torch.Tensor], take: Take) -> SmallModule:
        weights = {number: each.clone() for number, each in self._to_copy(self._module, self._parameters).items()}
        buffers = [buffer.detach().clone() for buffer in self._buffers]
        return SmallModule(self._switches, buffers, weights, copy.deepcopy(_extra_of(self._extra)))


class SmallOptimizer(Template):
    """The template of an optimizer's small part, which is reused as long as no setting changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, part: SmallPart, start: int) -> None:
        super().__init__(start)
        self._optimizer, self._part = optimizer, part
        self._stepped = stepped(optimizer)

    @staticmethod
    def fits(part: SmallPart) -> bool:
        """Whether all settings are comparable and immutable."""
        settings = [value for group in part.content for value in group.values()]
        return all(
            type(entry) in PLAIN for value in settings for entry in (value if type(value) is tuple else (value,))
        )

    def _is_current(self) -> bool:
        present = _settings(self._optimizer)
        return (
            present == self._part.content
            and _kinds(present) == _kinds(self._part.content)
            and same_objects(stepped(self._optimizer), self._stepped)
        )

    def _fill(self, tensors: list[torch.Tensor], take: Take) -> SmallPart:
        return self._part


def small_template(
    value: Stateful, written: object, tensors: Sequence[torch.Tensor], start: int, to_copy: ToCopy
) -> Template | None:
    """Make the template of a small part; for anything else, make that of a state dict."""
    if isinstance(written, SmallModule) and isinstance(value, torch.nn.Module):
        return SmallModuleTemplate(value, written, start, to_copy) if written.others is None else None
    if isinstance(written, SmallPart) and isinstance(value, torch.optim.Optimizer):
        return SmallOptimizer(value, written, start) if SmallOptimizer.fits(written) else None
    return template_of(value, written, tensors, start)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [{key: entry for key, entry in group.items() if key != "params"} for group in optimizer.param_groups]


def _kinds(settings: Sequence[Mapping[str, object]]) -> list[list[type]]:
    return [list(map(type, group.values())) for group in settings]
