"""Templates: what the state dicts of a module or an optimizer have in common at all commits, kept from commit to commit.

Making the state dict of a hundred layers takes ten times as long as copying their tensors, and yields the same at every commit,
except for the values. So it is made once; as long as the object has the same parts, a commit only fetches the object's tensors.
An object that does not make its state dict as torch's own classes do (with hooks, or with the user's methods) has no template,
and is asked for its state dict at every commit.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from spark_elastic.checkpoint.skeleton import PLAIN, StateDict, map_tree
from spark_elastic.worker.checks.unsupported import check_supported
from spark_elastic.worker.module_registers import Registered, registers, same_objects, stepped
from spark_elastic.worker.state.snapshot import Found, Stateful

Take = Callable[[object], object]


class Template(ABC):
    """What a commit keeps of an object except for values; its first tensor is number ``start`` of the commit."""

    def __init__(self, start: int) -> None:
        self._start = start

    def fill(self, tensors: list[torch.Tensor], take: Take) -> object:
        """Append the object's tensors and return its skeleton; None, with nothing appended, if its parts have changed."""
        return self._fill(tensors, take) if len(tensors) == self._start and self._is_current() else None

    @abstractmethod
    def _is_current(self) -> bool:
        """Whether the same would be kept of the object, except for values."""

    @abstractmethod
    def _fill(self, tensors: list[torch.Tensor], take: Take) -> object:
        """Append the tensors and return the skeleton. ``take`` copies values that are not tensors of the object's own."""


# Makes the template of an object from what was written of it, the tensors found in it, and the number of the first of these.
Make = Callable[[Stateful, object, Sequence[torch.Tensor], int], "Template | None"]


class Templates:
    """The templates of one state's objects, in the order in which a commit visits the objects."""

    def __init__(self, make: Make) -> None:
        self._make = make
        # Grows with every commit that finds other objects than the commit before, or objects with other parts.
        self.version = 0
        # Addresses of memory that objects hold, and that is not what training changes.
        self.checked: set[int] = set()
        self._known: list[tuple[Stateful, Template | None]] = []

    def part_of(self, found: Found, take: Take, write: Callable[[], object]) -> object:
        """Add the tensors of the object that was found last and return its skeleton, by its template or by ``write``."""
        number = len(found.objects) - 1
        value = found.objects[number]
        owner, template = self._known[number] if number < len(self._known) else (None, None)
        if owner is value and template is not None:
            skeleton = template.fill(found.tensors, take)
            if skeleton is not None:
                return skeleton
        start = len(found.tensors)
        written = write()
        if owner is not value or isinstance(value, (nn.Module, torch.optim.Optimizer)):
            self.version += 1
        self._known[number : number + 1] = [(value, self._make(value, written, found.tensors[start:], start))]
        return written

    def end(self, found: Found) -> None:
        """End a commit, which has visited all objects: forget all others."""
        if len(found.objects) < len(self._known):
            del self._known[len(found.objects) :]
            self.version += 1


def template_of(value: Stateful, written: object, tensors: Sequence[torch.Tensor], start: int) -> Template | None:
    """Make the template of a state dict."""
    if isinstance(written, StateDict):
        if isinstance(value, nn.Module) and ModuleTemplate.fits(value, written, tensors):
            return ModuleTemplate(value, written, start)
        if isinstance(value, torch.optim.Optimizer) and OptimizerTemplate.fits(value, written):
            return OptimizerTemplate(value, written, start)
    return None


class OfModule(Template):
    """A template of a module with the usual state dict, which holds as long as parts, tensors and switches are the same."""

    def __init__(self, module: nn.Module, start: int) -> None:
        super().__init__(start)
        self._parts, self._parameters = list(module.modules()), list(module.parameters())
        self._hooks = [hooks for part in self._parts for hooks in (part._state_dict_hooks, part._state_dict_pre_hooks)]
        self._registered = Registered(register for part in self._parts for register in registers(part))
        self._known = self._look()

    def _is_current(self) -> bool:
        return not any(self._hooks) and self._registered.is_current() and self._look() == self._known

    def _look(self) -> tuple[Sequence[object], ...]:
        return (
            self._registered.names,
            [part.training for part in self._parts],
            [parameter.requires_grad for parameter in self._parameters],
        )


