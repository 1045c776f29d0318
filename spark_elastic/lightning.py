"""Lightning's Trainer, elastic in the same process: a state that makes a Trainer for each world.

::

    lit = LitNet()
    state = LightningState(lit, loader=se.data.ElasticDataLoader(dataset, global_batch_size=64))

    @se.elastic
    def train(state):
        state.trainer(max_epochs=10).fit(lit, state.loader)

A Trainer cannot change the number of its processes. After each change of the world a new one goes on where the last commit left
off, with the same module and optimizers. ``pip install lightning``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._pytree import tree_leaves

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.context import device, rank, size
from spark_elastic.worker.ddp import DistributedDataParallel
from spark_elastic.worker.state.torch_state import TorchState

__all__ = ["LightningState"]

# What a Trainer has to be given in a world of workers with one process and one device each.
_OURS = ("strategy", "devices", "num_nodes", "use_distributed_sampler")


def _kinds(*names: str) -> tuple[type[pl.Callback], ...]:
    """Return those of these classes of callbacks that this release of Lightning has."""
    return tuple(getattr(pl.callbacks, name) for name in names if hasattr(pl.callbacks, name))


# Callbacks that average weights over the whole training, in memory of their own.
_AVERAGES = _kinds("StochasticWeightAveraging", "WeightAveraging")

# Callbacks that change what the State is made of when a Trainer begins.
_REFUSED = _kinds("BaseFinetuning", "BatchSizeFinder", "LearningRateFinder")


class LightningState(TorchState):
    """The state of a LightningModule in training: its weights, optimizers and schedulers, a loader, and any objects.

    ``module`` is wrapped, and its ``configure_optimizers`` is called once, here: every Trainer gets what it has returned.
    ``loader`` is a loader of this package with ``global_batch_size=``. ``commit`` and ``local`` are as in ``TorchState``, and so
    are ``objects``. A step is committed after all that follows its batch, such as a validation, with the ``state_dict`` of
    callbacks such as ``EarlyStopping``. Raises ``ValueError`` if ``configure_optimizers`` returns no optimizer, and for a module
    that optimizes by hand.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        loader: object,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        **objects: Any,
    ) -> None:
        """Move the module to ``device()``, call ``configure_optimizers``, for the only time, and wrap the module.

        Raises ``ValueError`` if no optimizer is returned, and what ``DistributedDataParallel`` and ``TorchState`` raise.
        """
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, and Lightning then prepares only its own wrapper for "
                "backward: write that loop with a TorchState, or optimize automatically"
            )
        # Before there are a wrapper and a commit, which would else be made anew when the Trainer moves the module.
        module.to(device())
        configured = _configured(module)
        found = list(_with_state(configured))
        optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            raise ValueError(
                f"{type(module).__name__}.configure_optimizers returns no optimizer, so nothing would train"
            )
        module.configure_optimizers = lambda: configured  # type: ignore[method-assign]
        self._known = list(module.parameters())
        self._wrapped = DistributedDataParallel(module)
        super().__init__(
            model=self._wrapped,
            loader=loader,
            commit=commit,
            local=local,
            optimizers=optimizers,
            schedulers=[each for each in found if not isinstance(each, torch.optim.Optimizer)],
            progress=None,
            **objects,
        )

    def trainer(self, **settings: Any) -> pl.Trainer:
        """Return a Trainer for the present world, which goes on from the last commit. Call this inside the elastic function.

        settings: those of ``Trainer``, but for ``strategy``, ``devices``, ``num_nodes`` and ``use_distributed_sampler``, which
        the job decides: they raise ``TypeError``. Your callbacks run before the one that commits. Unless you give
        ``enable_checkpointing``, the Trainer writes no checkpoints, which ``run(checkpoint=)`` does.
        """
        for name in _OURS:
            if name in settings:
                raise TypeError(
                    f"{name} is decided by the job, which has one process and one device a worker: leave it out"
                )
        callbacks = settings.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks)
        for callback in callbacks:
            if isinstance(callback, _AVERAGES):
                raise ValueError(
                    f"{type(callback).__name__} begins its average anew with each Trainer, and each world has its own: keep a "
                    "torch.optim.swa_utils.AveragedModel in the state, and update it in on_train_batch_end"
                )
            if isinstance(callback, _REFUSED):
                raise ValueError(
                    f"{type(callback).__name__} tries, or freezes, anew with each Trainer, and each world has its own: "
                    "set the learning rate, the batch size and requires_grad before the LightningState is made"
                )
        settings.setdefault("enable_checkpointing", False)
        return pl.Trainer(
            strategy=_Strategy(self._wrapped),
            devices=1,
            num_nodes=size(),
            use_distributed_sampler=False,
            callbacks=[*callbacks, _Commit(self)],
            **settings,
        )


