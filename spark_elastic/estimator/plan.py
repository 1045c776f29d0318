"""What workers have to know about a fit, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spark_elastic.data import ParquetLoader
from spark_elastic.estimator.callbacks import Metrics
from spark_elastic.estimator.layout import Layout
from spark_elastic.estimator.objective import Objective


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Where the rows come from and how many form a batch: the arguments of ``ParquetLoader``.

    check: whether workers still have to check that values are finite. validation_batch_size: None for as many rows as a
    training batch has on one worker. shards: the number of parts into which training batches are cut; None if they are not cut.
    balance: "auto" if each worker's rows of a training batch follow its speed. jagged: the list columns that are jagged tensors
    in all batches, because by the files' footers not all rows for training and validation together have lists of one length.
    """

    training_url: str
    validation_url: str | None
    shuffle: bool
    seed: int
    batch_size: int | None = None
    global_batch_size: int | None = None
    validation_batch_size: int | None = None
    shards: int | None = None
    balance: str | None = None
    engine: str = "arrow"
    readers: int | None = None
    storage_options: Mapping[str, object] = field(default_factory=dict)
    check: bool = False
    transform: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    jagged: frozenset[str] = frozenset()

    def open(self, url: str, **arguments: Any) -> ParquetLoader:
        """Open a loader of this fit. arguments: those of ``ParquetLoader`` that are not the same in all its loaders."""
        loader = ParquetLoader(url, **{**self.reading, **arguments})
        loader.jagged |= self.jagged
        return loader

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of every loader in this fit."""
        options = {"workers_count": self.readers} if self.engine == "petastorm" and self.readers else None
        return {
            "engine": self.engine,
            "engine_options": options,
            "storage_options": dict(self.storage_options) or None,
            "with_row_ids": self.check,
        }

    @property
    def training(self) -> dict[str, Any]:
        """The arguments of the loader of training rows."""
        return {
            "batch_size": self.batch_size,
            "global_batch_size": self.global_batch_size,
            "shards": self.shards,
            "balance": self.balance,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **self.reading,
        }


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How gradients become steps.

    optimizer: a class or function of the parameters, which is called with ``optimizer_arguments``, or an instance with the
    parameters of the model, which is pickled with it. zero_redundancy: whether its state is divided among workers. scheduler: a
    class or function of the optimizer.
    """

    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer
    optimizer_arguments: Mapping[str, object]
    zero_redundancy: bool = False
    scheduler: Callable[..., LRScheduler] | None = None
    scheduler_arguments: Mapping[str, object] = field(default_factory=dict)
    scheduler_interval: str = "epoch"
    passes: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str | None = None
    train_step: Callable[..., torch.Tensor | tuple[torch.Tensor, object]] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A fit. Model and optimizer instance are pickled together, so that they keep sharing parameters.

    callbacks: the pickled callbacks. callbacks_given: a description of them, which reveals that a run continues with other
    callbacks. class_labels: columns that have to hold whole numbers. classes: how many classes a classifier's label has.
    terminate_on_nan: whether a non-finite loss ends the fit. commit_steps: the steps between two commits. class_weights: for
    each class of the label, the factor of its rows' weights; empty if there are none. weighs_labels: whether the only loss may
    divide by the weights of its labels. may_ignore: whether steps have to look for labels that a loss ignores and that no
    weights account for. has_unused: whether some trained parameters may get no gradient. fit_id: distinguishes this fit from an
    earlier one of the same run.
    """

    run_id: str
    model: torch.nn.Module
    layout: Layout
    objective: Objective
    data: DataPlan
    steps: StepPlan
    epochs: int
    steps_per_epoch: int | None
    checkpoint_steps: int | None
    seed: int
    callbacks: bytes
    callbacks_given: str
    log_url: str | None
    use_gpu: bool | None
    class_labels: tuple[str, ...] = ()
    classes: int | None = None
    terminate_on_nan: bool = True
    commit_steps: int = 1
    class_weights: tuple[float, ...] = ()
    weighs_labels: bool = False
    may_ignore: bool = False
    has_unused: bool = False
    fit_id: str = "fit"


@dataclass(frozen=True)
class Trained:
    """Rank 0's result: the model's state dict and its other buffers, on the CPU, and a dict for each epoch.

    changed: plain attributes of the network that training has changed, which are not part of the weights.
    """

    weights: dict[str, object]
    buffers: dict[str, torch.Tensor]
    history: list[Metrics]
    changed: tuple[str, ...] = ()
