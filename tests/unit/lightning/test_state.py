"""LightningState: what it takes from configure_optimizers, and what a Trainer may be given; test_frameworks.py has jobs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_nets import QUIET, Net, state_of

from spark_elastic.data import ElasticDataLoader
from spark_elastic.lightning import LightningState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("form", "schedulers"), [("one", 0), ("lists", 1), ("dict", 1)])
def test_optimizers_and_schedulers_are_kept_in_each_form_that_lightning_knows(form: str, schedulers: int) -> None:
    state: Any = state_of(form)
    assert (len(state.optimizers), len(state.schedulers)) == (1, schedulers)
    module = state.model.module
    assert module.configure_optimizers() is module.configure_optimizers()


def test_a_module_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Net\.configure_optimizers returns no optimizer"):
        state_of("none")


def test_a_loader_with_shards_is_refused_as_a_trainer_computes_a_batch_whole() -> None:
    loader = ElasticDataLoader(range(8), global_batch_size=4, shards=2)
    with pytest.raises(ValueError, match=r"shards=2, for a loop over model.parts\(batch\), and a Trainer computes"):
        LightningState(Net("one"), loader=loader)


def test_a_module_that_optimizes_by_hand_is_refused() -> None:
    net = Net("one")
    net.automatic_optimization = False
    with pytest.raises(ValueError, match="Net has automatic_optimization=False"):
        LightningState(net, loader=ElasticDataLoader(range(8), global_batch_size=4))


def test_a_callback_that_writes_checkpoints_needs_no_further_setting() -> None:
    state = state_of("one")
    assert not state.trainer(**QUIET).checkpoint_callbacks
    callback = pl.callbacks.ModelCheckpoint("unused")
    assert state.trainer(callbacks=[callback], **QUIET).checkpoint_callbacks == [callback]


@pytest.mark.parametrize("name", ["strategy", "devices", "num_nodes", "use_distributed_sampler"])
def test_what_the_job_decides_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is decided by the job"):
        state_of("one").trainer(**{name: 1})


def test_the_module_is_on_the_device_before_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta, which no State takes, stands in for a GPU."""
    monkeypatch.setattr("spark_elastic.lightning.state.device", lambda: torch.device("meta"))
    with pytest.raises(TypeError, match=r"net\.weight is a tensor without data, on the meta device"):
        state_of("one")


class Asking(Net):
    """Sizes its schedule by its Trainer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, self.trainer.estimated_stepping_batches)
        ]


def test_a_module_that_asks_for_its_trainer_too_early_is_told_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"Asking\.configure_optimizers asks for its Trainer.* epochs \* len\(loader\)"
    ):
        LightningState(Asking("one"), loader=ElasticDataLoader(range(8), global_batch_size=4))


class Stopwatch(pl.callbacks.Timer):
    pass


@pytest.mark.parametrize(
    ("settings", "clock"),
    [({"max_time": {"hours": 1}}, "Timer"), ({"callbacks": Stopwatch(duration={"hours": 1})}, "Stopwatch")],
)
def test_what_lightning_logs_is_each_ranks_own_and_everything_else_is_compared(settings: Any, clock: str) -> None:
    state: Any = state_of("one")
    assert state._compared_values()["progress"] is None
    state.trainer(**settings, **QUIET)
    callbacks = {clock: {"time_elapsed": {"train": 5.77}}, "EarlyStopping": {"wait_count": 1}}
    shared = {"loops": {"epoch": 1}, "should_stop": False}
    state.progress = {**shared, "metrics": {"train_loss": torch.tensor(0.5)}, "callbacks": callbacks}
    compared = state._compared_values()["progress"]
    assert compared == {**shared, "callbacks": {"EarlyStopping": {"wait_count": 1}}}
    assert "optimizers" in state._compared_values()
