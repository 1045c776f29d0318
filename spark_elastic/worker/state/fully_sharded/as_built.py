"""What ``build`` and ``shard`` have made, and what code has changed of it since.

The next generation begins with what they make again. So attributes of torch's own modules, such as the rate of a dropout, are
part of a commit, and other parts or parameters than theirs are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.state.structure import plain_attributes

# By the names of parts, attributes with their values.
Attributes = dict[str, dict[str, object]]
_REMEDY = (
    "after the model was made, and the next generation would not have that: it begins with what build= and shard= make. Have "
    "them make all parts and parameters, and let a buffer say which of several parts is in use"
)


class AsBuilt:
    """The parts and parameters of a module, and the attributes of torch's own parts, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = dict(module.named_modules())
        self._parameters = dict(module.named_parameters())
        self._dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        self._attributes = {name: plain_attributes(part) for name, part in self._parts.items() if _is_torchs(part)}

    def check(self) -> None:
        """Raise ``TrainingCodeError`` if a part or parameter was replaced, added or removed, or has another dtype now."""
        change = _first_change(self._parts, dict(self._module.named_modules()))
        if not change and _first_change(self._parameters, dict(self._module.named_parameters())):
            for part in self._parts.values():
                if isinstance(part, FSDPModule):
                    part.reshard()  # after a forward without a backward, whole parameters are in the places of the divided ones
            change = _first_change(self._parameters, dict(self._module.named_parameters()))
        if not change:
            dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
            change = next((f"{name} has become {now}" for name, now in dtypes.items() if now != self._dtypes[name]), "")
        if change:
            raise TrainingCodeError(f"state.model.{change} {_REMEDY}")

    def changed_attributes(self) -> Attributes:
        """Return the public attributes of torch's own parts that are plain and have other values now."""
        changed: Attributes = {}
        for name, before in self._attributes.items():
            now = plain_attributes(self._parts[name])
            if now != before:
                changed[name] = {key: value for key, value in now.items() if key in before and before[key] != value}
        return changed

    def set_attributes(self, kept: Mapping[str, Mapping[str, object]]) -> None:
        """Give the parts the attributes of a commit."""
        for name, values in kept.items():
            for key, value in values.items():
                setattr(self._parts[name], key, value)


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


def _is_torchs(part: nn.Module) -> bool:
    """Whether a module is of a class of torch's. One that torch derives from a user's class, as ``fully_shard`` does, is not."""
    return all(kind is object or kind.__module__.startswith("torch.") for kind in type(part).__mro__)
