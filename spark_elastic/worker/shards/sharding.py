"""Sharding: lets the models of a State train on the shards of its loader, in one generation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.loader import shards_of_loader
from spark_elastic.errors import SparkElasticError, TrainingCodeError
from spark_elastic.worker.ddp.boundaries import tensors_given
from spark_elastic.worker.job import current_job
from spark_elastic.worker.module_registers import same_values
from spark_elastic.worker.shards.loops import HOW, loops
from spark_elastic.worker.shards.parts import Parts
from spark_elastic.worker.shards.sources import ModuleSources
from spark_elastic.worker.shards.workspace import Workspace
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel


class Sharding:
    """What the wrapped models of a State share if its loader was made with ``shards=``."""

    def __init__(self, models: Sequence[DistributedDataParallel], shards: int, world: World | None) -> None:
        loops.abandon()
        deliveries.trainer = threading.get_ident()
        self._models = list(models)
        self._shards = shards
        self._world = world
        self._sources = ModuleSources(self._models)
        self._workspaces: dict[int, Workspace] = {}
        for model in self._models:
            refuse(model, shards)

    def parts(self, model: DistributedDataParallel, batch: object) -> Parts:
        """Return the loop over the parts of a batch, which leaves gradients in all models that take part in it."""
        for each in self._models:
            each.follow_content()
        if not self._sources.is_current():
            before, self._sources = self._sources, ModuleSources(self._models)
            if before.structure != self._sources.structure:
                self._workspaces.clear()
        # Each kind of loop (one for a generator, one for its discriminator) touches parameters of its own.
        return Parts(batch, self._sources, self._workspaces.setdefault(id(model), Workspace()), self._world)

    def forward(self, model: DistributedDataParallel, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the module. Outside a loop over parts, refuse what trains it or changes its buffers."""
        module = model.module
        if (
            loops.open is not None
            and torch.is_grad_enabled()
            and deliveries.have_delivered(tensors_given(args, kwargs))
        ):
            raise TrainingCodeError(
                f"{type(module).__name__} was given a loader's batch inside the loop over model.parts(batch), and not the part: "
                f"how many rows of it a rank has depends on the world. {HOW}"
            )
        if loops.open is not None or not any(part.training for part in model.modules()):
            return module(*args, **kwargs)
        name = type(module).__name__
        if torch.is_grad_enabled() and model.training:
            raise TrainingCodeError(
                f"the loader was made with shards={self._shards}, and {name} is called for training outside a loop over "
                f"model.parts(batch). {HOW}\nFor validation call model.eval()"
            )
        before = {place: buffer.clone() for place, buffer in module.named_buffers()}
        outputs = module(*args, **kwargs)
        for place, buffer in module.named_buffers():
            if place not in before or buffer.shape != before[place].shape or not same_values(buffer, before[place]):
                raise TrainingCodeError(
                    f"a call of {name} outside a loop over model.parts(batch) has changed its buffer {place}, by this rank's "
                    "rows: call model.eval() for validation, and model.train() after it"
                )
        return outputs


def shards_in_use() -> int | None:
    """Return the number of shards into which this job's loader cuts batches; None if it does not, or is not known yet."""
    job = current_job()
    loader = None if job is None or job.state is None else job.state._loader_in_use()
    return shards_of_loader(loader)


def refuse_loader(loader: object) -> None:
    """Raise ``ValueError`` for a loader with ``shards=``: a library's Trainer computes each batch whole."""
    if (shards := shards_of_loader(loader)) is not None:
        raise ValueError(
            f"the loader was made with shards={shards}, for a loop over model.parts(batch), and a Trainer computes a rank's "
            "batch whole: leave out shards=, or write that loop with a TorchState"
        )


def refuse(model: DistributedDataParallel, shards: int) -> None:
    """Raise ``SparkElasticError`` for what cannot be kept equal in worlds of all sizes."""
    ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
    reasons = {
        "a communication hook reduces buckets over ranks, in an order of their own; leave register_comm_hook out": (
            model._comm_hook is not None
        ),
        "mixed_precision= of torch's wrapper reduces in another precision; use torch.autocast": bool(
            model._ddp_kwargs.get("mixed_precision")
        ),
        "SyncBatchNorm takes its statistics over ranks; BatchNorm takes them over shards": any(
            isinstance(part, nn.SyncBatchNorm) for part in model.modules()
        ),
        "parameters that the wrapper is told to ignore are each rank's own": bool(ignored),
    }
    for reason, holds in reasons.items():
        if holds:
            raise SparkElasticError(f"{type(model.module).__name__} cannot train with shards={shards}: {reason}")
