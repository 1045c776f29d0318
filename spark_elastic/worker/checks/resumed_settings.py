"""Resumed settings: settings of optimizers and schedulers in a script that a checkpoint replaces by the job's earlier ones.

So a job continues as if nothing had happened, but a script that was edited in the meantime keeps training with the old learning
rate. No code can know which of the two is meant, so this is a warning. Only what a scheduler that is new to the job has prepared
is put back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.worker.checks.resumed_optimizers import parts_of
from spark_elastic.worker.state.snapshot import KeptPart, find_objects, leaves

# Settings of optimizer groups that schedulers change. The original rate is in ``initial_lr``, which they set when they are made.
_SCHEDULED = {"lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_PREPARED = _SCHEDULED | {"initial_lr"}
# Attributes of schedulers that record progress, or have objects of the user's that may.
_COUNTED = {"lr_lambdas", "base_lrs", "best", "cooldown_counter", "last_epoch", "num_bad_epochs", "T_cur", "T_i"}
_COMPARED = (bool, int, float, str, tuple, list, type(None))

Setting = tuple[str, object, object]  # its name, the value here, and the saved value


def replaced_settings(live: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Describe the settings of optimizers and schedulers in ``live`` that differ in ``saved``, the objects of a checkpoint."""
    schedulers, new_schedulers = _schedulers(live, saved)
    known = {value.optimizer: name for name, value in schedulers.items()}
    new = {value.optimizer for value in new_schedulers.values()} - known.keys()
    found = [
        f"state.{name} is new to it and goes on from the rate that state.{known[value.optimizer]} has there: one that it has "
        "set as it was made, such as the first of a warm-up, is gone"
        for name, value in new_schedulers.items()
        if value.optimizer in known
        if any(group["lr"] != group.get("initial_lr", group["lr"]) for group in value.optimizer.param_groups)
    ]
    contents = {name: kept.content for name, kept in leaves(saved) if isinstance(kept, StateDict)}
    objects = find_objects(live)
    places = {id(value): name for name, value in reversed(objects.items())}
    for name, value in objects.items():
        kept = contents.get(name)
        if isinstance(kept, Mapping) and places[id(value)] == name:
            found += [
                f"state.{name} has {setting}={theirs!r} as saved, not {ours!r} as given here"
                for setting, ours, theirs in map(_plain, _settings(value, kept))
                if isinstance(ours, _COMPARED) and isinstance(theirs, _COMPARED) and _differ(ours, theirs)
                if not (value in known and setting in _SCHEDULED) and not (value in new and setting in _PREPARED)
            ]
    return found


class PreparedGroups:
    """What schedulers that a checkpoint does not know have prepared in an optimizer's groups, such as the first step's rate.

    Loading the optimizer replaces it by what its groups had without them, and drops settings of the schedulers' own.
    """

    def __init__(self, live: Mapping[str, object], saved: Mapping[str, object]) -> None:
        """Take it from the objects here, before those of the checkpoint are loaded."""
        known, new = ({value.optimizer for value in schedulers.values()} for schedulers in _schedulers(live, saved))
        self._settings = [
            (optimizer, [{key: group[key] for key in group.keys() - {"params"}} for group in optimizer.param_groups])
            for optimizer in new - known
        ]

    def put_back(self) -> None:
        """Set it again in the optimizers' groups."""
        for optimizer, prepared in self._settings:
            for group, settings in zip(optimizer.param_groups, prepared, strict=True):
                group.update({key: settings[key] for key in settings if key in _PREPARED or key not in group})


def dropped_objects(live: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Describe the objects in ``live`` with a state dict that go, because a checkpoint has nothing or a plain value there.

    Names that the checkpoint does not know at all are left alone, and so are their objects.
    """
    kept = _kept_objects(saved)
    return [
        f"state.{name}, here {type(value).__name__}"
        for name, value in find_objects(live).items()
        if name.partition("[")[0] in saved and name not in kept
    ]


def _kept_objects(saved: Mapping[str, object]) -> set[str]:
    return {name for name, value in leaves(saved) if isinstance(value, (StateDict, KeptPart))}


def _schedulers(
    live: Mapping[str, object], saved: Mapping[str, object]
) -> tuple[dict[str, LRScheduler], dict[str, LRScheduler]]:
    """Return the schedulers that a checkpoint knows, and those that it does not, by name. Users' own may have no optimizer.

    A new one that waits for a plateau is left out: it prepares nothing, and goes on from the rate that it finds.
    """
    kept = _kept_objects(saved)
    schedulers = {
        name: value
        for name, value in find_objects(live).items()
        if isinstance(value, LRScheduler) and hasattr(value, "optimizer")
    }
    known = {name: value for name, value in schedulers.items() if name in kept}
    new = {name: value for name, value in schedulers.items() if not isinstance(value, ReduceLROnPlateau)}
    return known, {name: value for name, value in new.items() if name not in known}


def _plain(setting: Setting) -> Setting:
    """Return it with numbers in place of tensors of one, and lists in place of counters, as schedulers have of milestones."""
    name, *values = setting
    ours, theirs = map(_plain_value, values)
    return name, ours, theirs


def _plain_value(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return sorted(value.elements()) if isinstance(value, Counter) else value


def _differ(ours: object, theirs: object) -> bool:
    """Whether two values are different ones. A tensor holds a number less precisely than a setting."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return not math.isclose(ours, theirs, rel_tol=1e-6)
    with suppress(RuntimeError, TypeError, ValueError):
        return bool(ours != theirs)
    return False  # they have something in them that cannot be compared, such as tensors


def _settings(value: object, kept: Mapping[str, object]) -> Iterator[Setting]:
    if isinstance(value, torch.optim.Optimizer):
        groups = kept.get("param_groups")
        if isinstance(groups, list) and len(groups) == len(value.param_groups):
            left_out = {"params", "fused", "foreach"}
            for here, there in zip(value.param_groups, groups, strict=True):
                yield from ((key, here[key], there[key]) for key in here.keys() & there.keys() - left_out)
    elif isinstance(value, LRScheduler):
        here = value.state_dict()
        yield from (
            (key.lstrip("_"), here[key], kept[key])
            for key in here.keys() & kept.keys() - _COUNTED
            if not key.startswith("_") or key == "_milestones"
            if here[key] is not None and kept[key] is not None  # it may have been set in training
        )
        parts = zip(parts_of(value), kept.get("_schedulers") or (), strict=False)  # type: ignore[call-overload]
        for number, (part, of_part) in enumerate(parts):
            yield from ((f"schedulers[{number}].{key}", ours, theirs) for key, ours, theirs in _settings(part, of_part))
