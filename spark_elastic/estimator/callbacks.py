"""Callbacks: objects whose methods run on rank 0: where a fit begins, after each step and each epoch, and where it fails.

Callbacks travel by pickle, to the workers, and from rank 0 to all ranks at the beginning and after each epoch: when rank 0 is
lost, its successor continues with the attributes as they were then, as does rank 0 itself if a rank is lost while an epoch ends.
Attributes that cannot be pickled (open files, connections) have to be dropped by ``__getstate__``. What is interrupted by a loss
is repeated, so a callback may see the same epoch twice, and the steps since the last commit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic._saved_names import saved_as
from spark_elastic.checkpoint.best import is_negated
from spark_elastic.loggers import new_mlflow_run

if TYPE_CHECKING:
    import torch

# An epoch's entry of the history: numbers by name, the list of the world's sizes, and whatever callbacks add.
Metrics = dict[str, Any]


@saved_as("spark_elastic.estimator")
@dataclass
class EpochContext:
    """What a callback sees.

    Args:
        epoch: the number of the epoch, from 0.
        metrics: this epoch's entry of the history; numbers that a callback adds stay in it.
        history: the earlier entries.
        model: the network, in evaluation mode.
        run_id: the name of the run in the store.
        log_url: the run's folder for logs in the store; None without a store that keeps logs.
    """

    epoch: int
    metrics: Metrics
    history: list[Metrics]
    model: torch.nn.Module
    run_id: str
    log_url: str | None = None
    stopped: bool = field(default=False, init=False)
    kept: bool = field(default=False, init=False)

    def stop(self) -> None:
        """End training after this epoch, on all ranks."""
        self.stopped = True

    def keep_model(self) -> None:
        """Make the present weights the result of fit, unless the weights of a later epoch are kept."""
        self.kept = True


EpochContext.__init__.__doc__ = (
    "Keep the given values; nothing is checked. A fit makes this object at the end of each epoch."
)


@saved_as("spark_elastic.estimator")
@dataclass(kw_only=True)
class FitContext:
    """Where a fit is when it begins, or when an exception ends it.

    Args:
        epoch: the number of the present epoch, from 0; it is higher at the beginning of a fit that goes on with a run.
        step: the number of the next step in this epoch, from 0.
        model: the network.
        run_id: the name of the run in the store.
        log_url: the run's folder for logs in the store; None without a store that keeps logs.
    """

    epoch: int
    step: int
    model: torch.nn.Module
    run_id: str
    log_url: str | None = None


FitContext.__init__.__doc__ = (
    "Keep the given values; nothing is checked. A fit makes this object for the callbacks that want it."
)


@saved_as("spark_elastic.estimator")
@dataclass(kw_only=True)
class BatchContext(FitContext):
    """What a callback sees after a step.

    Args:
        epoch: the number of the epoch, from 0.
        step: the number of the step in this epoch, from 0.
        global_step: the number of the step in the run, from 0; a step that is repeated after a loss has the same number again.
        model: the network, in training mode.
        run_id: the name of the run in the store.
        log_url: the run's folder for logs in the store; None without a store that keeps logs.
        loss: the mean over the rows of this step on all ranks, weighted if rows have weights; NaN if all weights are 0.
        learning_rate: that of the optimizer's first group, after a scheduler that steps each step.
    """

    global_step: int
    loss: float
    learning_rate: float


BatchContext.__init__.__doc__ = (
    "Keep the given values; nothing is checked. A fit makes this object after each step, if a callback wants it."
)


# The methods by which an object is known as a callback.
HOOKS = ("on_epoch_end", "on_fit_begin", "on_batch_end", "on_exception")


@saved_as("spark_elastic.estimator")
class Callback:
    """A base class for callbacks; any object with one of its methods can serve as one.

    An error that a method raises ends the fit, except one of ``on_exception``, which is logged.
    """

    def on_fit_begin(self, ctx: FitContext) -> None:
        """React to the beginning of a fit, also of one that goes on with a run; not to a reset in the fit.

        A loss of workers before the first commit begins the fit again, and calls this again.
        """

    def on_batch_end(self, ctx: BatchContext) -> None:
        """React to a step. Brings the loss of each step to the CPU, for which a GPU is waited for.

        Attributes that are set here are kept at the end of the epoch. A loss before that may set them back to what they were when
        the epoch began, and does so if rank 0 is lost, or any rank between the last step and the commit that ends the epoch. The
        steps since the last commit are repeated after a loss, and seen again.
        """

    def on_epoch_end(self, ctx: EpochContext) -> None:
        """React to the end of an epoch."""

    def on_exception(self, ctx: FitContext, error: Exception) -> None:
        """React to an exception that training has raised on rank 0; in a job, training may go on after that from the last commit.

        A lost worker, what only another rank raises, and what fails before there are ranks, does not come here.
        """


class _Monitor(Callback):
    """Watches a number of the history."""

    def __init__(self, monitor: str | None = None, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be one of auto, min, max, not {mode!r}")
        if monitor is not None:
            _is_lower_better(monitor, mode)
        self.monitor, self.mode, self.min_delta = monitor, mode, float(min_delta)
        self.best: float | None = None
        self.best_epoch: int | None = None

    def improved(self, ctx: EpochContext) -> bool:
        """Record the epoch's value and return whether it is the best so far, which NaN never is."""
        name = self.monitor or ("val_loss" if "val_loss" in ctx.metrics else "loss")
        if name not in ctx.metrics:
            raise KeyError(f"monitor={name!r} is not among the metrics: {', '.join(ctx.metrics)}")
        value = float(ctx.metrics[name])
        lower = _is_lower_better(name, self.mode)
        gain = math.inf if self.best is None else self.best - value if lower else value - self.best
        if math.isnan(value) or gain <= self.min_delta:
            return False
        self.best, self.best_epoch = value, ctx.epoch
        return True


