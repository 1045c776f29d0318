"""ShardedState: the state of a job whose model fits into no worker."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from spark_elastic.errors import CheckpointError, NotInWorldError, SparkElasticError, TrainingCodeError
from spark_elastic.worker.checks.plain_loaders import PlainLoaders
from spark_elastic.worker.checks.reachable import find_optimizers
from spark_elastic.worker.checks.same_inputs import same_inputs
from spark_elastic.worker.checks.training_code import TrainingChecks
from spark_elastic.worker.checks.unkept_attributes import UnkeptAttributes
from spark_elastic.worker.context import device
from spark_elastic.worker.job import Job
from spark_elastic.worker.state.fully_sharded.keeper import FullySharded
from spark_elastic.worker.state.fully_sharded.memory import give_back_freed_tensors
from spark_elastic.worker.state.fully_sharded.model import Factories, ShardedModel
from spark_elastic.worker.state.keepers import Keeper
from spark_elastic.worker.state.snapshot import find_objects
from spark_elastic.worker.state.torch_state import TorchState
from spark_elastic.worker.world import World

# The user's functions make these again in each generation, so they cannot be part of the state.
_MADE_ANEW = (torch.nn.Module, torch.optim.Optimizer, LRScheduler)


class _Checks(TrainingChecks):
    """Checks of a function whose gradients are averaged by ``fully_shard``."""

    def __init__(self, state: ShardedState, job: Job, plain_loaders: PlainLoaders | None = None) -> None:
        super().__init__(state, job, plain_loaders)
        self._sharded = state
        self._made_attributes = UnkeptAttributes()

    def begin(self) -> None:
        """Begin a generation, whose model and optimizer are new."""
        super().begin()
        self._made_attributes.begin()

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> None:
        """Look also at the attributes of the model and optimizer, which are no values of the State."""
        super().before_step(optimizer, has_closure)
        for text in self._made_attributes.look(optimizer, self._made, lambda: {**self._shared(), **self._local()}):
            self._warn(text)

    def _made(self) -> dict[str, object]:
        return {"model": self._sharded.model, "optimizer": self._sharded.optimizer}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._sharded.optimizer]

    def _check(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer is self._sharded.optimizer:
            self._check_beside(optimizer, [*find_objects(self._shared()).values(), self._sharded.scheduler])
        elif not any(optimizer is each for each in find_optimizers(self._local())):
            raise TrainingCodeError(
                f"an optimizer ({type(optimizer).__name__}) steps that is not the one of the ShardedState, so no commit would "
                "have its state. Write state.optimizer.step(), with the optimizer that optimizer= makes in each generation"
            )
        return True


class ShardedState(TorchState):
    """The state of a job whose model is divided among all ranks by torch's ``fully_shard`` (FSDP2), on CPUs.

        def shard(model, mesh):
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        state = se.ShardedState(build=Net, shard=shard, optimizer=torch.optim.AdamW, step=0)

    Each rank holds its rows of parameters, gradients and moments, and no rank ever holds the whole model. ``fully_shard``
    cannot be undone, so whatever these functions make lasts for one generation, as ``state.model``, ``state.optimizer`` and
    ``state.scheduler``: access them there inside the elastic function, and keep them nowhere else. In each generation, on every
    rank, ``build()`` makes the same plain module; ``shard(module, mesh)`` calls ``fully_shard`` with the new ``mesh`` on the
    module's parts and then on the module; ``optimizer(parameters)`` makes a torch optimizer whose state has the parameters'
    shapes; and ``scheduler(optimizer)``, if given, makes a learning rate scheduler.

    A module that ``build`` makes on the meta device is never whole on any rank. The job then begins with the values that
    ``reset_parameters`` of the module's parts draw on rank 0, one part after the other. With a module on the CPU, the job
    begins with rank 0's values. Each rank keeps whole: its own buffers, which parts are frozen or in evaluation mode, attributes
    of torch's own modules such as the rate of a dropout, settings of the optimizer such as learning rates, and the scheduler's
    state. A commit raises ``TrainingCodeError`` if code has replaced, added or removed a module or parameter since. A module
    without parameters, buffers and extra state may be replaced, and begins anew as ``build`` makes it, unless the function sets
    it at its top.

    ``commit`` copies this rank's rows, sends them to the next rank of the ring (the ``redundancy`` next ones, 1 or 2), and
    blocks until all ranks hold those of their neighbours. After a loss, and when workers join, rows go point to point to where
    they belong in the new world. Up to ``redundancy`` neighbours of the ring may be lost at once; if more are, the job ends
    with ``StateLostError``. Durable checkpoints are written in the elastic function, by ``torch.distributed.checkpoint``.

    ``fully_shard`` averages gradients over ranks, whatever their numbers of rows: divide the loss by the rows of all ranks. With
    glibc, tensors of 64 KiB and more are given back to the machine when they are freed (see ``memory.py``).

    ``loader``, ``local`` and all other values are as in ``TorchState``, but modules, optimizers, schedulers and a loader with
    ``shards=`` are refused. Raises ``SparkElasticError`` outside a job, with ``run(elastic=False)``, on GPUs and for models and
    optimizers that are not divided by rows, and ``CheckpointError`` with ``run(checkpoint=)``.
    """

    _training_checks = _Checks

    def __init__(
        self,
        *,
        build: Callable[[], torch.nn.Module],
        shard: Callable[[torch.nn.Module, DeviceMesh], object],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        loader: object = None,
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        redundancy: int = 1,
        **values: object,
    ) -> None:
        """Store the functions without calling them: the model is made when the elastic function is entered.

        Raises ``TypeError`` for anything but functions, for ``model=`` and ``commit=``, and for modules, optimizers and
        schedulers among the other values, and ``ValueError`` for a ``redundancy`` other than 1 and 2. Requirements on the job
        are checked when the elastic function is entered.
        """
        factories = {"build": build, "shard": shard, "optimizer": optimizer}
        for name, factory in (factories if scheduler is None else {**factories, "scheduler": scheduler}).items():
            if not callable(factory) or isinstance(factory, _MADE_ANEW):
                raise TypeError(f"{name} must be a function, which is called in each generation, not {factory!r}")
        if "commit" in values:
            raise TypeError(
                "a ShardedState has no commit=: each rank keeps its rows and those of its neighbours, as redundancy= says"
            )
        if "model" in values:
            raise TypeError(
                "a ShardedState has no model=: give build=, a function that makes the model in each generation"
            )
        self._factories = Factories(build, shard, optimizer, scheduler)
        super().__init__(loader=loader, local=local, redundancy=redundancy, **cast(dict[str, Any], values))
        self._refuse_whole_models()

    @property
    def model(self) -> torch.nn.Module:
        """The model of this generation, divided among all ranks."""
        return self._made().module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this generation's model."""
        return self._made().optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler of this generation's optimizer; None if ``scheduler=`` was not given."""
        return self._made().scheduler

    def restore(self) -> None:
        """Drop the model of the generation that has ended. The next sync makes it again, as of the last commit.

        Raises ``SparkElasticError`` inside the elastic function, where a rank cannot go back alone.
        """
        if self._commits.is_entered:
            raise SparkElasticError("a ShardedState goes back only when the world changes: a rank cannot do so alone")
        super().restore()
        if self._sharded_keeper.model is not None:
            self._sharded_keeper.model.forget_group()
        self._sharded_keeper.model = None
        gc.collect()  # torch's hooks and modules refer to each other, and there may be no room for two models

    # ------------------------------------------------------------------ inside

    @property
    def _sharded_keeper(self) -> FullySharded:
        assert isinstance(self._keeper, FullySharded)
        return self._keeper

    def _made(self) -> ShardedModel:
        model = self._sharded_keeper.model
        if model is None:
            raise NotInWorldError(
                "the model of a ShardedState is made when the elastic function is entered, not before"
            )
        return model

    def _keeper_maker(self, commit: str, redundancy: int) -> Callable[[], Keeper]:
        super()._keeper_maker(commit, redundancy)  # which checks the redundancy
        return partial(FullySharded, self._make, redundancy)

    def _make(self, world: World) -> ShardedModel:
        # Torch caches facts about a mesh, including this rank's place, and identifies meshes by shape and names. So each mesh
        # gets a name of its own.
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=(f"generation_{world.generation}",))
        made = ShardedModel(self._factories, mesh, is_first=world.newest_commit is None)
        made.module.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        return made

    def _note_inputs(self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Have ranks compare what the model is given for gradients, unless a loader of the State delivers it."""
        if torch.is_grad_enabled() and self._loader_in_use() is None:
            same_inputs.note([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def _prepare(self) -> None:
        self._refuse_whole_models()
        super()._prepare()

    def _begin(self, job: Job | None) -> None:
        if job is None:
            raise SparkElasticError(
                "a ShardedState needs a job, whose ranks the model is divided among; call the function with spark_elastic.run"
            )
        if job.is_fixed:
            raise SparkElasticError("a ShardedState is for elastic functions; leave elastic=False out")
        if job.checkpoints is not None:
            raise CheckpointError(
                "a ShardedState is not written to durable checkpoints; leave checkpoint= out, and call "
                "torch.distributed.checkpoint.save in the elastic function"
            )
        if device().type != "cpu":
            raise SparkElasticError(f"a ShardedState trains on CPUs, and this worker has {device()}")
        give_back_freed_tensors()
        super()._begin(job)

    def _check_models(self, job: Job) -> None:
        if job.models:
            raise SparkElasticError(
                "a ShardedState and an se.DistributedDataParallel do not go together: the one divides the model, the other has "
                "it whole on each rank; leave DistributedDataParallel out"
            )

    def _refuse_with_shards(self, shards: int, max_np: int) -> None:
        raise SparkElasticError(
            f"a loader with shards={shards} does not go with a ShardedState, which adds gradients up in an order that depends on "
            "the size of the world; leave shards= out"
        )

    def _refuse_whole_models(self) -> None:
        for name, value in find_objects(self._values(shared=True)).items():
            if isinstance(value, _MADE_ANEW):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, of which each rank would keep the whole; a ShardedState's model, "
                    "optimizer and scheduler are what build=, optimizer= and scheduler= make in each generation"
                )
