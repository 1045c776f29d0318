"""Refuses a checkpoint whose optimizers and schedulers are of another class than those here, or step parameters in another order.

Torch takes over whatever state it is given. The state of an optimizer names neither its class nor its parameters: it goes by
their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.snapshot import Stateful, find_objects, leaves
from spark_elastic.worker.state.structure import names_of_parameters, stepped_names
from spark_elastic.worker.state.switches import plain_name
from spark_elastic.worker.zero import ZeroRedundancyOptimizer


class Stepper(TypedDict, total=False):
    """What a checkpoint says about an optimizer or a scheduler besides its state."""

    kind: str
    # For an optimizer, the names of its parameters in each group; None for one that is in no module of the State.
    parameters: list[list[str | None]]


def describe_steppers(objects: Mapping[str, Stateful]) -> dict[str, Stepper]:
    """Describe the optimizers and schedulers among objects, by their places."""
    found: dict[str, Stepper] = {}
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            kind = value.plain_class if isinstance(value, ZeroRedundancyOptimizer) else type(value)
            groups = [[each and plain_name(each) for each in group] for group in stepped_names(value, objects)]
            found[name] = {"kind": f"{kind.__module__}.{kind.__qualname__}", "parameters": groups}
        elif isinstance(value, LRScheduler):
            found[name] = {"kind": f"{type(value).__module__}.{type(value).__qualname__}"}
    return found


def check_steppers(live: Mapping[str, object], saved: Mapping[str, object], described: Mapping[str, Stepper]) -> None:
    """Raise ``SparkElasticError`` if the state of an optimizer or scheduler in ``saved`` cannot be that of the one in ``live``.

    A class of the user's may stand in for another. ``described``: those in ``saved``, as far as that is known.
    """
    kept, objects = dict(leaves(saved)), find_objects(live)
    steppers = describe_steppers(objects)
    for name in steppers.keys() & described.keys():
        _check_kind(name, steppers[name]["kind"], described[name]["kind"])
        here, there = _flat(steppers[name]), _flat(described[name])
        if here != there and len(here) == len(there) and not _is_empty(kept.get(name)):
            _check_order(name, here, there, objects)


def _check_kind(name: str, here: str, saved: str) -> None:
    if here != saved and all(kind.startswith("torch.optim.") for kind in (here, saved)):
        ours, theirs = (kind.rpartition(".")[2] for kind in (here, saved))
        raise SparkElasticError(f"the saved state of state.{name} is that of {theirs}, and it is {ours} here")


def _check_order(name: str, here: list[str], saved: list[str], objects: Mapping[str, Stateful]) -> None:
    known = {plain_name(each) for each in names_of_parameters(objects)}
    if not known.issuperset(saved):
        return  # a model has other names here, which it says when it is loaded
    ours, theirs = next((ours, theirs) for ours, theirs in zip(here, saved, strict=True) if ours != theirs)
    raise SparkElasticError(
        f"the state of state.{name} goes by the order of its parameters, and was saved with {theirs} in the place of {ours}: let "
        "the model register its parts, or give the optimizer its parameters, in the order that they had"
    )


def _flat(stepper: Stepper) -> list[str]:
    return [str(name) for group in stepper.get("parameters", []) for name in group]


def _is_empty(kept: object) -> bool:
    """Whether nothing goes by the order of parameters."""
    content = kept.content if isinstance(kept, StateDict) else None
    return isinstance(content, Mapping) and not content.get("state") and len(content.get("param_groups", ())) < 2
