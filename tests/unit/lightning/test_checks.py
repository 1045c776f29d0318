"""Settings and callbacks that would not do in a world what they do in Lightning alone."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning_nets import QUIET, Net, state_of

from spark_elastic.data import ElasticDataLoader
from spark_elastic.lightning import LightningState

pytestmark = pytest.mark.filterwarnings("ignore")


def test_callbacks_that_would_average_anew_in_each_world_are_refused() -> None:
    for callback in (pl.callbacks.StochasticWeightAveraging(0.1), pl.callbacks.WeightAveraging()):
        with pytest.raises(ValueError, match=f"{type(callback).__name__} starts its average over with each Trainer"):
            state_of("one").trainer(callbacks=callback)


def test_a_callback_that_puts_others_in_the_place_of_parameters_is_refused() -> None:
    callback = pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(
        ValueError, match=r"ModelPruning replaces parameters: prune with torch\.nn\.utils\.prune before"
    ):
        state_of("one").trainer(callbacks=[callback])


def test_callbacks_that_would_freeze_or_try_anew_in_each_world_are_refused() -> None:
    for callback in (
        pl.callbacks.BackboneFinetuning(),
        pl.callbacks.LearningRateFinder(),
        pl.callbacks.BatchSizeFinder(),
    ):
        with pytest.raises(ValueError, match=f"{type(callback).__name__} tries, or freezes, again with each Trainer"):
            state_of("one").trainer(callbacks=[callback])


def test_a_callback_whose_file_the_next_trainer_would_load_is_refused() -> None:
    """Lightning has any Trainer with such a callback go on from its file, which each change of the world has it write."""
    with pytest.raises(ValueError, match=r"OnExceptionCheckpoint takes each change of the world for an exception"):
        state_of("one").trainer(callbacks=pl.callbacks.OnExceptionCheckpoint("unused"), enable_checkpointing=True)


def test_a_checkpoint_of_exceptions_is_refused_as_each_change_of_the_world_is_one() -> None:
    callback = pl.callbacks.ModelCheckpoint("folder", save_on_exception=True)
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(save_on_exception=True\) takes each change of the world"):
        state_of("one").trainer(callbacks=callback)


def test_a_checkpoint_of_the_best_needs_a_folder_that_outlives_a_world() -> None:
    best = pl.callbacks.ModelCheckpoint(monitor="val")
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(monitor='val'\) without dirpath= .*give it dirpath="):
        state_of("one").trainer(callbacks=best)
    every = pl.callbacks.ModelCheckpoint()
    for callbacks in ([every], [pl.callbacks.ModelCheckpoint("unused", monitor="val")]):
        trainer = state_of("one").trainer(callbacks=callbacks, accelerator="cpu")
        assert trainer.checkpoint_callbacks == callbacks
    state_of("one").trainer(callbacks=best, **QUIET)  # without a logger, its folder is always the same


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"reload_dataloaders_every_n_epochs": 1},
            "reload_dataloaders_every_n_epochs would replace the state's loader",
        ),
        ({"sync_batchnorm": True}, "sync_batchnorm=True needs GPUs"),
        (
            {"overfit_batches": 2},
            "overfit_batches trains on the same batches in each epoch, and the state's loader shuffl",
        ),
    ],
)
def test_settings_that_would_do_something_else_in_a_world_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        state_of("one").trainer(**settings)


def test_batches_that_come_in_the_same_order_in_each_epoch_may_be_overfitted() -> None:
    state = LightningState(Net("one"), loader=ElasticDataLoader(range(8), global_batch_size=4, shuffle=False))
    assert state.trainer(overfit_batches=1, **QUIET).overfit_batches == 1
