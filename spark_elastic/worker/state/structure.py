"""Structure: what models and optimizers consist of, apart from their tensors' values. It may change during training.

A newcomer runs the code above the elastic function, and so builds what the job began with. If survivors have since replaced a
module, grown an embedding, unfrozen a layer, changed a dropout's rate or added a parameter group, the rank that sends the state
also describes that change: the modules without their data, plain attributes, and the names of the parameters that each optimizer
steps. The newcomer follows the description before it loads; its own objects stay the same wherever they still fit. A change that
cannot be described is an error at the first commit after it.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from spark_elastic.checkpoint.skeleton import COMPILED, PLAIN
from spark_elastic.data.loader import TakesWorld, has_part
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.unsupported import check_is_shared
from spark_elastic.worker.module_registers import registers, stepped
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import Snapshot, Stateful

Objects = Mapping[str, Stateful]
# By the place of each object, the name of its class and a description of its parts.
Structure = dict[str, tuple[str, object]]
# The names of an optimizer's parameters, group by group.
Groups = list[list[str | None]]
# All names of each parameter, by its id.
Names = dict[int, list[str]]


@dataclass(frozen=True, slots=True)
class _ModuleStructure:
    """The parts of a module."""

    # What is only compared: shapes and the like of parameters and buffers.
    tensors: object
    # By the names of its parts, their classes, and what torch's own have in public attributes that are plain values, such as the
    # rate of a dropout. Those of users' classes may count what each rank has done.
    kinds: Mapping[str, str]
    attributes: Mapping[str, Mapping[str, object]]

    def replaced(self, first: object) -> list[str]:
        """Return the names of the parts that newcomers have, too, and that are of another class here."""
        if not isinstance(first, _ModuleStructure):
            return []
        return [name for name, kind in self.kinds.items() if first.kinds.get(name, kind) != kind]


def structure_of(objects: Objects) -> Structure:
    """Describe objects with a state dict, by their places: kinds, shapes, and the parameters of optimizers by name."""
    names = names_of_parameters(objects)
    return {place: (_kind(value), _parts(value, names)) for place, value in objects.items()}


def _parts(value: object, names: Names) -> object:
    if isinstance(value, torch.nn.Module):
        parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in value.named_parameters()]
        buffers = [(name, buffer.shape, buffer.dtype) for name, buffer in value.named_buffers()]
        parts = dict(_unwrapped(value).named_modules())
        kinds = {name: type(part).__qualname__ for name, part in parts.items()}
        torchs = {name: part for name, part in parts.items() if type(part).__module__.startswith("torch.")}
        return _ModuleStructure(
            (parameters, buffers), kinds, {name: plain_attributes(part) for name, part in torchs.items()}
        )
    if isinstance(value, torch.optim.Optimizer):
        return stepped_names(value, names)
    return None


def names_of_parameters(objects: Objects) -> Names:
    """Return all names of the parameters of the modules among objects, the names of their places first, by their ids."""
    names: Names = {}
    for name, parameter in _named_parameters(objects):
        names.setdefault(id(parameter), []).append(name)
    return names


def _named_parameters(objects: Objects) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for place, value in objects.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(remove_duplicate=False):
                yield f"{place}.{name}", parameter


def stepped_names(optimizer: torch.optim.Optimizer, names: Names) -> Groups:
    """Return a name of each parameter that an optimizer steps; None for one that is in no module of the State."""
    return [[names.get(id(parameter), [None])[0] for parameter in group["params"]] for group in optimizer.param_groups]


def check_loaders(objects: Objects, first: Places) -> None:
    """Raise ``TrainingCodeError`` for a loader of this package in the place of one with which the job began."""
    for place, value in objects.items():
        if has_part(value, TakesWorld) and first.at(place) is not None and not first.holds(value):
            raise TrainingCodeError(
                f"state.{place} is another loader than when the job began. It has not entered this world, and newcomers lack it: "
                "make all loaders above the elastic function, give each to the State under a name of its own, "
                "and leave them there"
            )


def tell(objects: Objects, first: Structure) -> bytes | None:
    """Describe to a newcomer what has changed since ``first``, the structure that it begins with; None if nothing has.

    Raises ``TrainingCodeError``, naming the place, if the change cannot be described.
    """
    now = structure_of(objects)
    changed = {place for place, parts in now.items() if _comparable(first.get(place)) != _comparable(parts)}
    replaced = {
        place: others
        for place, (_, parts) in now.items()
        if place in first and isinstance(parts, _ModuleStructure) and (others := parts.replaced(first[place][1]))
    }
    attributes = {
        place: found
        for place in now.keys() & first.keys()
        if (found := _changed_attributes(first[place][1], now[place][1]))
    }
    if not changed and not replaced and not attributes:
        return None
    names = names_of_parameters(objects)
    for place in changed:
        if place not in first:
            check_is_shared(objects[place], f"state.{place}")
            raise TrainingCodeError(
                f"state.{place}, a {type(objects[place]).__name__}, has come into the State after the job began, and a newcomer "
                "could not make one: give it to the State above the elastic function"
            )
        if first[place][0] != now[place][0]:
            raise TrainingCodeError(
                f"state.{place} was a {first[place][0]} when the job began and is a {now[place][0]}, which a newcomer could not "
                "make: give both to the State above the elastic function, under two names"
            )
        value = objects[place]
        if isinstance(value, torch.optim.Optimizer) and any(None in group for group in stepped_names(value, names)):
            raise TrainingCodeError(
                f"state.{place} steps new parameters that are in no module of the State, so a newcomer could not find them: "
                "give the module that holds them to the State"
            )
    modules: dict[str, bytes] = {}
    for place, value in objects.items():
        if isinstance(value, torch.nn.Module) and (place in changed or place in replaced):
            try:
                modules[place] = cloudpickle.dumps(_hollow(value, first[place][1]))
            except Exception as error:  # whatever the classes of its parts raise
                if place not in changed and not any(map(has_tensors, _parts_named(value, replaced[place]))):
                    continue  # the function may replace an activation on each rank
                raise TrainingCodeError(
                    f"state.{place} has changed since the job began, and the change cannot be told to a newcomer, so make it "
                    f"above the elastic function: {type(error).__name__}: {error}"
                ) from error
    if not changed and not modules and not attributes:
        return None
    optimizers = {
        place: stepped_names(value, names)
        for place, value in objects.items()
        if isinstance(value, torch.optim.Optimizer)
    }
    return pickle.dumps((modules, optimizers, attributes))


def follow(objects: Objects, told: bytes) -> None:
    """Give objects the structure that ``tell`` has described. New tensors have no values yet."""
    modules, optimizers, attributes = pickle.loads(told)
    for place, packed in modules.items():
        wrapped = objects[place]
        assert isinstance(wrapped, torch.nn.Module), place
        root = _unwrapped(wrapped)
        device = next((tensor.device for tensor in [*root.parameters(), *root.buffers()]), torch.device("cpu"))
        _graft(root, cloudpickle.loads(packed), device)
    for place, parts in attributes.items():
        model = objects[place]
        assert isinstance(model, torch.nn.Module), place
        named = dict(_unwrapped(model).named_modules())
        for name, values in parts.items():
            vars(named[name]).update(values)  # type: ignore[attr-defined]
    parameters = dict(_named_parameters(objects))
    for place, groups in optimizers.items():
        optimizer = objects[place]
        assert isinstance(optimizer, torch.optim.Optimizer), place
        wanted = [[parameters[name] for name in group] if None not in group else None for group in groups]
        for number, group in enumerate(wanted):
            if group is None:
                continue
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = group
            else:
                optimizer.param_groups.append({**optimizer.defaults, "params": group})
        del optimizer.param_groups[len(wanted) :]
        _forget_unstepped(optimizer)


def outline(objects: Sequence[Stateful]) -> list[int]:
    """Return a short list that changes when other objects are kept, or an optimizer's number of parameters changes."""
    groups = [
        len(group["params"])
        for value in objects
        if isinstance(value, torch.optim.Optimizer)
        for group in value.param_groups
    ]
    return [*map(id, objects), *groups]


