"""The callback by which a Trainer commits its progress, and continues from that of the last commit."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._pytree import tree_leaves

from spark_elastic.errors import TrainingCodeError

if TYPE_CHECKING:
    from spark_elastic.lightning.state import LightningState


class Commits(pl.Callback):
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
