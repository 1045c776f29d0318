"""Elastic, fault-tolerant PyTorch training on Apache Spark.

    results = spark_elastic.run(train_fn, min_np=2, max_np=8)

Names are imported on first use, so that importing the package needs neither torch nor a JVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spark_elastic import data, testing
    from spark_elastic.checkpoint.newest import load_checkpoint
    from spark_elastic.driver.run import run
    from spark_elastic.errors import (
        CheckpointError,
        DamagedError,
        DataError,
        HostsUpdatedInterrupt,
        JobCancelledError,
        NotEnoughHostsError,
        NotFiniteLossError,
        NotInWorldError,
        RanksDifferError,
        ResetLimitExceededError,
        SparkElasticError,
        StateLostError,
        TrainingFailedError,
        WorkerFailure,
        WorkerLostError,
    )
    from spark_elastic.worker.collectives import allgather_object, allreduce, barrier, broadcast_object
    from spark_elastic.worker.context import (
        cross_rank,
        cross_size,
        device,
        generation,
        local_rank,
        local_size,
        process_group,
        rank,
        size,
    )
    from spark_elastic.worker.ddp import DistributedDataParallel
    from spark_elastic.worker.elastic import elastic
    from spark_elastic.worker.scaling import micro_batches, scale_learning_rate
    from spark_elastic.worker.state.base import State
    from spark_elastic.worker.state.objects import ObjectState
    from spark_elastic.worker.state.torch_state import TorchState

_MODULES = {
    "spark_elastic.checkpoint.newest": ("load_checkpoint",),
    "spark_elastic.driver.run": ("run",),
    "spark_elastic.errors": (
        "CheckpointError",
        "DamagedError",
        "DataError",
        "HostsUpdatedInterrupt",
        "JobCancelledError",
        "NotEnoughHostsError",
        "NotFiniteLossError",
        "NotInWorldError",
        "RanksDifferError",
        "ResetLimitExceededError",
        "SparkElasticError",
        "StateLostError",
        "TrainingFailedError",
        "WorkerFailure",
        "WorkerLostError",
    ),
    "spark_elastic.worker.collectives": ("allgather_object", "allreduce", "barrier", "broadcast_object"),
    "spark_elastic.worker.context": (
        "cross_rank",
        "cross_size",
        "device",
        "generation",
        "local_rank",
        "local_size",
        "process_group",
        "rank",
        "size",
    ),
    "spark_elastic.worker.ddp": ("DistributedDataParallel",),
    "spark_elastic.worker.elastic": ("elastic",),
    "spark_elastic.worker.scaling": ("micro_batches", "scale_learning_rate"),
    "spark_elastic.worker.state.base": ("State",),
    "spark_elastic.worker.state.objects": ("ObjectState",),
    "spark_elastic.worker.state.torch_state": ("TorchState",),
}
_SUBMODULES = ("data", "testing")
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckpointError",
    "DamagedError",
    "DataError",
    "DistributedDataParallel",
    "HostsUpdatedInterrupt",
    "JobCancelledError",
    "NotEnoughHostsError",
    "NotFiniteLossError",
    "NotInWorldError",
    "ObjectState",
    "RanksDifferError",
    "ResetLimitExceededError",
    "SparkElasticError",
    "State",
    "StateLostError",
    "TorchState",
    "TrainingFailedError",
    "WorkerFailure",
    "WorkerLostError",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "data",
    "device",
    "elastic",
    "generation",
    "load_checkpoint",
    "local_rank",
    "local_size",
    "micro_batches",
    "process_group",
    "rank",
    "run",
    "scale_learning_rate",
    "size",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"spark_elastic.{name}")
    raise AttributeError(f"module 'spark_elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
