"""A LightningModule with one weight, and its state."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from spark_elastic.data import ElasticDataLoader
from spark_elastic.lightning import LightningState

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


def trainer_of(state: Any) -> Any:
    return state.trainer(accelerator="cpu", logger=False)
