"""The examples with other libraries' loops and Trainers: with workers lost on the way they end where an undisturbed loop ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from examples_here import example, run_main
from huggingface_training import Counting, Patience, Plain, stop_on_one_rank
from huggingface_training import train as train_by_hugging_face
from transformers import EarlyStoppingCallback

import spark_elastic
from spark_elastic import TrainingFailedError
from spark_elastic.data import ElasticDataLoader
from spark_elastic.task.process_setting import PRELOAD_VARIABLE
from spark_elastic.testing import kill

ITEMS, EPOCHS = 1000, 2
STEPS = 16  # an epoch, in batches of 64
COURSE = ["--workers", "3", "--items", str(ITEMS), "--epochs", str(EPOCHS)]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Keep what these libraries write into the environment from other tests. Local workers find the libraries imported."""
    with mock.patch.dict(os.environ, {PRELOAD_VARIABLE: "lightning.pytorch, transformers.trainer"}):
        yield


def assert_all_are(expected: dict[str, Any], results: list[dict[str, Any]]) -> None:
    assert len({result["weights"] for result in results}) == 1
    for result in results:
        assert result == pytest.approx(expected, rel=1e-3)


def test_a_loop_of_accelerate_goes_on_in_memory(spark: Any) -> None:
    results = run_main("accelerate_loop", *COURSE, "--precision", "no", faults=[kill(rank=0, step=20)])
    assert_all_are(example("accelerate_loop").train_fn(ITEMS, EPOCHS, "no"), results)


def test_a_loop_of_fabric_goes_on_in_memory() -> None:
    results = run_main("fabric", *COURSE, "--precision", "32-true", "--local", faults=[kill(rank=0, step=20)])
    assert_all_are(example("fabric").train_fn(ITEMS, EPOCHS, "32-true"), results)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_lightning_goes_on_in_memory_between_two_epochs_and_within_one() -> None:
    # Of an epoch, the commits are one at its start and one for each batch but the last, which the next epoch's start commits.
    between, within = kill(rank=0, step=STEPS + 1, at="committed"), kill(rank=1, step=STEPS + 10)
    results = run_main("lightning_trainer", *COURSE, "--local", faults=[between, within])
    assert_all_are(by_hand(example("lightning_trainer")), results)


def train_by_lightning(own_loader: bool, states_loader: bool) -> dict[str, float]:
    """Train an epoch and log a mean of whole numbers and one of fractions; return them, and the rows that were trained."""
    import lightning.pytorch as pl
    import torch

    import spark_elastic as se
    from spark_elastic.lightning import LightningState

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rows = torch.nn.Linear(1, 1), 0

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.rows += len(batch)
            self.log("rank", torch.tensor(3 * se.rank()), on_step=False, on_epoch=True, sync_dist=True)
            self.log("half", torch.tensor(0.5 * se.rank()), sync_dist=True)
            return self.net(batch.float().unsqueeze(1)).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = Net()
    state = LightningState(net, loader=se.data.ElasticDataLoader(range(32), global_batch_size=8))

    @se.elastic
    def train(state: Any) -> dict[str, float]:
        trainer = state.trainer(max_epochs=1, enable_progress_bar=False, logger=False)
        loaders = [torch.utils.data.DataLoader(range(32), batch_size=4)] if own_loader else []
        loaders += [state.loader] if states_loader else []
        trainer.fit(net, loaders[0] if len(loaders) == 1 else loaders)
        alone = [torch.distributed.new_group([rank]) for rank in range(se.size())][se.rank()]
        own = trainer.strategy.reduce(torch.tensor(4), group=alone).item()
        return {"own": own, **{name: value.item() for name, value in trainer.callback_metrics.items()}}

    return {**train(state), "rows": net.rows}


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_means_over_ranks_of_whole_numbers_too_and_trains_on_no_loader_but_the_states() -> None:
    where: dict[str, Any] = {"local": True, "num_proc": 2, "max_np": 2}
    results = spark_elastic.run(train_by_lightning, (False, True), **where)
    assert [each.pop("rows") for each in results] == [16, 16]
    assert results[0] == results[1] == {"own": 4, "rank": 1.5, "half": 0.25}
    for states_loader in (False, True):
        with pytest.raises(
            TrainingFailedError, match=r"loader that is not the state's.*trainer\.fit\(module, state\.loader\)"
        ):
            spark_elastic.run(train_by_lightning, (True, states_loader), **where)


