"""Model, optimizer and scheduler of one generation, which the user's functions make and ``fully_shard`` divides.

``fully_shard`` cannot be undone, so nothing of it outlives its generation: the next one makes everything again, and fills it
with the rows of the last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.from_first import broadcast_from_first
from spark_elastic.worker.state.fully_sharded.as_built import AsBuilt
from spark_elastic.worker.state.fully_sharded.buffers import buffers_of, put_buffers_back
from spark_elastic.worker.state.fully_sharded.rows import bounds
from spark_elastic.worker.state.snapshot import cloned
from spark_elastic.worker.state.templates import has_extra_state


@dataclass(frozen=True, slots=True)
class Factories:
    """The user's functions that make the model, optimizer and scheduler of a generation."""

    build: Callable[[], nn.Module]
    shard: Callable[[nn.Module, DeviceMesh], object]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None


@dataclass(frozen=True, slots=True)
class Divided:
    """A tensor of which each rank has some rows: a parameter, or the optimizer's state of it under a key."""

    parameter: str
    key: str  # empty for the parameter itself
    shape: tuple[int, ...]
    dtype: torch.dtype

    def room(self, number: int, of: int) -> torch.Tensor:
        """Allocate room for one of its shards."""
        first, last = bounds(self.shape[0], number, of)
        return torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)


