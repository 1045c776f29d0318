"""Loading a kept state into live objects, in place where that is possible: no second copy of a large state is made."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.snapshot import PLAIN, cloned, map_tree


def load_state_dict(target: Any, kept: Any) -> None:
    """Set ``target`` to a kept state dict, whose tensors stay the keeper's, and clear gradients.

    Modules copy from it; optimizers would take its tensors for their own, so theirs are overwritten where they have the same
    shape, and get clones elsewhere. Raises what ``target.load_state_dict`` raises.
    """
    if isinstance(target, torch.optim.Optimizer):
        if not _overwrite(target, kept):
            target.load_state_dict(cloned(kept))
        target.zero_grad(set_to_none=True)
    elif isinstance(target, torch.nn.Module):
        has_extra_state = any(str(name).endswith("_extra_state") for name in kept)
        target.load_state_dict(cloned(kept) if has_extra_state else kept)
        target.zero_grad(set_to_none=True)
    else:
        target.load_state_dict(cloned(kept))
        if isinstance(target, torch.amp.GradScaler):
            # Not part of its state dict: that step() has been called, and update() not yet.
            target._per_optimizer_states.clear()


def fits(present: Any, value: Any) -> bool:
    """Whether a kept tensor can be copied into the present one, which others may hold, too; it may be kept on another device."""
    return (
        isinstance(present, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (present.shape, present.dtype) == (value.shape, value.dtype)
    )


def _overwrite(optimizer: torch.optim.Optimizer, kept: Any) -> bool:
    """Copy a kept state into the tensors of an optimizer. Return False, with nothing changed, where they do not match."""
    live = optimizer.state_dict()
    if set(kept) != {"state", "param_groups"} or set(live) != set(kept):
        return False
    if [group["params"] for group in live["param_groups"]] != [group["params"] for group in kept["param_groups"]]:
        return False
    targets, sources = _tensors(live["state"]), _tensors(kept["state"])
    if _without_tensors(live["state"]) != _without_tensors(kept["state"]) or not all(map(fits, targets, sources)):
        return False
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    for group, settings in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in cloned(settings).items() if name != "params"})
    return True


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tree(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, tree)
    return found


def _without_tensors(tree: Any) -> Any:
    """What has to be equal beside the tensors; what cannot be compared is equal to nothing."""

    def comparable(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "a tensor"
        return value if type(value) in PLAIN else object()

    return map_tree(comparable, tree)
