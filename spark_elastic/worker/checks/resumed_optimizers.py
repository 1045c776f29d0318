"""Refuses a checkpoint whose optimizers and schedulers are of another class than those here, or had another order of parameters.

Torch takes over whatever state it is given. The state of an optimizer names neither the class nor its parameters: it goes by
their order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.module_registers import stepped
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import find_objects, leaves
from spark_elastic.worker.state.switches import plain_name
from spark_elastic.worker.zero import ZeroRedundancyOptimizer


def kinds_of(places: Places) -> dict[str, str]:
    """Name the classes of the optimizers and schedulers in a State, by their places."""
    found = {}
    for name, value in places.kept():
        if isinstance(value, (torch.optim.Optimizer, LRScheduler)):
            kind = value.plain_class if isinstance(value, ZeroRedundancyOptimizer) else type(value)
            found[name] = f"{kind.__module__}.{kind.__qualname__}"
    return found


def check_optimizers(live: Mapping[str, object], saved: Mapping[str, object], kinds: Mapping[str, str]) -> None:
    """Raise ``SparkElasticError`` if the state of an optimizer or scheduler in ``saved`` cannot be that of the one in ``live``.

    ``kinds``: the classes that they had, as far as they are known. A class of the user's may stand in for another.
    """
    here = kinds_of(Places(live))
    for name, kind in here.items():
        kept = kinds.get(name, kind)
        if kept != kind and all(each.startswith("torch.optim.") for each in (kept, kind)):
            kept, kind = kept.rpartition(".")[2], kind.rpartition(".")[2]
            raise SparkElasticError(f"the saved state of state.{name} is that of {kept}, and it is {kind} here")
    kept_dicts = {name: kept for name, kept in leaves(saved) if isinstance(kept, StateDict)}
    objects = find_objects(live)
    for name, module in objects.items():
        kept_dict = kept_dicts.get(name)
        if isinstance(module, torch.nn.Module) and kept_dict is not None and isinstance(kept_dict.content, Mapping):
            order = {plain_name(str(key)): place for place, key in enumerate(kept_dict.content)}
            for optimizer in here.keys() & kept_dicts.keys():
                _check_order(name, module, optimizer, objects[optimizer], order)


def _check_order(name: str, module: torch.nn.Module, place: str, optimizer: object, order: Mapping[str, int]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    names = {id(parameter): plain_name(key) for key, parameter in module.named_parameters()}
    here = [names[id(parameter)] for parameter in stepped(optimizer) if id(parameter) in names]
    registered = [key for key in names.values() if key in set(here)]
    if here != registered or not order.keys() >= set(here):
        return  # its order is not the module's, or the module is another one
    saved = sorted(here, key=order.__getitem__)
    for mine, theirs in zip(here, saved, strict=True):
        if mine != theirs:
            raise SparkElasticError(
                f"state.{name} had {theirs} before {mine} when it was saved, and has it after that here, and the state of "
                f"state.{place} goes by the order of parameters: let the model register its parts in the order that it had"
            )
