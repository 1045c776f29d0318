"""The callback that commits: what it tells of, and what it refuses; test_frameworks.py has jobs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_nets import QUIET, Net, state_of, trainer_of

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import TrainingCodeError
from spark_elastic.lightning import LightningState

pytestmark = pytest.mark.filterwarnings("ignore")


class Fits(Net):
    """Uses but one of its layers."""

    def __init__(self) -> None:
        super().__init__("one")
        self.unused = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch.float().unsqueeze(1)).mean()


def fit(state: LightningState, epochs: int) -> None:
    state.trainer(max_epochs=epochs, **QUIET).fit(state.model.module, state.loader)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("alone")
def test_a_second_fit_that_trains_nothing_is_told_of() -> None:
    loader = ElasticDataLoader(range(8), global_batch_size=4)
    state: Any = LightningState(Fits(), loader=loader, find_unused_parameters=True)
    assert state.model._ddp_kwargs == {"find_unused_parameters": True}
    state._begin(None)
    fit(state, 1)
    with pytest.warns(UserWarning, match="has trained 1 epochs already"):
        fit(state, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*epochs already")
        fit(state, 2)
        state._enter_world(0, 1)  # where all fits are entered again
        fit(state, 1)


class Late(Net):
    """Makes a layer when it knows for what."""

    def setup(self, stage: str) -> None:
        self.head = torch.nn.Linear(1, 1)


def committing(trainer: Any) -> Any:
    return next(callback for callback in trainer.callbacks if type(callback).__name__ == "Commits")


def test_a_layer_that_no_optimizer_has_is_an_error() -> None:
    state = LightningState(Late("one"), loader=ElasticDataLoader(range(8), global_batch_size=4))
    module: Any = state.model.module
    module.setup("fit")
    fitted = SimpleNamespace(train_dataloader=state.loader)
    with pytest.raises(TrainingCodeError, match=r"head\.weight of Late was made after its LightningState"):
        committing(trainer_of(state)).on_train_start(fitted, module)
    module.head.requires_grad_(False)
    committing(trainer_of(state)).on_train_start(fitted, module)


def test_a_file_that_each_world_would_go_back_to_is_an_error() -> None:
    state = state_of("one")
    trainer = trainer_of(state)
    commits = committing(trainer)
    commits.on_load_checkpoint(trainer, state.model.module, {})  # test(ckpt_path=…) trains nothing
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(TrainingCodeError, match=r"fit\(ckpt_path=…\) would load that file again"):
        commits.on_load_checkpoint(trainer, state.model.module, {})
