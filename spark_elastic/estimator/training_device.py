"""On which device a worker of a fit trains."""

from __future__ import annotations

import torch

import spark_elastic as se
from spark_elastic.errors import SparkElasticError


def training_device(use_gpu: bool | None) -> torch.device:
    """Return the device on which a worker trains: the GPU of its task, unless ``use_gpu`` is False; else the CPU.

    Raises SparkElasticError if ``use_gpu`` is True and there is no GPU that torch can use.
    """
    if use_gpu is not False and torch.cuda.is_available() and se.device().type == "cuda":
        return se.device()
    if use_gpu:
        raise SparkElasticError(
            f"useGpu=True, but Spark has assigned no GPU that torch {torch.__version__} can use: set "
            "spark.task.resource.gpu.amount=1, and install a torch for CUDA"
        )
    return torch.device("cpu")