def _configured(module: pl.LightningModule) -> Any:
    try:
        return module.configure_optimizers()
    except RuntimeError as error:
        if "not attached to a" not in str(error):
            raise
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers asks for its Trainer, and there is none yet, as optimizers outlive "
            "each Trainer here: give the module what it asks for, such as epochs * len(loader) for estimated_stepping_batches"
        ) from error


def _with_state(configured: object) -> Iterator[Any]:
    """Yield the optimizers and schedulers in what ``configure_optimizers`` has returned, in whichever of its forms."""
    if isinstance(configured, Mapping):
        configured = list(configured.values())
    if isinstance(configured, (list, tuple)):
        for each in configured:
            yield from _with_state(each)
    elif hasattr(configured, "state_dict"):
        yield configured


class _Processes(LightningEnvironment):
    """Each worker is a node of Lightning's with one process, which is there already."""

    creates_processes_externally = True

    def node_rank(self) -> int:
        return rank()

    def local_rank(self) -> int:
        return 0


class _Strategy(DDPStrategy):
    """Lightning's strategy in the process group that is there, with the wrapper that outlives it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(cluster_environment=_Processes())
        self._wrapped = model

    def _setup_model(self, model: torch.nn.Module) -> Any:
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """Register none: on a GPU Lightning would, with torch's wrapper, which this is not."""

    def teardown(self) -> None:
        """End the Trainer, and leave the module and its optimizers on their device, where the next world goes on with them."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        # Lightning would move all optimizers and the module that it knows to the CPU.
        optimizers, self.optimizers = self.optimizers, []
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self.optimizers, self._lightning_module = optimizers, module

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, whose way to have Gloo average whole numbers depends on the backend's name."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not is_mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / torch.distributed.get_world_size(group))


class _Commit(pl.Callback):
    """Commits after each batch, and after each epoch, how far the Trainer is, and has a new Trainer go on from there."""

    def __init__(self, state: LightningState) -> None:
        self._state: Any = state
        # Whether this Trainer has begun within the epoch, and whether the hooks of the epoch's start are being called again.
        self._is_within = False
        self._is_repeating = False
        # Whether this Trainer goes on from the commit at an epoch's start.
        self._is_going_on = False

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            raise TrainingCodeError(
                "fit(ckpt_path=…) would load that file again after each change of the world, and what was committed since "
                "would be lost: load the weights above the elastic function, or give run(checkpoint=), from which a job goes on"
            )

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._follow_batches(trainer)
        self._repeat_hooks(trainer)
        progress = self._state.progress
        if progress is not None:
            trainer.fit_loop.load_state_dict(progress["loops"])
            trainer.should_stop = progress["should_stop"]
            trainer.precision_plugin.load_state_dict(progress["precision"])
            trainer._logger_connector._callback_metrics.update(progress["metrics"])
            self._load_callbacks(trainer)
            self._is_within = trainer.fit_loop.epoch_loop.batch_progress.current.completed > 0
            self._is_going_on = not self._is_within
            # A fit that was over has iterated its last epoch to the end.
            self._state.loader.set_epoch(trainer.current_epoch)

    def _load_callbacks(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if callback.state_key in self._state.progress["callbacks"]:
                callback.load_state_dict(copy.deepcopy(self._state.progress["callbacks"][callback.state_key]))

    def _repeat_hooks(self, trainer: Any) -> None:
        """Call the hooks of an epoch's start also where training goes on within the epoch: Lightning leaves them out."""
        loop = trainer.fit_loop
        start = loop.on_advance_start

        def on_advance_start() -> None:
            start()
            if self._is_within:  # as the first that this Trainer does
                self._is_repeating = True
                call._call_callback_hooks(trainer, "on_train_epoch_start")
                call._call_lightning_module_hook(trainer, "on_train_epoch_start")
                self._is_repeating = False
                self._load_callbacks(trainer)  # who counts has counted the epoch
            loop.on_advance_start = start

        loop.on_advance_start = on_advance_start

    def _follow_batches(self, trainer: Any) -> None:
        """Commit when Lightning has done all that follows a batch: hooks, validation, schedules. It has no hook for that."""
        loop = trainer.fit_loop.epoch_loop
        end = loop.on_advance_end

        def on_advance_end(fetcher: object) -> None:
            if loop._skip_next_val:  # Lightning comes by the batch of the last commit again, after which all was done
                loop._skip_next_val = False
                return
            end(fetcher)
            # The last batch is committed when Lightning has ended the epoch, and batches that accumulate with the one that steps.
            is_last = loop._is_training_done or (trainer.should_stop and trainer.fit_loop._can_stop_early)
            if not is_last and not loop._should_accumulate():
                self._commit(trainer)

        loop.on_advance_end = on_advance_end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = set(map(id, self._state._known))
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise TrainingCodeError(
                    f"{name} of {type(pl_module).__name__} was made after its LightningState, in setup() or configure_model(), "
                    "so no optimizer has it and it would never train: make all layers in __init__"
                )
        if not any(leaf is self._state.loader for leaf in tree_leaves(trainer.train_dataloader)):
            raise TrainingCodeError(
                "the Trainer trains on a loader that is not the state's, so each rank would train on all of its rows, and "
                "none would go on where it was after a loss: trainer.fit(module, state.loader)"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self._is_repeating:
            return
        if self._is_going_on:  # from the commit below, ahead of which callbacks had this hook
            self._load_callbacks(trainer)
        self._is_within = self._is_going_on = False
        self._drop_gradients(trainer)
        self._state.loader.set_epoch(trainer.current_epoch)
        trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()  # as Lightning does after this hook
        # A Trainer that went on from here has taken it back, and would not go on from here a second time.
        epochs = trainer.fit_loop.epoch_progress.current
        epochs.ready = epochs.started + 1
        self._commit(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Until the end of an epoch that was loaded, Lightning would take it for one that has been validated already, and leave
        # out ReduceLROnPlateau.
        trainer.fit_loop._restarting = False

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        results = trainer.fit_loop.epoch_loop._results.result_metrics if self._is_within else []
        names = sorted({result.meta.name for result in results if result.meta.on_epoch})
        if names:
            warnings.warn(
                f"{', '.join(names)} of epoch {trainer.current_epoch} cover the batches since the world changed: averages of "
                "training batches, log(…, on_epoch=True), are in no commit. Decide by what validation logs",
                stacklevel=2,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._drop_gradients(trainer)
        self._commit(trainer)

    def _drop_gradients(self, trainer: Any) -> None:
        """Forget what batches have accumulated without a step, which an early stop can leave and Lightning would overwrite."""
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()

    def _commit(self, trainer: Any) -> None:
        self._state.progress = {
            "loops": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "precision": trainer.precision_plugin.state_dict(),
            "metrics": {name: value.detach().clone() for name, value in trainer.callback_metrics.items()},
            "callbacks": {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())},
        }
        self._state.commit()
