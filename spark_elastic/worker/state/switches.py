"""What is switched on a module beside its tensors, as part of what a commit keeps: requires_grad, and train() or eval().

A layer that begins to train in mid-job does so on newcomers, and in the job that goes on from a checkpoint, too; and what was
changed after the last commit is taken back with it: a model that was being evaluated when a worker was lost trains again.
"""

from __future__ import annotations

from typing import Any

import torch

# Under these in the ``_metadata`` of the state dict that a commit keeps of a module: names of parameters, and of modules.
_FROZEN = "frozen"
_EVALUATING = "evaluating"
# Stands in names where ``torch.compile`` has wrapped a module.
_COMPILED = "_orig_mod"

Switches = dict[str, list[str]]


def switches_of(module: torch.nn.Module) -> Switches:
    """Return the names of the parameters that require no gradients, and of the modules that are not in training mode."""
    return {
        _FROZEN: [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        _EVALUATING: [name for name, part in module.named_modules() if not part.training],
    }


def switch(module: torch.nn.Module, noted: Switches) -> None:
    """Have these parameters, and no others, require no gradients, and these modules, and no others, be in evaluation mode.

    What is not noted, in a checkpoint of an older release, stays as it is.
    """
    if _FROZEN in noted:
        frozen = set(map(plain_name, noted[_FROZEN]))
        for name, parameter in module.named_parameters():
            requires_grad = plain_name(name) not in frozen
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
    if _EVALUATING in noted:
        evaluating = set(map(plain_name, noted[_EVALUATING]))
        for name, part in module.named_modules():
            # Not by train(), which goes on to the parts, and which users override.
            part.training = plain_name(name) not in evaluating


def note_switches(module: torch.nn.Module, state_dict: Any) -> None:
    """Write them into a state dict that was just made of the module."""
    facts = getattr(state_dict, "_metadata", {}).get("")
    if facts is not None:
        facts.update(switches_of(module))


def switch_as_noted(module: torch.nn.Module, state_dict: Any) -> None:
    """Set them as they were when the state dict was kept, if it says so."""
    switch(module, getattr(state_dict, "_metadata", {}).get("", {}))


def plain_name(name: str) -> str:
    """Name a part as it is called where nothing is compiled."""
    return ".".join(word for word in name.split(".") if word != _COMPILED) if _COMPILED in name else name
