"""Refuses what would not do in a world what it does in Lightning alone, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from spark_elastic.data.loader import PositionedLoader
from spark_elastic.worker.context import device


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


def refuse_settings(settings: Mapping[str, object], loader: object) -> None:
    """Raise ``ValueError`` for settings that would not do in a world, with this loader, what they do in Lightning alone."""
    if settings.get("overfit_batches") and isinstance(loader, PositionedLoader):
        order = loader.tracker.spec
        if order.shuffle or order.mix:
            raise ValueError(
                "overfit_batches trains on the same batches in each epoch, and the state's loader shuffles: make it with "
                "shuffle=False, a ParquetLoader also with shuffle_rows=0"
            )
    if settings.get("reload_dataloaders_every_n_epochs"):
        raise ValueError(
            "reload_dataloaders_every_n_epochs would replace the state's loader, which delivers each epoch's rows by itself: "
            "leave it out"
        )
    if settings.get("sync_batchnorm") and device().type == "cpu":
        raise ValueError("sync_batchnorm=True needs GPUs, as torch's SyncBatchNorm runs on nothing else: leave it out")


def refuse_callback(callback: pl.Callback, has_logger: bool) -> None:
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