class ShardedModel:
    """Model, optimizer and scheduler of one generation. ``is_first``: nobody holds a commit, so rank 0's initial values count.

    With ``is_first``, the constructor is a collective that sends one parameter after the other.
    """

    def __init__(self, factories: Factories, mesh: DeviceMesh, is_first: bool) -> None:
        self._mesh = mesh
        with torch.random.fork_rng(devices=[]):  # a newly made model must not change what is drawn after a reset
            self.module = _built(factories.build)
            is_meta = _is_on_meta(self.module)
            if is_first and not is_meta:
                broadcast_from_first((*self.module.parameters(), *self.module.buffers()))
            names = _names(self.module)
            factories.shard(self.module, mesh)
            if len(_names(self.module)) != len(names):
                raise SparkElasticError(
                    f"shard= has parted what was one parameter ({_tell_tied(names)}); give fully_shard the modules that share it "
                    "in one call, fully_shard([one, other], mesh=mesh), or leave both to the last call"
                )
            self._parameters = dict(self.module.named_parameters())
            for name, parameter in self._parameters.items():
                self._check_parameter(name, parameter)
            if is_meta:
                self.module.to_empty(device="cpu")
                self._parameters = dict(self.module.named_parameters())
                if is_first:
                    self._initialise()
        self.optimizer = factories.optimizer(list(self._parameters.values()))
        self._check_optimizer()
        self._groups = len(self.optimizer.param_groups)
        self.scheduler = None if factories.scheduler is None else factories.scheduler(self.optimizer)
        if not isinstance(self.scheduler, LRScheduler | None):
            raise TypeError(f"scheduler= has to return a scheduler of torch.optim, not {type(self.scheduler).__name__}")
        self._as_built = AsBuilt(self.module)

    def divided(self) -> dict[Divided, torch.Tensor]:
        """Return this rank's rows of all divided tensors, uncopied, in the same order on all ranks."""
        found = {}
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                assert isinstance(parameter, DTensor), "this was checked when the model was made"
                found[Divided(name, "", tuple(parameter.shape), parameter.dtype)] = parameter.to_local()
                state = self.optimizer.state.get(parameter, {})
                for key in sorted(key for key, value in state.items() if isinstance(value, DTensor)):
                    value = state[key]
                    if value.shape != parameter.shape or value.placements != parameter.placements:
                        raise _not_by_rows(self.optimizer, key, name)
                    found[Divided(name, key, tuple(value.shape), value.dtype)] = value.to_local()
        return found

    def small(self) -> dict[str, object]:
        """Return what each rank keeps whole: buffers, the optimizer's settings and counters, and the scheduler's state.

        This includes the extra state of the module's parts (``get_extra_state``), which parameters are trained, which parts are
        in training mode, and what code has set in attributes of torch's own parts. Raises ``TrainingCodeError`` for parts and
        parameters that the next generation would not have.
        """
        self._as_built.check()
        parts = self._as_built.parts
        if len(self.optimizer.param_groups) != self._groups:
            raise SparkElasticError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, and optimizer= has made {self._groups}; "
                "make all of them there, as the optimizer of the next generation has no others"
            )
        state: dict[str, dict[str, object]] = {}
        for name, parameter in self._parameters.items():
            kept = {
                key: value
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if not isinstance(value, DTensor)
            }
            for key, value in kept.items():
                if isinstance(value, (list, tuple, dict)) or (isinstance(value, torch.Tensor) and value.numel() > 1):
                    raise _not_by_rows(self.optimizer, key, name)
            if kept:
                state[name] = kept
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {
            "buffers": buffers_of(parts),
            "groups": groups,
            "state": state,
            "scheduler": scheduler,
            "trained": {name: parameter.requires_grad for name, parameter in self._parameters.items()},
            "training": {name: part.training for name, part in parts.items()},
            "attributes": self._as_built.changed_attributes(),
            "extra": {name: part.get_extra_state() for name, part in parts.items() if has_extra_state(part)},
        }

    def prepare(self, small: Mapping[str, Any], divided: Sequence[Divided]) -> None:
        """Load what was kept whole, and make room for the divided tensors, whose rows have yet to arrive."""
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        parts = dict(self.module.named_modules())
        if (
            shapes != {part.parameter: (part.shape, part.dtype) for part in divided if not part.key}
            or parts.keys() != small["training"].keys()
        ):
            raise SparkElasticError(
                "build= has made a model whose parts or parameters have other names, shapes or dtypes than those of the last "
                "commit; it has to make the same model in each generation"
            )
        kept = cloned(small)
        put_buffers_back(self.module, kept["buffers"])
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(kept["trained"][name])
        for name, module in parts.items():
            module.training = kept["training"][name]
        self._as_built.set_attributes(kept["attributes"])
        for name, extra in kept.get("extra", {}).items():  # checkpoints of earlier releases have none
            parts[name].set_extra_state(extra)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(kept["scheduler"])
        # This comes last, because making a scheduler sets learning rates.
        for group, settings in zip(self.optimizer.param_groups, kept["groups"], strict=True):
            group.update(settings)
        for name, state in kept["state"].items():
            self.optimizer.state[self._parameters[name]] = dict(state)
        for part in divided:
            if part.key:
                parameter = self._parameters[part.parameter]
                self.optimizer.state[parameter][part.key] = torch.empty_like(parameter.detach(), dtype=part.dtype)

    def forget_group(self) -> None:
        """Release the process group, whose generation has ended.

        Torch's caches keep the mesh forever, and the mesh would keep the group, with some threads and all descriptors.
        """
        getattr(self._mesh, "_pg_registry", {}).clear()

    # ------------------------------------------------------------------ inside

    def _check_parameter(self, name: str, parameter: torch.Tensor) -> None:
        if not isinstance(parameter, DTensor):
            raise SparkElasticError(
                f"shard= has left {name} whole; call fully_shard(module, mesh=mesh) on the module itself after its parts, which "
                "divides all that is left"
            )
        if parameter.device_mesh != self._mesh or tuple(parameter.placements) != (Shard(0),):
            raise SparkElasticError(
                f"shard= has divided {name} as {parameter.placements} over {parameter.device_mesh}; a ShardedState takes "
                "parameters that are divided by rows over all ranks: give fully_shard the mesh that shard= gets, and no "
                "shard_placement_fn"
            )

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer= has to return a torch.optim.Optimizer, not {type(self.optimizer).__name__}")
        known = {id(parameter) for parameter in self._parameters.values()}
        if any(id(p) not in known for group in self.optimizer.param_groups for p in group["params"]):
            raise SparkElasticError(
                "optimizer= has to return an optimizer of the parameters that it gets, and no others; keep other models in a "
                "job of their own"
            )

    def _initialise(self) -> None:
        """Initialise a model that was built without values by ``reset_parameters`` on rank 0, module by module."""
        done: set[int] = set()  # a parameter of several modules gets the values of the first one
        for name, part in reversed(list(self.module.named_modules())):
            own = {key: p for key, p in part._parameters.items() if p is not None}
            buffers = {key: (buffer, buffer._version) for key, buffer in part._buffers.items() if buffer is not None}
            if all(id(p) in done for p in own.values()) and not buffers:
                continue
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if reset is None:
                raise SparkElasticError(
                    f"build= has made {name or 'the module'} on the meta device, and it has no method reset_parameters that "
                    "gives its parameters and buffers values; write one, or build it on the CPU"
                )
            whole = {
                key: nn.Parameter(torch.full(p.shape, torch.nan, dtype=p.dtype), p.requires_grad)
                for key, p in own.items()
            }
            part._parameters.update(whole)
            try:
                reset()
            finally:
                part._parameters.update(own)
            unset = [key for key, value in whole.items() if value.isnan().any()]
            unset += [
                key for key, (buffer, version) in buffers.items() if _is_untouched(part._buffers[key], buffer, version)
            ]
            if unset:
                raise SparkElasticError(
                    f"{reset.__name__} of {name or 'the module'} has given no values to {', '.join(unset)}, which build= has "
                    "made on the meta device; have it set all parameters and buffers of its own in place, or build the module on "
                    "the CPU"
                )
            broadcast_from_first((*(whole[key] for key in own), *(part._buffers[key] for key in buffers)))
            with torch.no_grad():
                for key, parameter in own.items():
                    assert isinstance(parameter, DTensor), "this was checked when the model was made"
                    if id(parameter) not in done:
                        first, last = bounds(parameter.shape[0], self._mesh.get_local_rank(), self._mesh.size())
                        parameter.to_local().copy_(whole[key][first:last])
                    done.add(id(parameter))


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    if not isinstance(module, nn.Module):
        raise TypeError(f"build= has to return a torch.nn.Module, not {type(module).__name__}")
    if any(
        isinstance(part, (DistributedDataParallel, nn.parallel.DistributedDataParallel)) for part in module.modules()
    ):
        raise SparkElasticError(
            "build= has to return a plain module: fully_shard averages the gradients itself, so leave DistributedDataParallel out"
        )
    return module


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a module was built without values. Raises ``SparkElasticError`` if a part of it was."""
    tensors = {name: tensor.is_meta for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    if any(tensors.values()) and not all(tensors.values()):
        name = next(name for name, is_meta in tensors.items() if not is_meta)
        raise SparkElasticError(
            f"build= has made {name} with values and other tensors on the meta device; make all of them in one of the two ways"
        )
    return any(tensors.values())


def _is_untouched(now: torch.Tensor | None, before: torch.Tensor, version: int) -> bool:
    """Whether a buffer is the same as before, and nothing has been written into it."""
    return now is before and before._version == version


def _names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter of a module; one that parts of the module share has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())


def _tell_tied(names: list[list[str]]) -> str:
    return "; ".join(" and ".join(of_one) for of_one in names if len(of_one) > 1)


def _not_by_rows(optimizer: torch.optim.Optimizer, key: str, name: str) -> SparkElasticError:
    return SparkElasticError(
        f"{type(optimizer).__name__} keeps {key} of {name}, which is not divided by rows as the parameter is, so a ShardedState "
        "cannot carry it over a reset; use an optimizer whose state has the shape of the parameters, as SGD and Adam do"
    )
