"""The switches of a module, which a commit keeps together with its tensors: requires_grad, and train() or eval().

A layer that begins to train in the middle of a job does so on newcomers, too, and in a job that resumes from a checkpoint. A
restore resets a switch that was changed after the last commit: a model that was being evaluated when a worker was lost trains
again.
"""

from __future__ import annotations

import torch

from spark_elastic.checkpoint.skeleton import COMPILED

# The keys, in the ``_metadata`` of the state dict that a commit keeps of a module, for names of parameters and of modules.
_FROZEN = "frozen"
_EVALUATING = "evaluating"

Switches = dict[str, list[str]]


def switches_of(module: torch.nn.Module) -> Switches:
    """Return the names of the parameters that require no gradients, and of the modules that are not in training mode."""
    return {
        _FROZEN: [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        _EVALUATING: [name for name, part in module.named_modules() if not part.training],
    }


def switch(module: torch.nn.Module, noted: Switches) -> None:
    """Freeze exactly the noted parameters, and put exactly the noted modules into evaluation mode.

    A checkpoint of an older release may lack either of the two notes; that switch is then left alone.
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
            # The attribute is set because train() would recurse into the parts, and because users override it.
            part.training = plain_name(name) not in evaluating


def note_switches(module: torch.nn.Module, state_dict: object) -> None:
    """Write the switches of a module into a state dict that was just made of it."""
    facts = getattr(state_dict, "_metadata", {}).get("")
    if facts is not None:
        facts.update(switches_of(module))


def switch_as_noted(module: torch.nn.Module, state_dict: object) -> None:
    """Set the switches of a module to what is noted in a kept state dict, if anything is."""
    switch(module, getattr(state_dict, "_metadata", {}).get("", {}))


def plain_name(name: str) -> str:
    """Return the name that a part would have if nothing were compiled."""
    return ".".join(word for word in name.split(".") if word != COMPILED) if COMPILED in name else name
