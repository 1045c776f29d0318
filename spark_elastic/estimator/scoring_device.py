"""On which device a Spark task scores."""

from __future__ import annotations

import functools
import os

import torch
from pyspark import TaskContext

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.gpus import gpu_at, visible_gpus


def scoring_device(use_gpu: bool | None) -> torch.device:
    """Return the device on which a Spark task scores: its assigned GPU, unless ``use_gpu`` is False; else the CPU.

    Raises SparkElasticError if ``use_gpu`` is True and no GPU is assigned, or torch cannot use it.
    """
    context = TaskContext.get()
    resources = context.resources() if context is not None and use_gpu is not False else {}
    addresses = resources["gpu"].addresses if "gpu" in resources else []
    if use_gpu and not addresses:
        raise SparkElasticError("useGpu=True, but Spark has assigned no GPU: set spark.task.resource.gpu.amount=1")
    if not addresses:
        return torch.device("cpu")
    place = place_of(addresses[0])  # comes first: CUDA reads its variable at its first use
    if torch.cuda.is_available():
        return torch.device("cuda", place)
    if use_gpu:
        raise SparkElasticError(
            f"useGpu=True, but torch {torch.__version__} cannot use GPU {addresses[0]}, which Spark has assigned: install a "
            "torch for CUDA"
        )
    return torch.device("cpu")


@functools.cache
def _left_visible() -> dict[str, str]:
    """Return the variable with which the cluster hides GPUs, as it is before this process changes it."""
    name = "CUDA_VISIBLE_DEVICES"
    return {name: os.environ[name]} if name in os.environ else {}


def place_of(address: str) -> int:
    """Return CUDA's number for an assigned GPU in this process.

    Numbers count as in ``gpu_at``. If the address is the id of a GPU or of a MIG slice, this process will see only that one: CUDA
    shows one slice at a time, and slices have no numbers. Raises ``SparkElasticError`` if the cluster has hidden the GPU, or this
    process has begun to use another one.
    """
    try:
        assigned = gpu_at(address, _left_visible())
    except ValueError as error:
        raise SparkElasticError(str(error)) from None
    if address.isdigit():
        visible = visible_gpus(_left_visible().get("CUDA_VISIBLE_DEVICES", ""))
        number = visible.index(assigned) if visible else int(address)
        return number if torch.cuda.device_count() != 1 else 0  # containers hide all other GPUs without the variable
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = address
    elif os.environ.get("CUDA_VISIBLE_DEVICES") != address:
        raise SparkElasticError(
            f"this Spark Python process has begun to use another GPU than {address}, which Spark has assigned to its "
            "present task: set spark.python.worker.reuse=false"
        )
    return 0
