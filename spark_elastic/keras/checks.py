"""Refuses callbacks and settings that ``fit`` cannot take."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping

import keras
from keras.callbacks import BackupAndRestore, CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

from spark_elastic.errors import TrainingCodeError
from spark_elastic.keras.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

# Settings of Model.fit that can be combined with a loader.
SETTINGS = ("class_weight", "validation_data", "validation_steps", "validation_batch_size", "validation_freq")


def check_settings(settings: Mapping[str, object]) -> None:
    """Raise ``TypeError`` for settings of ``Model.fit`` that the loader or the job decides, and for validation by an iterator."""
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(
                f"KerasState.fit takes no {name}=: rows, their order and batches are those of the state's loader, and epochs go "
                f"on from the last commit. It hands these on to Model.fit: {', '.join(SETTINGS)}"
            )
    if isinstance(settings.get("validation_data"), Iterator):
        raise TypeError(
            "validation_data is an iterator, which gives each batch once, so that later epochs and new workers would validate on "
            "other rows: give arrays, a DataLoader or a PyDataset"
        )


def check_built(model: keras.Model) -> None:
    """Raise ``ValueError`` for a model that is not built, and warn of layers that are not built."""
    if not model.built:
        raise ValueError("a KerasState takes a model that is built: call build, or the model itself on a batch")
    unbuilt = [layer.name for layer in model._flatten_layers() if not layer.built]
    if unbuilt:
        warnings.warn(
            f"layers of the model are not built ({', '.join(unbuilt)}): unless the model never calls them, call it once on a "
            "batch before the KerasState is made, since a new worker receives their weights before its first batch",
            stacklevel=3,
        )


def check_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raise ``ValueError`` for callbacks that ``KerasState.fit`` makes superfluous, or that would destroy their own output."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, (CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback)):
            raise ValueError(f"KerasState.fit counts and commits by itself: leave out {name}")
        if isinstance(callback, BackupAndRestore):
            raise ValueError(
                "BackupAndRestore would go back to what it wrote: give run(checkpoint=), from which a job goes on"
            )
        if isinstance(callback, ModelCheckpoint) and callback.save_freq != "epoch":
            raise ValueError(
                'ModelCheckpoint(save_freq=…) would save after other batches once rank 0 is lost: give save_freq="epoch", or '
                "run(checkpoint=, checkpoint_interval=)"
            )
        if isinstance(callback, CSVLogger) and not callback.append:
            raise ValueError("CSVLogger would start its file over after each change of the world: give append=True")


def check_losses(model: keras.Model) -> None:
    """Raise ``TrainingCodeError`` for losses that are not means over rows: averaging over ranks would change them."""
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", None)
        if reduction in ("sum", "mean_with_sample_weight"):
            raise TrainingCodeError(
                f'{type(loss).__name__}(reduction="{reduction}") is not a mean over rows, by which gradients of ranks are '
                'averaged, so the steps would depend on the number of workers: give reduction="sum_over_batch_size"'
            )


def watch_fit(model: keras.Model) -> None:
    """Make this model's ``fit`` refuse losses that are not means, and what cannot work in a loop that calls it by epoch."""
    signature = inspect.signature(type(model).fit)

    def fit(*args: object, **settings: object) -> keras.callbacks.History:
        check_losses(model)
        given = signature.bind(model, *args, **settings).arguments.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):
            _check_loop(model, keras.tree.flatten(given or []))
        return type(model).fit(model, *args, **settings)

    model.fit = fit


def _check_loop(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> None:
    if not any(isinstance(callback, UpdateEpochStateCallback) for callback in callbacks):
        return
    advice = "train by state.fit(convert, epochs=…, callbacks=[…]), where it goes on from epoch to epoch"
    for callback in callbacks:
        if isinstance(callback, (EarlyStopping, ReduceLROnPlateau)):
            name = type(callback).__name__
            raise TrainingCodeError(
                f"{name} starts over with each fit, and this loop calls fit for each epoch, so it would never act: {advice}"
            )
    if getattr(model.optimizer, "use_ema", False):
        raise TrainingCodeError(
            "with use_ema=True each fit ends by replacing the weights by their average, and this loop calls fit for each "
            f"epoch: {advice}"
        )
