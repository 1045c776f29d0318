"""Elastic training with Lightning, in the same process: a State that makes a Trainer for each world.

::

    lit = LitNet()
    state = LightningState(lit, loader=se.data.ElasticDataLoader(dataset, global_batch_size=64))

    @se.elastic
    def train(state):
        state.trainer(max_epochs=10).fit(lit, state.loader)

A Trainer cannot change its number of processes. After each change of the world, a new Trainer continues from the last commit,
with the same module and optimizers. Requires ``pip install lightning``.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from spark_elastic.worker.shards.sharding import refuse_loader
from spark_elastic.worker.state.torch_state import TorchState

__all__ = ["LightningState"]

# The Trainer settings that the job decides: each worker has one process and one device.
_OURS = ("strategy", "devices", "num_nodes", "use_distributed_sampler")


def _kinds(*names: str) -> tuple[type[pl.Callback], ...]:
    """Return the callback classes of these names that this release of Lightning has."""
    return tuple(getattr(pl.callbacks, name) for name in names if hasattr(pl.callbacks, name))


# Callbacks that keep an average of the weights over the whole training.
_AVERAGES = _kinds("StochasticWeightAveraging", "WeightAveraging")

# A callback that writes a file on any exception, from which Lightning has the next Trainer go on.
_RELOADED = _kinds("OnExceptionCheckpoint")

# A callback that puts masked weights, which are no parameters, in the place of parameters when a Trainer begins.
_PRUNING = _kinds("ModelPruning")

# Callbacks that change the objects in the State when a Trainer begins.
_REFUSED = _kinds("BaseFinetuning", "BatchSizeFinder", "LearningRateFinder")

# The CSV loggers that were given without version=, for which Lightning chooses the next free number at first use.
_NUMBERED: weakref.WeakSet[pl.loggers.CSVLogger] = weakref.WeakSet()


class LightningState(TorchState):
    """The state of a LightningModule in training: its weights, optimizers and schedulers, a loader, and any objects.

    ``module`` is wrapped, and its ``configure_optimizers`` is called once, here; every Trainer gets the result. ``loader`` is
    one of this package's loaders with ``global_batch_size=``. ``commit``, ``local`` and ``objects`` are as in ``TorchState``.
    Give ``find_unused_parameters=True`` if steps do not use all parameters. A step is committed after everything that follows
    its batch, such as a validation, together with the ``state_dict`` of callbacks such as ``EarlyStopping``. Raises
    ``ValueError`` if ``configure_optimizers`` returns no optimizer, and for a module with manual optimization.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        loader: object,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        *,
        find_unused_parameters: bool = False,
        **objects: Any,
    ) -> None:
        """Move the module to ``device()``, call ``configure_optimizers`` once and for all, and wrap the module.

        Raises ``ValueError`` without an optimizer or with a sharded loader, and whatever the wrapper and ``TorchState`` raise.
        """
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, and Lightning then prepares only its own wrapper for "
                "backward: write that loop with a TorchState, or optimize automatically"
            )
        refuse_loader(loader)
        # Move the module before it is wrapped and committed: both would have to be redone when the Trainer moves it.
        module.to(device())
        configured = _configured(module)
        found = list(_with_state(configured))
        optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            raise ValueError(f"{type(module).__name__}.configure_optimizers returns no optimizer, so nothing trains")
        module.configure_optimizers = lambda: configured  # type: ignore[method-assign]
        self._known = list(module.parameters())
        self._wrapped = DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
        # Whether a fit has ended in this world.
        self._has_fitted = False
        # The callbacks of the last fit that write checkpoints.
        self._writers: list[pl.callbacks.ModelCheckpoint] = []
        # Under what keys Lightning keeps the time that callbacks have measured, on each rank.
        self._clocks: frozenset[str] = frozenset()
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

    def _compared_values(self) -> dict[str, object]:
        """Leave out what ``self.log`` has noted, which is each rank's own unless it is told to average, and clocks."""
        values = super()._compared_values()
        if self.progress is None:
            return values
        progress = {name: value for name, value in self.progress.items() if name != "metrics"}
        callbacks = {key: state for key, state in progress["callbacks"].items() if key not in self._clocks}
        return {**values, "progress": {**progress, "callbacks": callbacks}}

    def _enter_world(self, rank: int, size: int) -> None:
        super()._enter_world(rank, size)
        self._has_fitted = False
        _begin_folders()

    def trainer(self, **settings: Any) -> pl.Trainer:
        """Return a Trainer for the current world that continues from the last commit. Call this inside the elastic function.

        settings: those of ``Trainer``, except ``strategy``, ``devices``, ``num_nodes`` and ``use_distributed_sampler``, which
        the job decides: they raise ``TypeError``. ``ValueError`` is raised for what would start over with each Trainer. Your
        callbacks run before the one that commits. The Trainer writes no checkpoints unless you give ``enable_checkpointing`` or
        a callback such as ``ModelCheckpoint``, because ``run(checkpoint=)`` writes them.
        """
        for name in _OURS:
            if name in settings:
                raise TypeError(
                    f"{name} is decided by the job, which has one process and one device per worker: leave it out"
                )
        _refuse(settings)
        callbacks = settings.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks)
        for callback in callbacks:
            _refuse_callback(callback, has_logger=settings.get("logger") is not False)
        writes = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
        settings.setdefault("enable_checkpointing", writes)
        trainer = pl.Trainer(
            strategy=_Strategy(self._wrapped),
            devices=1,
            num_nodes=size(),
            use_distributed_sampler=False,
            callbacks=[*callbacks, _Commit(self)],
            **settings,
        )
        # The Trainer makes one for max_time=.
        timers = [each for each in trainer.callbacks if isinstance(each, pl.callbacks.Timer)]  # type: ignore[attr-defined]
        self._clocks = frozenset(timer.state_key for timer in timers)
        return trainer


