"""A CSV logger writes into one folder in each world, and deletes no file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_nets import QUIET, Net, state_of

from spark_elastic.data import ElasticDataLoader
from spark_elastic.lightning import LightningState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "logger", [pl.loggers.CSVLogger(".", version="y"), [pl.loggers.CSVLogger(".", version=0)]], ids=["one", "several"]
)
def test_a_csv_logger_with_a_version_of_the_users_is_refused(logger: Any) -> None:
    with pytest.raises(ValueError, match=r"CSVLogger\(version=…\) deletes"):
        state_of("one").trainer(logger=logger)


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
