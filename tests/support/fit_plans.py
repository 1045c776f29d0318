"""Fits of a line in one process: y = 2 x in 100 rows, with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective
from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan
from spark_elastic.estimator.runs import describe_callbacks

ROWS = 100


def write_line(folder: Path) -> str:
    """Write the rows into a folder, and return its URL."""
    x = np.linspace(-1, 1, ROWS)
    table = pa.table({"x": x, "y": 2 * x, "w": np.abs(x)})
    pq.write_table(table, folder / "part.parquet", row_group_size=30)
    return folder.as_uri()


def plan(dataset: str, **changes: Any) -> TrainingPlan:
    torch.manual_seed(0)
    sizes = {"batch_size": 10, "global_batch_size": None, "validation_batch_size": 16}
    data = {**sizes, "validation_url": dataset, **changes.pop("data", {})}
    steps = {"optimizer": torch.optim.SGD, "optimizer_arguments": {"lr": 0.1}, **changes.pop("steps", {})}
    given: dict[str, Any] = {
        "run_id": "run",
        "model": nn.Linear(1, 1),
        "layout": Layout((Input(None, ("x",), expand=True),), ("y",), changes.pop("weight", None)),
        "objective": Objective((nn.MSELoss(),)),
        "epochs": 2,
        "steps_per_epoch": None,
        "checkpoint_steps": None,
        "seed": 1,
        "callbacks": cloudpickle.dumps(callbacks := changes.pop("callbacks", [])),
        "callbacks_given": describe_callbacks(callbacks),
        "log_url": None,
        "use_gpu": None,
        **changes,
    }
    loading = DataPlan(training_url=dataset, **{"shuffle": True, "seed": 1, **data})
    return TrainingPlan(data=loading, steps=StepPlan(**steps), **given)