def note_structure(snapshot: Snapshot, version: int) -> None:
    """Set a commit's ``put_back`` and ``outline``, unless they are those of this version of the templates already."""
    if snapshot.put_back is None or snapshot.version != version:
        assert snapshot.objects is not None
        modules = [value for value in snapshot.objects if isinstance(value, torch.nn.Module)]
        kinds = [type(part) for module in modules for part in module.modules()]
        shapes = [parameter.shape for module in modules for parameter in module.parameters()]
        snapshot.put_back = remember(snapshot.objects)
        snapshot.outline = [*outline(snapshot.objects), *kinds, *shapes]
        snapshot.version = version


def remember(objects: Sequence[Stateful]) -> Callable[[], None]:
    """Return a function that puts modules, tensors and parameter groups back into the places where they are now.

    It frees the state of parameters that optimizers no longer step.
    """
    modules = [
        (part, [dict(register) for register in registers(part)])
        for value in objects
        if isinstance(value, torch.nn.Module)
        for part in value.modules()
    ]
    groups = [
        (value, [(group, list(group["params"])) for group in value.param_groups])
        for value in objects
        if isinstance(value, torch.optim.Optimizer)
    ]

    def put_back() -> None:
        for part, kept in modules:
            for present, was in zip(registers(part), kept, strict=True):
                if _differ(present, was):
                    present.clear()
                    present.update(was)
        for optimizer, was_groups in groups:
            optimizer.param_groups[:] = [group for group, _ in was_groups]
            for group, parameters in was_groups:
                group["params"] = list(parameters)
            _forget_unstepped(optimizer)

    return put_back


