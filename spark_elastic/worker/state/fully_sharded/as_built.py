"""What ``build`` and ``shard`` have made, and what code has changed of it since.

The next generation begins with what they make again. So attributes of torch's own modules, such as the rate of a dropout, are
part of a commit, and other parts or parameters than theirs are refused. Only a part that holds nothing for a commit, such as an
activation or a loss, may be replaced: it begins anew as ``build`` makes it, unless the function sets it at its top.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from spark_elastic.checkpoint.skeleton import PLAIN
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.job import present_world
from spark_elastic.worker.module_registers import Registered
from spark_elastic.worker.state.structure import has_tensors, plain_attributes
from spark_elastic.worker.state.templates import has_extra_state

# By the names of parts, attributes with their values.
Attributes = dict[str, dict[str, object]]
# The commit that seals the generation, and the first one of the user's function.
_CHECKS_BEFORE_TRAINING = 2
_REMEDY = (
    "after the model was made, and the next generation would not have that: it begins with what build= and shard= make. Have "
    "them make all parts and parameters, and let a buffer say which of several parts is in use"
)


class AsBuilt:
    """The parts and parameters of a module, and the attributes of torch's own parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By name, all parts, as of the last check.
        self.parts = dict(module.named_modules())
        self._parameters = dict(module.named_parameters())
        self._dtypes = [parameter.dtype for parameter in self._parameters.values()]
        self._attributes = {name: plain_attributes(part) for name, part in self.parts.items() if _is_torchs(part)}
        self._note_registers()
        self._checks = 0
        self._has_warned = False

    def check(self) -> None:
        """Raise ``TrainingCodeError`` if a part or parameter was replaced, added or removed, or has another dtype now.

        A part that holds nothing for a commit, such as an activation, may be replaced. The next generation runs the function's
        top again, which comes before its first commit, so only what is replaced after that is warned of, once.
        """
        self._checks += 1
        if not self._registered.is_current() or self._registered.names != self._names:
            replaced = self._take_over()
            change = _first_change(self.parts, dict(self._module.named_modules())) or self._first_change_of_parameters()
            if change:
                raise TrainingCodeError(f"state.model.{change} {_REMEDY}")
            self._note_registers()
            self._warn_of(replaced)
        for (name, parameter), dtype in zip(self._parameters.items(), self._dtypes, strict=True):
            if parameter.dtype != dtype:
                raise TrainingCodeError(f"state.model.{name} has become {parameter.dtype} {_REMEDY}")

    def changed_attributes(self) -> Attributes:
        """Return the public attributes of torch's own parts that are plain and have other values now."""
        changed: Attributes = {}
        for name, before in self._attributes.items():
            now = vars(self.parts[name])
            for key, value in before.items():
                present = now.get(key, value)
                if present is not value and type(present) in PLAIN and present != value:
                    changed.setdefault(name, {})[key] = present
        return changed

    def set_attributes(self, kept: Mapping[str, Mapping[str, object]]) -> None:
        """Give the parts the attributes of a commit."""
        for name, values in kept.items():
            for key, value in values.items():
                setattr(self.parts[name], key, value)

    # ------------------------------------------------------------------ inside

    def _note_registers(self) -> None:
        self._registered = Registered(
            register for part in self.parts.values() for register in (part._modules, part._parameters)
        )
        self._names = self._registered.names

    def _take_over(self) -> list[str]:
        """Take parts that hold nothing for the ones that they have replaced; return the names of those that begin anew."""
        begin_anew = []
        for name, part in self._module.named_modules():
            before = self.parts.get(name, part)
            if before is part or _holds_something(before) or _holds_something(part):
                continue
            self.parts[name] = part
            if type(part) is not type(before):
                self._attributes.pop(name, None)
            if name not in self._attributes:
                begin_anew.append(name)
        return begin_anew

    def _first_change_of_parameters(self) -> str:
        change = _first_change(self._parameters, dict(self._module.named_parameters()))
        if change:
            for part in self.parts.values():
                if isinstance(part, FSDPModule):
                    part.reshard()  # after a forward without a backward, whole parameters are in the places of the divided ones
            change = _first_change(self._parameters, dict(self._module.named_parameters()))
        return change

    def _warn_of(self, replaced: Sequence[str]) -> None:
        world = present_world()
        is_training = self._checks > _CHECKS_BEFORE_TRAINING
        if replaced and is_training and not self._has_warned and world is not None and world.rank == 0:
            self._has_warned = True
            warnings.warn(
                f"state.model.{replaced[0]} was replaced in mid-training, and no commit keeps that: the next generation begins "
                "with the one that build= makes. Replace it at the top of the elastic function, or have build= make both, and "
                "let a buffer say which is in use",
                stacklevel=depth_of_user(),
            )


def _first_change(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Say which object was added, removed or replaced first; an empty string if all are the same."""
    for name in {**before, **now}:
        if name not in before:
            return f"{name} was added"
        if name not in now:
            return f"{name} was removed"
        if before[name] is not now[name]:
            return f"{name} was replaced"
    return ""


def _holds_something(part: nn.Module) -> bool:
    """Whether a commit has something of a part: parameters, buffers or extra state."""
    return has_tensors(part) or any(map(has_extra_state, part.modules()))


def _is_torchs(part: nn.Module) -> bool:
    """Whether a module is of a class of torch's. One that torch derives from a user's class, as ``fully_shard`` does, is not."""
    return all(kind is object or kind.__module__.startswith("torch.") for kind in type(part).__mro__)