def train_with_plateau(accumulated: int, folder: Path) -> dict[str, float]:
    """Train three epochs by Lightning with a learning rate that every epoch halves; batches may accumulate.

    One logger, for the Trainers of all worlds, writes each validation into ``folder`` at once.
    """
    import lightning.pytorch as pl
    import torch

    import spark_elastic as se
    from spark_elastic.lightning import LightningState

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            torch.nn.init.ones_(self.net.weight)
            torch.nn.init.zeros_(self.net.bias)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch.float().unsqueeze(1)).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val", torch.tensor(1.0), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

    net = Net()
    state = LightningState(net, loader=se.data.ElasticDataLoader(range(64), global_batch_size=8))
    logger = pl.loggers.CSVLogger(folder, name=None, flush_logs_every_n_steps=1)

    @se.elastic
    def train(state: Any) -> None:
        trainer = state.trainer(
            max_epochs=3,
            accumulate_grad_batches=accumulated,
            enable_progress_bar=False,
            logger=logger,
            accelerator="cpu",
        )
        trainer.fit(net, state.loader, torch.utils.data.DataLoader(range(4), batch_size=2))

    train(state)
    return {"weight": net.net.weight.item(), "rate": state.optimizers[0].param_groups[0]["lr"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_lowers_the_rate_at_a_plateau_and_accumulates_as_often_through_a_loss(
    run: Any, accumulated: int, tmp_path: Path
) -> None:
    """The second world validates once, and the third one twice. Each writes a file, and deletes none."""
    # A worker alone, until another one has come, would add up in another order.
    quiet = run(train_with_plateau, accumulated, tmp_path / "quiet", min_np=2, max_np=2, num_proc=2)
    faults = [kill(rank=1, step=3), kill(rank=0, step=14 // accumulated)]
    struck = run(train_with_plateau, accumulated, tmp_path / "struck", min_np=2, max_np=2, num_proc=2, faults=faults)
    assert struck.faults == 2
    for result in struck.results:
        assert result == pytest.approx(quiet.results[0], rel=1e-6)
    for name, rows in [("quiet", {"version_0": 3}), ("struck", {"version_1": 1, "version_2": 2})]:
        files = (tmp_path / name).glob("version_*/metrics.csv")
        assert {path.parent.name: len(path.read_text().splitlines()) - 1 for path in files} == rows


def train_to_an_early_stop(every: int, interval: str, folder: Path, mark: Path | None = None) -> dict[str, Any]:
    """Train by Lightning with validations within each epoch, which lower the rate, choose a checkpoint and stop training.

    If ``mark`` is given, rank 0 dies once, as soon as it has written its second checkpoint, and leaves that file.
    """
    import os
    import signal
    import warnings

    import lightning.pytorch as pl
    import torch
    import torchmetrics
    from lightning.pytorch.plugins import TorchCheckpointIO

    import spark_elastic as se
    from spark_elastic.lightning import LightningState

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rows = torch.nn.Linear(1, 1), torchmetrics.SumMetric()
            torch.nn.init.ones_(self.net.weight)
            torch.nn.init.zeros_(self.net.bias)

        def loss(self, batch: torch.Tensor, target: float) -> torch.Tensor:
            return (self.net(batch.float().unsqueeze(1)) - target).square().mean()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.loss(batch / 64, 0.3)
            self.log("mean", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            state.ended += 1

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val", self.loss(batch / 4, 0.5), sync_dist=True)
            self.rows.update(len(batch))
            self.log("rows", self.rows)
            self.log("sum", torch.tensor(float(len(batch))), reduce_fx="sum", sync_dist=True)

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                state.validated.append(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            # Between two validations a step has the metrics of the last one.
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=4, factor=0.7)
            how = {"monitor": "val", "interval": interval, "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}

    class Files(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            if mark is not None and not mark.exists() and len(state.validated) == 1:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    net = Net()
    loader = se.data.ElasticDataLoader(range(64), global_batch_size=4)
    state: Any = LightningState(net, loader=loader, ended=0, validated=[])

    @se.elastic
    def train(state: Any) -> dict[str, Any]:
        stopping = pl.callbacks.EarlyStopping("val", patience=4)
        keeping = pl.callbacks.ModelCheckpoint(folder, "{step}", "val")
        how = {
            "max_epochs": 6,
            "val_check_interval": every,
            "callbacks": [stopping, keeping],
            "enable_checkpointing": True,
            "plugins": [Files()],
        }
        quiet = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
        trainer = state.trainer(**how, **quiet)
        trainer.fit(net, state.loader, torch.utils.data.DataLoader(range(4), batch_size=2))
        logged = {name: float(trainer.callback_metrics[name]) for name in ("rows", "sum")}
        stopped = {"step": trainer.global_step, "stopped": trainer.should_stop, "waited": stopping.wait_count}
        return {"best": Path(keeping.best_model_path).name, **stopped, **logged}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(state)
    return {
        **found,
        "warned": any("cover the batches since the world changed" in str(each.message) for each in caught),
        "weights": [net.net.weight.item(), net.net.bias.item(), state.optimizers[0].param_groups[0]["lr"]],
        "ended": state.ended,
        "validated": state.validated,
    }


def train_by_epochs(max_steps: int, every: int | None = None, mark: Path | None = None) -> dict[str, Any]:
    """Train by Lightning with a loss that differs from epoch to epoch, and gradients of four batches from the second on.

    If ``mark`` is given, rank 0 dies once after the last step, and leaves that file.
    """
    import os
    import signal

    import lightning.pytorch as pl
    import torch

    import spark_elastic as se
    from spark_elastic.lightning import LightningState

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.factor = torch.nn.Linear(1, 1), 0.0
            torch.nn.init.ones_(self.net.weight)
            torch.nn.init.zeros_(self.net.bias)

        def on_train_epoch_start(self) -> None:
            self.factor = 1.0 + self.current_epoch

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return (self.net(batch.float().unsqueeze(1) / 64) - self.factor).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("val", torch.tensor(1.0), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.starts, self.ends = 0, [0]

        def on_train_epoch_start(self, *_: Any) -> None:
            self.starts += 1

        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            self.ends.append(trainer.global_step)
            is_last = trainer.global_step in (max_steps, 24)
            if is_last and mark is not None and se.rank() == 0 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def state_dict(self) -> dict[str, Any]:
            return {"starts": self.starts, "ends": self.ends}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    net = Net()
    state: Any = LightningState(net, loader=se.data.ElasticDataLoader(range(64), global_batch_size=4))

    @se.elastic
    def train(state: Any) -> dict[str, Any]:
        counts = Counts()
        more = [] if every is None else [pl.callbacks.EarlyStopping("val", patience=1)]
        batches = {0: 1, 1: 4} if every is None else {0: 4}
        how = {"callbacks": [counts, pl.callbacks.GradientAccumulationScheduler(batches), *more]}
        how |= {"max_epochs": 3, "max_steps": max_steps, "val_check_interval": every}
        trainer = state.trainer(**how, enable_progress_bar=False, logger=False, accelerator="cpu")
        trainer.fit(net, state.loader, torch.utils.data.DataLoader(range(4), batch_size=2))
        return {"step": trainer.global_step, "epoch": trainer.current_epoch, **counts.state_dict()}

    return {**train(state), "weights": [net.net.weight.item(), net.net.bias.item()]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_steps", [-1, 18])
def test_lightning_begins_epochs_and_ends_within_one_as_if_no_worker_had_been_lost(
    run: Any, tmp_path: Path, max_steps: int
) -> None:
    """Commit 17 is that of the start of the second epoch, as are 18 and 19 after losses. The last of 18 steps is commit 21.

    If a rank dies before the other one has made the same commit, that one is made again, and the last step is a commit earlier.
    So the last two faults may strike or not.
    """
    quiet = run(train_by_epochs, max_steps, num_proc=1, min_np=1, max_np=1).results[0]
    last = 21 if max_steps > 0 else 24
    faults = [kill(rank=1, step=6), kill(rank=0, step=17, at="committed"), kill(rank=1, step=18)]
    faults += [kill(rank=0, step=step, at="committed") for step in (last - 1, last)]
    struck = run(train_by_epochs, max_steps, None, tmp_path / "died", num_proc=2, min_np=2, max_np=2, faults=faults)
    assert 3 <= struck.faults <= 5
    assert (tmp_path / "died").exists()
    assert quiet["ends"] == ([0, 16, 18] if max_steps > 0 else [0, 16, 20, 24])
    weights = quiet.pop("weights")
    for result in struck.results:
        assert result.pop("weights") == pytest.approx(weights, rel=1e-5)
        assert result == quiet


@pytest.mark.filterwarnings("ignore")
def test_lightning_stops_early_while_gradients_accumulate(run: Any) -> None:
    # In the sixth batch, two after the first step.
    assert [result["step"] for result in run(train_by_epochs, -1, 3, num_proc=2, max_np=2).results] == [1, 1]


@pytest.mark.parametrize(("every", "interval"), [(5, "epoch"), (4, "step")])
def test_lightning_validates_within_epochs_and_stops_early_as_if_no_worker_had_been_lost(
    run: Any, every: int, interval: str, tmp_path: Path
) -> None:
    """Commit 11 is that of step 10, after which the one of the two cases validates, and the other one in two steps.

    A checkpoint whose writer dies before the commit is written again, under the same name.
    """
    quiet = run(train_to_an_early_stop, every, interval, tmp_path / "quiet", num_proc=1, min_np=1, max_np=1).results[0]
    within = [kill(rank=1, step=6), kill(rank=0, step=11, at="committed"), kill(rank=1, step=14)]
    later = [kill(rank=0, step=18, at="committed"), kill(rank=1, step=35)]
    over = kill(rank=0, step=quiet["step"] + 1, at="committed")
    arguments = (train_to_an_early_stop, every, interval, tmp_path / "struck", tmp_path / "died")
    struck = run(*arguments, num_proc=2, min_np=2, max_np=2, faults=[*within, *later, over])
    assert struck.faults == 6
    assert (tmp_path / "died").exists()
    assert (quiet.pop("stopped"), quiet.pop("warned")) == (True, False)
    assert quiet["rows"] == quiet["sum"] == 4
    assert quiet["best"] not in ("", f"step={quiet['validated'][0]}.ckpt")
    assert [each.name for each in (tmp_path / "struck").iterdir()] == [quiet["best"]]
    weights = quiet.pop("weights")
    # A worker that came when training was over has not seen an epoch.
    warned = [result.pop("warned") for result in struck.results]
    assert any(warned)
    for result in struck.results:
        assert result.pop("stopped")
        assert result.pop("weights") == pytest.approx(weights, rel=1e-5)
        assert result == quiet


def by_hand(script: Any) -> dict[str, Any]:
    """Train the same module without a Trainer."""
    torch.manual_seed(0)
    lit = script.LitNet()
    (optimizer,), (scheduler,) = lit.configure_optimizers()
    loader = ElasticDataLoader(script.Digits(ITEMS), global_batch_size=64)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(lit.net(pictures), labels).backward()
            optimizer.step()
        scheduler.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in lit.parameters()])
    rate = optimizer.param_groups[0]["lr"]
    return {"items": EPOCHS * ITEMS, "right": 1.0, "rate": rate, "weights": weights.double().abs().sum().item()}


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_goes_on_in_memory_between_two_epochs_and_within_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    between, within = kill(rank=0, step=STEPS, at="committed"), kill(rank=1, step=STEPS + 9)
    results = run_main("huggingface_trainer", *COURSE, "--local", faults=[between, within])
    assert "equal on all ranks" not in capfd.readouterr().err
    alone = example("huggingface_trainer").train_fn(ITEMS, EPOCHS)
    assert alone["items"] == EPOCHS * ITEMS
    assert 0 < alone["loss"] < 0.1
    assert_all_are(alone, results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stopping", "model"), [(EarlyStoppingCallback, "untold"), (Patience, "tagger"), (Counting, "tagger")]
)
def test_the_trainer_of_hugging_face_stops_early_and_logs_as_if_no_worker_had_been_lost(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], stopping: Any, model: str
) -> None:
    """The world has to be whole again after each loss, by a newcomer that has seen no evaluation of the epochs before."""
    steps = 6  # an epoch
    faults = [kill(rank=0, step=2 * steps, at="committed"), kill(rank=1, step=2 * steps + 4)]
    where = {"output_dir": str(tmp_path), "stopping": stopping, "model": model, "eval_on_start": model == "untold"}
    done = run(train_by_hugging_face, kwargs=where, num_proc=2, min_np=2, max_np=2, faults=faults)
    assert done.faults == 2
    assert "equal on all ranks" not in capfd.readouterr().err
    expected: dict[str, Any] = train_by_hugging_face(Plain, **where)
    assert expected["steps"] == 3 * steps
    for result in done.results:
        assert result.pop("names") == expected["names"]
        for name, value in result.items():
            assert value == pytest.approx(expected[name], rel=2e-3, abs=1e-5), name


@pytest.mark.filterwarnings("ignore")
def test_the_fit_of_keras_goes_on_in_memory_at_the_end_of_an_epoch_and_within_one() -> None:
    # An epoch's last batch is committed with what callbacks do at its end.
    between, within = kill(rank=0, step=STEPS, at="committed"), kill(rank=1, step=STEPS + 9)
    results = run_main("keras_fit", *COURSE, "--local", faults=[between, within])
    assert_all_are(example("keras_fit").train_fn(ITEMS, EPOCHS), results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", ["on_step_end", "on_log"])
def test_the_trainer_of_hugging_face_stops_on_all_ranks_where_a_callback_stops_one(
    run: Any, tmp_path: Path, hook: str
) -> None:
    assert run(stop_on_one_rank, str(tmp_path), hook, num_proc=2, min_np=2, max_np=2).results == [3, 3]


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_makes_no_step_after_the_last_where_a_worker_is_lost_then(
    run: Any, tmp_path: Path
) -> None:
    """Of an epoch of six steps, the last is the fourth."""
    how = {"output_dir": str(tmp_path), "max_steps": 10}
    done = run(
        train_by_hugging_face,
        kwargs=how,
        num_proc=2,
        min_np=2,
        max_np=2,
        faults=[kill(rank=1, step=10, at="committed")],
    )
    assert done.faults == 1
    assert [result["steps"] for result in done.results] == [10, 10]