def _forget_unstepped(optimizer: torch.optim.Optimizer) -> None:
    """Free the state of parameters that an optimizer does not step: ``state_dict()`` has no number for them, and fails."""
    present = set(stepped(optimizer))
    for parameter in [key for key in optimizer.state if isinstance(key, torch.Tensor) and key not in present]:
        del optimizer.state[parameter]


def _differ(present: Mapping[str, object], was: Mapping[str, object]) -> bool:
    """Whether other objects are registered now than were before."""
    return list(present) != list(was) or any(present[name] is not was[name] for name in was)


# ------------------------------------------------------------------ inside


def _kind(value: object) -> str:
    if isinstance(value, ZeroRedundancyOptimizer):
        return f"{type(value).__qualname__} of {value.plain_class.__qualname__}"
    kind = type(_unwrapped(value)) if isinstance(value, torch.nn.Module) else type(value)
    return kind.__qualname__


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside its wrappers, which each worker makes for itself."""
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif hasattr(module, COMPILED):
            module = getattr(module, COMPILED)
        else:
            return module


def _comparable(described: tuple[str, object] | None) -> object:
    if described is not None and isinstance(described[1], _ModuleStructure):
        return described[0], described[1].tensors
    return described


def _parts_named(module: torch.nn.Module, names: Sequence[str]) -> list[torch.nn.Module]:
    parts = dict(_unwrapped(module).named_modules())
    return [parts[name] for name in names]


def has_tensors(module: torch.nn.Module) -> bool:
    """Whether a module or a part of it has parameters or buffers."""
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def plain_attributes(part: torch.nn.Module) -> dict[str, object]:
    """Return the public attributes of a module that are plain values, such as the rate of a dropout."""
    return {
        name: value
        for name, value in vars(part).items()
        if type(value) in PLAIN and not name.startswith("_") and name != "training"  # a commit has that
    }


def _changed_attributes(first: object, now: object) -> dict[str, dict[str, object]]:
    """Return the attributes of parts that have other values now, by the names of the parts."""
    if not isinstance(first, _ModuleStructure) or not isinstance(now, _ModuleStructure):
        return {}
    found = {
        part: {name: value for name, value in values.items() if name in before and before[name] != value}
        for part, values in now.attributes.items()
        if (before := first.attributes.get(part)) is not None
    }
    return {part: values for part, values in found.items() if values}


def _hollow(module: torch.nn.Module, first: object) -> torch.nn.Module:
    """Copy the user's module with tensors that have shapes and no data, and with the hooks of parts that newcomers lack."""
    plain = _unwrapped(module)
    known: dict[int, object] = {}
    for name, part in plain.named_modules():
        if isinstance(first, _ModuleStructure) and first.kinds.get(name) == type(part).__qualname__:
            hooks = (value for key, value in vars(part).items() if "_hooks" in key and isinstance(value, dict))
            known.update((id(value), OrderedDict()) for value in hooks)
    for parameter in plain.parameters():
        empty = torch.empty_like(parameter, device="meta")
        known[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in plain.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(plain, known)


def _graft(live: torch.nn.Module, told: torch.nn.Module, device: torch.device) -> None:
    """Give a module the structure of another, keeping those of its parts that fit."""
    children: dict[str, torch.nn.Module | None] = {}
    for name, child in told._modules.items():
        mine = live._modules.get(name)
        if child is None:
            children[name] = None
        elif mine is None or type(mine).__qualname__ != type(child).__qualname__:
            children[name] = child.to_empty(device=device) if has_tensors(child) else child
        else:
            _graft(_unwrapped(mine), _unwrapped(child), device)
            children[name] = mine
    live._modules.clear()
    live._modules.update(children)
    has_changed = False
    for mine_by_name, told_by_name in ((live._parameters, told._parameters), (live._buffers, told._buffers)):
        tensors: dict[str, Any] = {}  # holds parameters in the first round of the loop, and buffers in the second
        for name, wanted in told_by_name.items():
            mine_tensor = mine_by_name.get(name)
            if wanted is None:
                tensors[name] = None
            elif mine_tensor is None:
                empty = torch.empty_like(wanted, device=device)
                is_parameter = isinstance(wanted, torch.nn.Parameter)
                tensors[name] = torch.nn.Parameter(empty, wanted.requires_grad) if is_parameter else empty
                has_changed = True
            else:
                has_changed |= reshape(mine_tensor, wanted)
                if isinstance(wanted, torch.nn.Parameter):
                    mine_tensor.requires_grad_(wanted.requires_grad)
                tensors[name] = mine_tensor
        mine_by_name.clear()
        mine_by_name.update(tensors)
    if has_changed:  # num_embeddings, out_features …
        vars(live).update({name: value for name, value in vars(told).items() if type(value) in PLAIN})


def reshape(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Give a tensor the shape and dtype of another, without values. Return whether they differed."""
    if (tensor.shape, tensor.dtype) == (like.shape, like.dtype):
        return False
    tensor.grad = None
    tensor.data = torch.empty(like.shape, dtype=like.dtype, device=tensor.device)
    return True