class ModuleTemplate(OfModule):
    """The template of a module's state dict."""

    def __init__(self, module: nn.Module, skeleton: StateDict, start: int) -> None:
        self._left_out = [part._non_persistent_buffers_set for part in module.modules()]
        super().__init__(module, start)
        self._skeleton = skeleton
        named = _named_tensors(module)
        self._tensors = [named[name] for name in skeleton.content]

    @staticmethod
    def fits(module: nn.Module, written: StateDict, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the state dict is one that torch's own methods make: all registered tensors, and nothing else."""
        if not has_usual_state_dict(module):
            return False
        named = _named_tensors(module)
        return len(tensors) == len(written.content) and all(
            name in named and _is_same(tensor, named[name])
            for name, tensor in zip(written.content, tensors, strict=True)
        )

    def _look(self) -> tuple[Sequence[object], ...]:
        return *super()._look(), list(map(len, self._left_out))

    def _fill(self, tensors: list[torch.Tensor], take: Take) -> StateDict:
        tensors += self._tensors
        return self._skeleton


class OptimizerTemplate(Template):
    """The template of an optimizer, valid while parameters and kinds of state are the same. Settings are copied each time."""

    def __init__(self, optimizer: torch.optim.Optimizer, skeleton: StateDict, start: int) -> None:
        super().__init__(start)
        self._skeleton = skeleton
        self._optimizer = optimizer
        self._stepped = stepped(optimizer)
        self._numbers = [group["params"] for group in skeleton.content["param_groups"]]
        self._kept = list(optimizer.state)
        self._values = _values(optimizer)
        self._known = self._look(self._values)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer, written: StateDict) -> bool:
        """Whether the state dict is one that torch's own methods make: a dict per parameter, and the settings of each group."""
        content = written.content
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer):
            return False
        if _has_hooks(optimizer) or list(content) != ["state", "param_groups"]:
            return False
        entries = list(optimizer.state.values())
        return (
            all(type(entry) is dict for entry in entries)
            and all(isinstance(value, torch.Tensor) or type(value) in PLAIN for value in _values(optimizer))
            and [list(entry) for entry in content["state"].values()] == [list(entry) for entry in entries]
            and [list(group) for group in content["param_groups"]]
            == [_names(group) for group in optimizer.param_groups]
        )

    def _is_current(self) -> bool:
        optimizer = self._optimizer
        if (
            _has_hooks(optimizer)
            or not same_objects(stepped(optimizer), self._stepped)
            or not same_objects(optimizer.state, self._kept)
        ):
            return False
        values = _values(optimizer)
        if self._look(values) != self._known:
            return False
        if not all(map(operator.is_, values, self._values)):
            for value in values:
                if isinstance(value, torch.Tensor):
                    check_supported(value, f"what {type(optimizer).__name__} keeps")
            self._values = values
        return True

    def _look(self, values: list[object]) -> tuple[list[object], ...]:
        optimizer = self._optimizer
        return (
            [len(group["params"]) for group in optimizer.param_groups],
            [name for entry in optimizer.state.values() for name in entry],
            [len(entry) for entry in optimizer.state.values()],
            list(map(type, values)),
            [value for value in values if type(value) in PLAIN],
        )

    def _fill(self, tensors: list[torch.Tensor], take: Take) -> StateDict:
        tensors += [value for value in self._values if isinstance(value, torch.Tensor)]
        groups = [
            {**map_tree(take, {name: group[name] for name in group if name != "params"}), "params": numbers}
            for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=True)
        ]
        return StateDict({"state": self._skeleton.content["state"], "param_groups": groups})


def has_usual_state_dict(module: nn.Module, with_extra: bool = False) -> bool:
    """Whether torch's own methods make the state dict, of registered tensors and, ``with_extra``, of extra state only."""
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

    own = (nn.Module._save_to_state_dict, DistributedDataParallel._save_to_state_dict)
    for part in module.modules():
        kind = type(part)
        if (
            kind.state_dict is not nn.Module.state_dict
            or kind._save_to_state_dict not in own
            or (has_extra_state(part) and not with_extra)
            or {"state_dict", "_save_to_state_dict"} & vars(part).keys()
            or part._state_dict_hooks
            or part._state_dict_pre_hooks
        ):
            return False
    return True


def has_extra_state(part: nn.Module) -> bool:
    """Whether a module's state dict has extra state of this part."""
    return type(part).get_extra_state is not nn.Module.get_extra_state or "get_extra_state" in vars(part)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all registered tensors, by their names in a state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    }


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory with the same shape; of other classes some have no memory to compare."""
    if type(one) is not torch.Tensor or type(other) not in (torch.Tensor, nn.Parameter):
        return False
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride(),
    )  # fmt: skip


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)


def _values(optimizer: torch.optim.Optimizer) -> list[object]:
    return [value for entry in optimizer.state.values() for value in entry.values()]


def _names(group: Iterable[str]) -> list[str]:
    """Return the names of a group's settings in the order that torch uses in a state dict."""
    return [*(name for name in group if name != "params"), "params"]
