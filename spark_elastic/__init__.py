"""Elastic, fault-tolerant PyTorch training on Apache Spark.

    results = spark_elastic.run(train_fn, min_np=2, max_np=8)

Names are imported on first use, so that importing the package needs neither torch nor a JVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spark_elastic import data as data
    from spark_elastic import loggers as loggers
    from spark_elastic import testing as testing
    from spark_elastic import timeline as timeline
    from spark_elastic.checkpoint.newest import load_checkpoint as load_checkpoint
    from spark_elastic.checkpoint.newest import load_model as load_model
    from spark_elastic.driver.run import run as run
    from spark_elastic.errors import CheckpointError as CheckpointError
    from spark_elastic.errors import DamagedError as DamagedError
    from spark_elastic.errors import DataError as DataError
    from spark_elastic.errors import DiscoveryError as DiscoveryError
    from spark_elastic.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from spark_elastic.errors import JobCancelledError as JobCancelledError
    from spark_elastic.errors import NotEnoughHostsError as NotEnoughHostsError
    from spark_elastic.errors import NotFiniteLossError as NotFiniteLossError
    from spark_elastic.errors import NotInWorldError as NotInWorldError
    from spark_elastic.errors import RanksDifferError as RanksDifferError
    from spark_elastic.errors import ResetLimitExceededError as ResetLimitExceededError
    from spark_elastic.errors import SparkElasticError as SparkElasticError
    from spark_elastic.errors import StateLostError as StateLostError
    from spark_elastic.errors import TrainingCodeError as TrainingCodeError
    from spark_elastic.errors import TrainingFailedError as TrainingFailedError
    from spark_elastic.errors import WorkerFailure as WorkerFailure
    from spark_elastic.errors import WorkerLostError as WorkerLostError
    from spark_elastic.errors import WorldChanged as WorldChanged
    from spark_elastic.launchers.shutdown import shutdown as shutdown
    from spark_elastic.worker.collectives import allgather_object as allgather_object
    from spark_elastic.worker.collectives import allreduce as allreduce
    from spark_elastic.worker.collectives import barrier as barrier
    from spark_elastic.worker.collectives import broadcast_object as broadcast_object
    from spark_elastic.worker.context import cross_rank as cross_rank
    from spark_elastic.worker.context import cross_size as cross_size
    from spark_elastic.worker.context import device as device
    from spark_elastic.worker.context import generation as generation
    from spark_elastic.worker.context import local_rank as local_rank
    from spark_elastic.worker.context import local_size as local_size
    from spark_elastic.worker.context import process_group as process_group
    from spark_elastic.worker.context import rank as rank
    from spark_elastic.worker.context import size as size
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
    from spark_elastic.worker.elastic import elastic as elastic
    from spark_elastic.worker.optimizers.scaling import micro_batches as micro_batches
    from spark_elastic.worker.optimizers.scaling import scale_learning_rate as scale_learning_rate
    from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from spark_elastic.worker.state.base import State as State
    from spark_elastic.worker.state.fully_sharded.state import ShardedState as ShardedState
    from spark_elastic.worker.state.objects import ObjectState as ObjectState
    from spark_elastic.worker.state.torch_state import TorchState as TorchState

_MODULES = {
    "spark_elastic.checkpoint.newest": ("load_checkpoint", "load_model"),
    "spark_elastic.driver.run": ("run",),
    "spark_elastic.errors": (
        "CheckpointError",
        "DamagedError",
        "DataError",
        "DiscoveryError",
        "HostsUpdatedInterrupt",
        "JobCancelledError",
        "NotEnoughHostsError",
        "NotFiniteLossError",
        "NotInWorldError",
        "RanksDifferError",
        "ResetLimitExceededError",
        "SparkElasticError",
        "StateLostError",
        "TrainingCodeError",
        "TrainingFailedError",
        "WorkerFailure",
        "WorkerLostError",
        "WorldChanged",
    ),
    "spark_elastic.launchers.shutdown": ("shutdown",),
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
    "spark_elastic.worker.ddp.wrapper": ("DistributedDataParallel",),
    "spark_elastic.worker.elastic": ("elastic",),
    "spark_elastic.worker.optimizers.scaling": ("micro_batches", "scale_learning_rate"),
    "spark_elastic.worker.state.base": ("State",),
    "spark_elastic.worker.state.fully_sharded.state": ("ShardedState",),
    "spark_elastic.worker.state.objects": ("ObjectState",),
    "spark_elastic.worker.state.torch_state": ("TorchState",),
    "spark_elastic.worker.optimizers.zero": ("ZeroRedundancyOptimizer",),
}
_SUBMODULES = ("data", "loggers", "testing", "timeline")
# Those that need more than torch, which ``import *`` leaves out.
_WITH_OTHERS = ("estimator", "huggingface", "keras", "lightning")
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_HOME, *_SUBMODULES])


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES or name in _WITH_OTHERS:
        return importlib.import_module(f"spark_elastic.{name}")
    raise AttributeError(f"module 'spark_elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
