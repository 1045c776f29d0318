"""LightningState: what it takes from configure_optimizers, and what a Trainer may be given; test_frameworks.py has jobs."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import TrainingCodeError
from spark_elastic.lightning import LightningState

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Net(pl.LightningModule):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.net = form, torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "one": optimizer,
            "lists": ([optimizer], [scheduler]),
            "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}},
            "none": None,
        }[self.form]


def state_of(form: str) -> LightningState:
    return LightningState(Net(form), loader=ElasticDataLoader(range(8), global_batch_size=4))


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


def test_a_callback_that_writes_checkpoints_needs_no_further_setting() -> None:
    state = state_of("one")
    assert not state.trainer(**QUIET).checkpoint_callbacks
    callback = pl.callbacks.ModelCheckpoint("unused")
    assert state.trainer(callbacks=[callback], **QUIET).checkpoint_callbacks == [callback]


@pytest.mark.parametrize("name", ["strategy", "devices", "num_nodes", "use_distributed_sampler"])
def test_what_the_job_decides_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is decided by the job"):
        state_of("one").trainer(**{name: 1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"reload_dataloaders_every_n_epochs": 1},
            "reload_dataloaders_every_n_epochs would replace the state's loader",
        ),
        ({"sync_batchnorm": True}, "sync_batchnorm=True needs GPUs"),
        ({"logger": pl.loggers.CSVLogger(".", version="y")}, r"CSVLogger\(version=…\) deletes"),
        ({"logger": [pl.loggers.CSVLogger(".", version=0)]}, r"CSVLogger\(version=…\) deletes"),
    ],
)
def test_settings_that_would_do_something_else_in_a_world_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        state_of("one").trainer(**settings)


class Fits(Net):
    """Uses but one of its layers."""

    def __init__(self) -> None:
        super().__init__("one")
        self.unused = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch.float().unsqueeze(1)).mean()


def fit(state: LightningState, epochs: int) -> None:
    state.trainer(max_epochs=epochs, **QUIET).fit(state.model.module, state.loader)  # type: ignore[attr-defined]


@pytest.fixture
def alone() -> Iterator[None]:
    """Take back what a Trainer outside a job leaves: variables, a number of threads, and a process group."""
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


def rows_of(folder: Path) -> list[str]:
    """Return the values of ``rows`` that a CSV logger has written into a folder."""
    with (folder / "metrics.csv").open() as file:
        return [row["rows"] for row in csv.DictReader(file)]


class Logs(Net):
    """Logs how many rows a batch has."""

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.log("rows", float(len(batch)))
        return self.net(batch.float().unsqueeze(1)).mean()


@pytest.mark.usefixtures("alone")
def test_a_csv_logger_goes_on_in_its_folder_and_begins_another_one_in_each_world(tmp_path: Path) -> None:
    state: Any = LightningState(Logs("one"), loader=ElasticDataLoader(range(8), global_batch_size=4))
    logger = pl.loggers.CSVLogger(tmp_path, name="")
    settings = {**QUIET, "logger": [logger], "log_every_n_steps": 1}

    def fit_to(epochs: int) -> None:
        state.trainer(max_epochs=epochs, **settings).fit(state.model.module, state.loader)

    state._begin(None)
    fit_to(1)
    fit_to(2)
    assert rows_of(tmp_path / "version_0") == ["4.0"] * 4
    logger.log_metrics({"rows": 1}, step=5)  # after the fits, which have written their own
    state._enter_world(0, 1)
    fit_to(3)
    assert rows_of(tmp_path / "version_0") == ["4.0"] * 4 + ["1"]
    assert rows_of(tmp_path / "version_1") == ["4.0"] * 2


def test_a_csv_logger_deletes_no_file_of_a_rank_that_was_lost(tmp_path: Path) -> None:
    """All ranks choose a folder, and only rank 0 writes into it, also after its loss, when it is another one."""
    state: Any = state_of("one")
    lost, own = (pl.loggers.CSVLogger(tmp_path, name="") for _ in range(2))
    state.trainer(**{**QUIET, "logger": own})
    assert own.version == lost.version == 0
    lost.log_metrics({"rows": 1}, step=0)
    lost.save()
    state._enter_world(0, 1)
    state.trainer(**{**QUIET, "logger": own})
    own.log_metrics({"rows": 2}, step=1)
    own.save()
    assert rows_of(tmp_path / "version_0") == ["1"]
    assert rows_of(tmp_path / "version_1") == ["2"]


def test_on_a_gpu_lightning_looks_for_no_torch_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it registers hooks for communication, with torch's wrapper, even if nobody has given any."""
    state = state_of("one")
    strategy: Any = state.trainer(accelerator="cpu", logger=False).strategy
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda", 0))
    strategy.model = state.model
    strategy._register_ddp_hooks()


def test_the_module_is_on_the_device_before_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta, which no State takes, stands in for a GPU."""
    monkeypatch.setattr("spark_elastic.lightning.device", lambda: torch.device("meta"))
    with pytest.raises(TypeError, match=r"net\.weight is a tensor without data, on the meta device"):
        state_of("one")


def test_a_trainer_that_has_ended_leaves_module_and_optimizers_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning moves both to the CPU, and the next world's Trainer back."""
    state = state_of("one")
    module: Any = state.model.module
    optimizer = state.optimizers[0]
    strategy: Any = state.trainer(accelerator="cpu", logger=False).strategy
    strategy.connect(module)
    strategy.optimizers = [optimizer]
    optimizer.state[module.net.weight]["momentum_buffer"] = torch.ones(1, 1, device="meta")
    moved: list[object] = []
    monkeypatch.setattr(module, "cpu", lambda: moved.append(module))
    strategy.teardown()
    assert not moved
    assert optimizer.state[module.net.weight]["momentum_buffer"].is_meta
    assert strategy.lightning_module is module
    assert strategy.optimizers == [optimizer]


class Late(Net):
    """Makes a layer when it knows for what."""

    def setup(self, stage: str) -> None:
        self.head = torch.nn.Linear(1, 1)


def trainer_of(state: Any) -> Any:
    return state.trainer(accelerator="cpu", logger=False)


def committing(trainer: Any) -> Any:
    return next(callback for callback in trainer.callbacks if type(callback).__name__ == "_Commit")


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
