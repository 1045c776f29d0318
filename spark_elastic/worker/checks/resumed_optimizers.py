"""Refuses a checkpoint whose optimizers and schedulers are of another class than those here, or step parameters in another order.

Torch takes over whatever state it is given. The state of an optimizer names neither its class nor its parameters: it goes by
their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.module_registers import stepped
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.snapshot import Stateful, find_objects, leaves
from spark_elastic.worker.state.structure import names_of_parameters, stepped_names
from spark_elastic.worker.state.switches import plain_name


class Stepper(TypedDict, total=False):
    """What a checkpoint says about an optimizer or a scheduler besides its state."""

    kind: str
    # For a scheduler that consists of others, the kinds of these.
    parts: list[str]
    # For an optimizer, the names of its parameters in each group; None for one that is in no module of the State.
    parameters: list[list[str | None]]


def describe_steppers(objects: Mapping[str, Stateful]) -> dict[str, Stepper]:
    """Describe the optimizers and schedulers among objects, by their places."""
    found: dict[str, Stepper] = {}
    names = names_of_parameters(objects)
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            kind = value.plain_class if isinstance(value, ZeroRedundancyOptimizer) else type(value)
            groups = [[each and plain_name(each) for each in group] for group in stepped_names(value, names)]
            found[name] = {"kind": _name_of(kind), "parameters": groups}
        elif isinstance(value, LRScheduler):
            found[name] = {"kind": _name_of(type(value)), "parts": list(_kinds_of_parts(value))}
    return found


def parts_of(scheduler: object) -> Sequence[LRScheduler]:
    """Return the schedulers that one of torch's consists of."""
    return scheduler._schedulers if isinstance(scheduler, (ChainedScheduler, SequentialLR)) else ()


def _kinds_of_parts(scheduler: LRScheduler) -> Iterator[str]:
    for part in parts_of(scheduler):
        yield _name_of(type(part))
        yield from _kinds_of_parts(part)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def check_steppers(live: Mapping[str, object], saved: Mapping[str, object], described: Mapping[str, Stepper]) -> None:
    """Raise ``SparkElasticError`` if the state of an optimizer or scheduler in ``saved`` cannot be that of the one in ``live``.

    A class of the user's may stand in for another. ``described``: those in ``saved``, as far as that is known.
    """
    kept, objects = dict(leaves(saved)), find_objects(live)
    steppers, names = describe_steppers(objects), names_of_parameters(objects)
    for name in steppers.keys() & described.keys():
        here, there = steppers[name], described[name]
        _check_kind(name, here["kind"], there["kind"])
        if here["kind"] == there["kind"] and "parts" in there:  # earlier releases have not noted them
            _check_parts(name, here.get("parts", []), there["parts"])
        optimizer = objects[name]
        if isinstance(optimizer, torch.optim.Optimizer) and not _is_empty(kept.get(name)):
            saved_names = [each for group in there.get("parameters", []) for each in group]
            own_names = [set(map(plain_name, names.get(id(parameter), ()))) for parameter in stepped(optimizer)]
            _check_order(name, own_names, saved_names, set().union(*(map(plain_name, each) for each in names.values())))


def _check_kind(name: str, here: str, saved: str) -> None:
    if here != saved and all(kind.startswith("torch.optim.") for kind in (here, saved)):
        ours, theirs = (kind.rpartition(".")[2] for kind in (here, saved))
        raise SparkElasticError(f"the saved state of state.{name} is that of {theirs}, and it is {ours} here")


def _check_parts(name: str, here: Sequence[str], saved: Sequence[str]) -> None:
    """Raise if a scheduler consists of others here."""
    if len(here) != len(saved):
        ours, theirs = (", ".join(kind.rpartition(".")[2] for kind in kinds) for kinds in (here, saved))
        raise SparkElasticError(f"state.{name} was saved with {theirs} in it, and has {ours} here")
    for number, (mine, kept) in enumerate(zip(here, saved, strict=True)):
        _check_kind(f"{name}._schedulers[{number}]", mine, kept)


def _check_order(place: str, here: Sequence[set[str]], saved: Sequence[str | None], known: set[str]) -> None:
    """Raise if a parameter here, with all of its names, is not the one in its place in what was saved, and that one is known."""
    for ours, theirs in zip(here, saved, strict=False):
        if theirs is not None and ours and theirs not in ours and theirs in known:
            raise SparkElasticError(
                f"the state of state.{place} goes by the order of its parameters, and was saved with {theirs} in the place of "
                f"{min(ours)}: let the model register its parts, or give the optimizer its parameters, in the order that they had"
            )


def _is_empty(kept: object) -> bool:
    """Whether nothing goes by the order of parameters."""
    content = kept.content if isinstance(kept, StateDict) else None
    return isinstance(content, Mapping) and not content.get("state") and len(content.get("param_groups", ())) < 2