_BETTER_LOWER = ("loss", "error", "mse", "mae", "mape", "msle", "rmsle", "brier", "perplexity")
_BETTER_HIGHER = ("acc", "auc", "auroc", "f1", "precision", "recall", "r2", "score")


def _is_lower_better(name: str, mode: str) -> bool:
    """Whether smaller values are better. Raises ValueError where neither ``mode`` nor the name tells that."""
    if mode != "auto":
        return mode == "min"
    if is_negated(name):
        return False
    for words, lower in ((_BETTER_LOWER, True), (_BETTER_HIGHER, False)):
        if any(word in name.lower() for word in words):
            return lower
    raise ValueError(
        f"monitor={name!r} does not tell whether smaller or larger values are better: give mode='min' or 'max'"
    )


@saved_as("spark_elastic.estimator")
class EarlyStopping(_Monitor):
    """Stops when a number of the history has not improved for some epochs.

    Args:
        monitor: the number to watch; by default val_loss, or loss if there is no validation.
        patience: for how many epochs it need not improve.
        mode: whether smaller ("min") or larger ("max") values are better; "auto" means "min" for names of losses and errors,
            "max" for accuracy, AUC, F1, precision, recall, R² and scores, and has to be replaced for all others.
        min_delta: by how much it has to improve to count.
        restore_best: return the model of the best epoch.
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        mode: str = "auto",
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        """Keep the settings; what is watched is looked up at the end of the first epoch.

        Raises ``ValueError`` for an unknown ``mode``, and for a ``monitor`` of which "auto" does not know whether it should rise
        or fall.
        """
        super().__init__(monitor, mode, min_delta)
        self.patience, self.restore_best, self.waited = patience, restore_best, 0

    def on_epoch_end(self, ctx: EpochContext) -> None:
        if self.improved(ctx):
            self.waited = 0
            if self.restore_best:
                ctx.keep_model()
        else:
            self.waited += 1
            if self.waited >= self.patience:
                self.waited = 0  # a fit that continues this run waits for ``patience`` epochs again
                ctx.stop()


@saved_as("spark_elastic.estimator")
class BestModel(_Monitor):
    """Makes the model of the best epoch the result of fit, rather than that of the last epoch.

    ``monitor``, ``mode`` and ``min_delta`` are those of ``EarlyStopping``.
    """

    def on_epoch_end(self, ctx: EpochContext) -> None:
        if self.improved(ctx):
            ctx.keep_model()


@saved_as("spark_elastic.estimator")
class TensorBoard(Callback):
    """Writes all numbers to TensorBoard's event files, in ``log_dir``, by default among the run's logs in the store.

    Needs ``spark-elastic[tensorboard]``.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        """Keep the folder's name. TensorBoard is imported, and the folder is written to, at the end of each epoch.

        The fit ends with ``TrainingFailedError`` then if TensorBoard is missing or no folder is known.
        """
        self.log_dir = log_dir

    def on_epoch_end(self, ctx: EpochContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.log_dir or ctx.log_url
        if folder is None:
            raise ValueError("TensorBoard needs log_dir=, because this fit has no store that keeps logs")
        with SummaryWriter(folder.removeprefix("file://")) as writer:
            for name, value in _numbers(ctx.metrics).items():
                writer.add_scalar(name, value, ctx.epoch)


@saved_as("spark_elastic.estimator")
class MLflow(Callback):
    """Logs all numbers to one MLflow run. Needs ``spark-elastic[mlflow]``.

    Args:
        tracking_uri: the tracking server, which workers have to reach; by default MLflow's own default.
        experiment: the name of the experiment, which is made if there is none.
        run_name: the name of the run.
        params: what is logged as the run's parameters.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        params: dict[str, object] | None = None,
    ) -> None:
        """Keep the settings. MLflow is imported, and its run is made, at the end of the first epoch.

        The fit ends with ``TrainingFailedError`` then if MLflow is missing or the server cannot be reached.
        """
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.params = dict(params or {})
        self.mlflow_run_id: str | None = None

    def on_epoch_end(self, ctx: EpochContext) -> None:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.tracking_uri)
        if self.mlflow_run_id is None:
            experiment, name = self.experiment or "spark_elastic", self.run_name or ctx.run_id
            self.mlflow_run_id = new_mlflow_run(client, experiment, name, self.params, {})
        for name, value in _numbers(ctx.metrics).items():
            client.log_metric(self.mlflow_run_id, name, value, step=ctx.epoch)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and name != "epoch"
    }
