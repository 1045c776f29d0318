"""Resumed settings: settings of optimizers and schedulers in a script that a checkpoint replaces by the job's earlier ones.

So a job continues as if nothing had happened, but a script that was edited in the meantime keeps training with the old learning
rate. No code can know which of the two is meant, so this is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.worker.state.snapshot import KeptPart, find_objects, leaves

# Settings of optimizer groups that schedulers change. The original rate is in ``initial_lr``.
_SCHEDULED = {"lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum"}
# Attributes of schedulers that record progress.
_COUNTED = {"base_lrs", "best", "cooldown_counter", "last_epoch", "num_bad_epochs", "T_cur", "T_i"}
_COMPARED = (bool, int, float, str, tuple, list)

Setting = tuple[str, object, object]  # its name, the value here, and the saved value


def replaced_settings(live: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Describe the settings of optimizers and schedulers in ``live`` that differ in ``saved``, the objects of a checkpoint."""
    is_scheduled = any(isinstance(value, LRScheduler) for value in live.values())
    found = []
    for name, value in live.items():
        kept = saved.get(name)
        if isinstance(kept, StateDict) and isinstance(kept.content, Mapping):
            found += [
                f"state.{name} has {setting}={theirs!r} as saved, not {ours!r} as given here"
                for setting, ours, theirs in _settings(value, kept.content, is_scheduled)
                if isinstance(ours, _COMPARED) and isinstance(theirs, _COMPARED) and ours != theirs
            ]
    return found


def dropped_objects(live: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Describe the objects in ``live`` with a state dict that go, because a checkpoint has nothing or a plain value there.

    Names that the checkpoint does not know at all are left alone, and so are their objects.
    """
    kept = {name for name, value in leaves(saved) if isinstance(value, (StateDict, KeptPart))}
    return [
        f"state.{name}, here {type(value).__name__}"
        for name, value in find_objects(live).items()
        if name.partition("[")[0] in saved and name not in kept
    ]


def _settings(value: object, kept: Mapping[str, object], is_scheduled: bool) -> Iterator[Setting]:
    if isinstance(value, torch.optim.Optimizer):
        groups = kept.get("param_groups")
        if isinstance(groups, list) and len(groups) == len(value.param_groups):
            left_out = {"params", "fused", "foreach"} | (_SCHEDULED if is_scheduled else set())
            for here, there in zip(value.param_groups, groups, strict=True):
                yield from ((key, here[key], there[key]) for key in here.keys() & there.keys() - left_out)
    elif isinstance(value, LRScheduler):
        here = value.state_dict()
        yield from (
            (key, here[key], kept[key]) for key in here.keys() & kept.keys() - _COUNTED if not key.startswith("_")
        )