def _refuse(settings: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for settings that would not do in a world what they do in Lightning alone, and note CSV loggers."""
    if settings.get("reload_dataloaders_every_n_epochs"):
        raise ValueError(
            "reload_dataloaders_every_n_epochs would replace the state's loader, which delivers each epoch's rows by itself: "
            "leave it out"
        )
    if settings.get("sync_batchnorm") and device().type == "cpu":
        raise ValueError("sync_batchnorm=True needs GPUs, as torch's SyncBatchNorm runs on nothing else: leave it out")
    logger = settings.get("logger")
    for each in logger if isinstance(logger, (list, tuple)) else [logger]:
        if isinstance(each, pl.loggers.CSVLogger) and each not in _NUMBERED:
            if each._version is not None:
                raise ValueError(
                    "CSVLogger(version=…) deletes its earlier file with each Trainer, and each world has its own: leave out "
                    "version=, and read version and log_dir only after state.trainer(…), or have run(loggers=) write what "
                    "state.report is given"
                )
            _NUMBERED.add(each)


def _begin_folders() -> None:
    """Have CSV loggers choose a folder again. In the one that a rank has chosen, another one may have written its file."""
    for logger in tuple(_NUMBERED):
        logger.finalize("failed")  # which writes what was logged outside of a fit
        logger._experiment = logger._version = None


def _refuse_callback(callback: pl.Callback, has_logger: bool) -> None:
    """Raise ``ValueError`` for a callback that would not do in a world what it does in Lightning alone."""
    name = type(callback).__name__
    if isinstance(callback, _AVERAGES):
        raise ValueError(
            f"{name} starts its average over with each Trainer, and each world has its own: keep a "
            "torch.optim.swa_utils.AveragedModel in the state, and update it in on_train_batch_end"
        )
    if isinstance(callback, _RELOADED):
        raise ValueError(
            f"{name} takes each change of the world for an exception, and the next Trainer would load its file: give "
            "run(checkpoint=), from which a job goes on"
        )
    if getattr(callback, "save_on_exception", False):
        raise ValueError(
            f"{name}(save_on_exception=True) takes each change of the world for an exception: leave it out, and give "
            "run(checkpoint=), from which a job goes on"
        )
    if isinstance(callback, _PRUNING):
        raise ValueError(
            f"{name} replaces parameters: prune with torch.nn.utils.prune before the LightningState is made"
        )
    if isinstance(callback, _REFUSED):
        raise ValueError(
            f"{name} tries, or freezes, again with each Trainer, and each world has its own: set the learning rate, the batch "
            "size and requires_grad before the LightningState is made"
        )
    if isinstance(callback, pl.callbacks.ModelCheckpoint) and has_logger and callback.monitor and not callback.dirpath:
        raise ValueError(
            f"{name}(monitor={callback.monitor!r}) without dirpath= writes to a new folder of the logger with each Trainer, and "
            "forgets which was the best; each world has its own: give it dirpath=, or run(checkpoint=, checkpoint_best=)"
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


def _with_state(configured: object) -> Iterator[object]:
    """Yield the optimizers and schedulers in the result of ``configure_optimizers``, in whichever form it is."""
    if isinstance(configured, Mapping):
        configured = list(configured.values())
    if isinstance(configured, (list, tuple)):
        for each in configured:
            yield from _with_state(each)
    elif hasattr(configured, "state_dict"):
        yield configured


class _Processes(LightningEnvironment):
    """Presents each worker to Lightning as a node with one process, which already exists."""

    creates_processes_externally = True

    def node_rank(self) -> int:
        return rank()

    def local_rank(self) -> int:
        return 0


class _Strategy(DDPStrategy):
    """Lightning's DDP strategy in the existing process group, with a model wrapper that outlives the group."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(cluster_environment=_Processes())
        self._wrapped = model

    def _setup_model(self, model: torch.nn.Module) -> Any:
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """Register none. On a GPU, Lightning would register hooks that need torch's own wrapper."""

    def teardown(self) -> None:
        """End the Trainer, and leave the module and its optimizers on their device for the next world."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        # Hide the module and the optimizers from Lightning, which would move them to the CPU.
        optimizers, self.optimizers = self.optimizers, []
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self.optimizers, self._lightning_module = optimizers, module

    def reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        """Reduce as Lightning does, but for two cases.

        Whole numbers are averaged here, since Lightning's way for Gloo depends on the backend's name. Where each rank has
        evaluated all rows, a sum is that of one rank.
        """
        module = self._lightning_module
        if module is not None and not module.trainer.training and str(reduce_op).lower().endswith("sum"):
            reduce_op = "mean"
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not is_mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / torch.distributed.get_world_size(group))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Count the ranks that say yes. Lightning would ask ``reduce``, which takes an evaluation's sum for that of a metric."""
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == size() if all else count > 0


class _Commit(pl.Callback):
    """Commits the Trainer's progress after each batch and epoch, and restores it in a new Trainer."""

    def __init__(self, state: LightningState) -> None:
        self._state = state
        # Whether this Trainer began in the middle of the epoch, and whether the hooks of the epoch's start are being repeated.
        self._is_within = False
        self._is_repeating = False
        # Whether this Trainer continues from the commit at an epoch's start.
        self._is_going_on = False
        # The metrics that do not look for other ranks during an evaluation, and what tells them otherwise whether there are any.
        self._alone: list[tuple[Any, Callable[[], bool]]] = []

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            raise TrainingCodeError(
                "fit(ckpt_path=…) would load that file again after each change of the world, and what was committed since "
                "would be lost: load the weights above the elastic function, or give run(checkpoint=), from which a job goes on"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._follow_batches(trainer)
        self._repeat_hooks(trainer)
        progress = self._state.progress
        if progress is not None:
            trainer.fit_loop.load_state_dict(progress["loops"])
            trainer.should_stop = progress["should_stop"]
            trainer.precision_plugin.load_state_dict(progress["precision"])
            self._load_metrics(trainer)
            self._load_callbacks(trainer)
            self._is_within = trainer.fit_loop.epoch_loop.batch_progress.current.completed > 0
            self._is_going_on = not self._is_within
            # If the fit was already over, its loader stands at the end of the last epoch.
            self._state.loader.set_epoch(trainer.current_epoch)
            if self._state._has_fitted and trainer.fit_loop.done:
                warnings.warn(
                    f"a fit in this world has trained {trainer.current_epoch} epochs already, and max_epochs= and max_steps= "
                    "count from the beginning, so this one trains nothing: give it more",
                    stacklevel=2,
                )
        self._overwrite_undone(trainer)

    def _overwrite_undone(self, trainer: pl.Trainer) -> None:
        """Have files overwritten that were written after the commit. Lightning would write them anew, under other names."""
        writers = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
        before, self._state._writers = self._state._writers, writers
        if not self._state._has_fitted:
            undone = _files_of(before) - _files_of(writers)
            for writer in writers:
                writer.file_exists = functools.partial(_is_kept, undone, writer.file_exists)  # type: ignore[method-assign]

    def _load_metrics(self, trainer: pl.Trainer) -> None:
        progress = self._state.progress
        if progress is not None:
            trainer._logger_connector._callback_metrics.update(progress["metrics"])

    def _load_callbacks(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if callback.state_key in self._state.progress["callbacks"]:
                callback.load_state_dict(copy.deepcopy(self._state.progress["callbacks"][callback.state_key]))

    def _repeat_hooks(self, trainer: Any) -> None:
        """Call the hooks of an epoch's start when training continues in mid-epoch, too, where Lightning omits them."""
        loop = trainer.fit_loop
        start = loop.on_advance_start

        def on_advance_start() -> None:
            start()
            if self._is_within:  # once, at this Trainer's first batch
                self._is_repeating = True
                call._call_callback_hooks(trainer, "on_train_epoch_start")
                call._call_lightning_module_hook(trainer, "on_train_epoch_start")
                self._is_repeating = False
                self._load_callbacks(trainer)  # callbacks that count epochs had already counted this one
            loop.on_advance_start = start

        loop.on_advance_start = on_advance_start

    def _follow_batches(self, trainer: Any) -> None:
        """Commit after everything that follows a batch: hooks, validation, schedules. Lightning has no hook for this point."""
        loop = trainer.fit_loop.epoch_loop
        end = loop.on_advance_end

        def on_advance_end(fetcher: object) -> None:
            if loop._skip_next_val:  # Lightning revisits the batch of the last commit, for which everything was done
                loop._skip_next_val = False
                return
            end(fetcher)
            # The last batch is committed once Lightning has ended the epoch; accumulating batches, with the one that steps.
            is_last = loop._is_training_done or (trainer.should_stop and trainer.fit_loop._can_stop_early)
            if not is_last and not loop._should_accumulate():
                self._commit(trainer)

        loop.on_advance_end = on_advance_end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load_metrics(trainer)  # which the sanity validation has reset
        known = set(map(id, self._state._known))
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise TrainingCodeError(
                    f"{name} of {type(pl_module).__name__} was made after its LightningState, in setup() or configure_model(), "
                    "so no optimizer has it and it would never train: make all layers in __init__"
                )
        if not all(leaf is self._state.loader for leaf in tree_leaves(trainer.train_dataloader)):
            raise TrainingCodeError(
                "the Trainer trains on a loader that is not the state's, so each rank would train on all of its rows, and "
                "none would go on where it was after a loss: trainer.fit(module, state.loader), whose rows have all that a step "
                "needs"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self._is_repeating:
            return
        if self._is_going_on:  # callbacks had this hook before the commit below
            self._load_callbacks(trainer)
        self._is_within = self._is_going_on = False
        self._drop_gradients(trainer)
        self._state.loader.set_epoch(trainer.current_epoch)
        trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()  # Lightning does this only after this hook
        # A Trainer that continued from this commit has decremented ``ready``, and could not continue from here a second time.
        epochs = trainer.fit_loop.epoch_progress.current
        epochs.ready = epochs.started + 1
        self._commit(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        # While ``_restarting`` is set, Lightning takes a restored epoch as already validated, and skips ReduceLROnPlateau.
        trainer.fit_loop._restarting = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
        self._state._has_fitted = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load_metrics(trainer)  # where the fit was over already, and a sanity validation was all that ran

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics: Iterator[object] = pl_module.modules()
        for metric in metrics:
            if hasattr(metric, "distributed_available_fn"):
                self._alone.append((metric, metric.distributed_available_fn))
                metric.distributed_available_fn = _is_alone

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for metric, is_distributed in self._alone:
            metric.distributed_available_fn = is_distributed
        self._alone.clear()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.on_validation_end(trainer, pl_module)  # after an error

    def _drop_gradients(self, trainer: pl.Trainer) -> None:
        """Drop gradients that were accumulated without a step, which an early stop can leave and Lightning would overwrite."""
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


def _files_of(writers: Iterable[pl.callbacks.ModelCheckpoint]) -> set[str]:
    """Return the paths of the checkpoints that callbacks have written and not removed."""
    files: set[str] = set()
    for each in writers:
        files.update(each.best_k_models, (each.best_model_path, each.last_model_path))
    return files


def _is_kept(undone: set[str], exists: Callable[[str, pl.Trainer], bool], path: str, trainer: pl.Trainer) -> bool:
    """Tell all ranks, as ``exists`` does, whether rank 0 sees a file that is not to be overwritten, which it may be once.

    Newcomers do not know which ones are, and call ``exists``, whose collective needs all ranks: it is asked for no file.
    """
    if path in undone:
        undone.remove(path)
        return exists(f"{path}/undone", trainer)
    return exists(path, trainer)


def _is_alone() -> bool:
    """Tell a metric of torchmetrics that there are no other ranks, since each has evaluated all rows."""
    return False
