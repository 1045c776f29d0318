"""Which parameters of wrapped models are trained: checked quickly at every forward, and compared by all ranks after changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spark_elastic.errors import RanksDifferError
from spark_elastic.worker.module_registers import Registered, same_objects
from spark_elastic.worker.world import World, translated_errors

if TYPE_CHECKING:
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel


class Content:
    """The parameters of a module that require gradients, with a quick check whether that has changed."""

    def __init__(self, module: nn.Module) -> None:
        self._registered = Registered(
            register for part in module.modules() for register in (part._parameters, part._modules)
        )
        self._parameters = list(module.parameters())
        self._facts = self._look()
        self.trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        # Torch's wrapper allocates buckets of these dtypes on these devices. ``model.double()`` and ``model.to(device)`` change
        # them and keep the parameters' identities.
        self.dtypes = [parameter.dtype for parameter in self.trainable]
        self.devices = [parameter.device for parameter in self.trainable]

    def is_current(self) -> bool:
        """Whether all parts are the same objects as before, and the same parameters require gradients."""
        return self._registered.is_current() and self._look() == self._facts

    def is_trained_as(self, reduced: Content | None) -> bool:
        """Whether the same parameters are trained as in ``reduced``, in the same dtypes. Ranks have to agree on that."""
        return reduced is not None and same_objects(reduced.trainable, self.trainable) and reduced.dtypes == self.dtypes

    def is_where(self, reduced: Content | None) -> bool:
        """Whether the parameters are on the devices on which they were in ``reduced``. That is each rank's own affair."""
        return reduced is not None and reduced.devices == self.devices

    def _look(self) -> list[tuple[torch.dtype, torch.device] | None]:
        return [
            (parameter.dtype, parameter.device) if parameter.requires_grad else None for parameter in self._parameters
        ]


def check_agreement(models: Sequence[DistributedDataParallel], world: World) -> None:
    """Compare among all ranks which parameters of some models require gradients. A collective, which waits for all ranks.

    Raises ``RanksDifferError`` on all ranks if they differ, and ``WorkerLostError``. Nothing of it is pending when this returns:
    user code may fork next, as a loader with workers does, and Gloo's thread takes locks of the C library in a process's first
    collective, which the fork would hold for ever.
    """
    names = [f"{type(model.module).__name__}.{name}" for model in models for name in [*_reduced_names(model), ""]]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    everybody = [torch.zeros_like(mine) for _ in range(world.size)]
    with translated_errors(world):
        dist.all_gather(everybody, mine)
        if len({int(each) for each in everybody}) == 1:
            return
        lists: list[list[str]] = [[] for _ in range(world.size)]
        dist.all_gather_object(lists, names)
    first = next((name for each in lists for name in each if not all(name in other for other in lists)), names[0])
    holders = [rank for rank, each in enumerate(lists) if first in each]
    raise RanksDifferError(
        f"{first} requires a gradient on ranks {holders} only, of {world.size}; change requires_grad on all ranks at the "
        "same step, and again according to the State when the elastic function is entered again"
    )


def _reduced_names(model: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that require gradients, on which all ranks have to agree."""
    return [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]


def describe_change(module: nn.Module, reduced: Content | None) -> str:
    """Name the first parameter that has begun or ceased to require a gradient, or has another dtype than in ``reduced``."""
    before = {} if reduced is None else dict(zip(map(id, reduced.trainable), reduced.dtypes, strict=True))
    named = [(f"{type(module).__name__}.{name}", parameter) for name, parameter in module.named_parameters()]
    for name, parameter in named:
        if parameter.requires_grad and id(parameter) not in before:
            return f"{name} began to require a gradient, or was replaced,"
    for name, parameter in named:
        if not parameter.requires_grad and id(parameter) in before:
            return f"{name} ceased to require a gradient"
    for name, parameter in named:
        if parameter.requires_grad and before[id(parameter)] != parameter.dtype:
            return f"{name} became {parameter.dtype}"
    return f"parameters of {type(module).__name__} were removed"
