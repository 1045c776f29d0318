"""Which parameters of a module require gradients, as part of what a commit keeps.

A layer that begins to train in mid-job does so on newcomers, and in the job that goes on from a checkpoint, too; and what was
changed after the last commit is taken back with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# In the ``_metadata`` of the state dict that a commit keeps of a module.
_MARK = "frozen"
# Stands in the names of parameters where ``torch.compile`` has wrapped a module.
COMPILED = "_orig_mod."


def frozen_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradients."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Have these parameters, and no others, require no gradients."""
    frozen = {name.replace(COMPILED, "") for name in names}
    for name, parameter in module.named_parameters():
        requires_grad = name.replace(COMPILED, "") not in frozen
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def note_frozen(module: torch.nn.Module, state_dict: Any) -> None:
    """Write the names into a state dict that was just made of the module."""
    facts = getattr(state_dict, "_metadata", {}).get("")
    if facts is not None:
        facts[_MARK] = frozen_names(module)


def freeze_as_noted(module: torch.nn.Module, state_dict: Any) -> None:
    """Freeze what was frozen when the state dict was kept, if it says so."""
    names = getattr(state_dict, "_metadata", {}).get("", {}).get(_MARK)
    if names is not None:
        freeze(module, names)
