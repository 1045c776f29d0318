"""Callbacks: objects whose methods run on rank 0 when a fit begins, after each step and each epoch, and when it ends or fails.

Callbacks travel by pickle: to the workers, and from rank 0 to all ranks at the beginning and after each epoch. If rank 0 is
lost, its successor continues with the attributes as last sent, as does rank 0 itself if a rank is lost while an epoch ends.
``__getstate__`` has to drop attributes that cannot be pickled (open files, connections). Work that a loss interrupts is
repeated, so a callback may see an epoch, or the steps since the last commit, twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic._saved_names import saved_as
from spark_elastic.checkpoint.best import is_negated
from spark_elastic.loggers import mlflow_name, new_mlflow_run

if TYPE_CHECKING:
    import torch
    from mlflow.tracking import MlflowClient

# An epoch's entry of the history: numbers by name, the list of the world's sizes, and whatever callbacks add.
Metrics = dict[str, Any]


@saved_as("spark_elastic.estimator")
@dataclass
class EpochContext:
    """What a callback sees at the end of an epoch.

    Args:
        epoch: the number of the epoch, from 0.
        metrics: this epoch's entry of the history. Numbers that a callback adds stay in it.
        history: the entries of earlier epochs.
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
        """Make the current weights the result of fit, unless a later epoch's weights are kept."""
        self.kept = True


EpochContext.__init__.__doc__ = (
    "Keep the given values; nothing is checked. A fit makes this object at the end of each epoch."
)


@saved_as("spark_elastic.estimator")
@dataclass(kw_only=True)
class FitContext:
    """The position of a fit when it begins, when it ends, or when an exception ends it.

    Args:
        epoch: the number of the current epoch, from 0; higher at the beginning of a fit that continues a run.
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
        global_step: the number of the step in the run, from 0. A step that is repeated after a loss keeps its number.
        model: the network, in training mode.
        run_id: the name of the run in the store.
        log_url: the run's folder for logs in the store; None without a store that keeps logs.
        loss: the mean over this step's rows on all ranks, weighted if rows have weights; NaN if all weights are 0.
        learning_rate: the rate of the optimizer's first group, after a scheduler that steps each step.
    """

    global_step: int
    loss: float
    learning_rate: float


BatchContext.__init__.__doc__ = (
    "Keep the given values; nothing is checked. A fit makes this object after each step, if a callback wants it."
)


# The methods that make an object a callback.
HOOKS = ("on_epoch_end", "on_fit_begin", "on_batch_end", "on_fit_end", "on_exception")


@saved_as("spark_elastic.estimator")
class Callback:
    """A base class for callbacks. Any object with one of its methods can serve as a callback.

    An error in a method ends the fit, but errors in ``on_exception`` are logged.
    """

    def on_fit_begin(self, ctx: FitContext) -> None:
        """React to the beginning of a fit, including one that continues a run, but not to a reset within the fit.

        If workers are lost before the first commit, the fit begins again, and this is called again.
        """

    def on_batch_end(self, ctx: BatchContext) -> None:
        """React to a step. The loss of each step is copied to the CPU, so training waits for a GPU.

        Attributes that are set here are saved at the end of the epoch. A loss of workers before that may reset them to their
        values at the beginning of the epoch. It does so if rank 0 is lost, or if any rank is lost between the last step and the
        commit that ends the epoch. The steps since the last commit are repeated after a loss, and seen again.
        """

    def on_epoch_end(self, ctx: EpochContext) -> None:
        """React to the end of an epoch."""

    def on_fit_end(self, ctx: FitContext) -> None:
        """React to the end of training: all epochs are trained, or a callback has stopped it. Not called if the fit fails.

        ``ctx.model`` has the last weights, also if those of an earlier epoch are kept. If rank 0 is lost meanwhile, another
        worker calls this again. Attributes that are set here are not saved.
        """

    def on_exception(self, ctx: FitContext, error: Exception) -> None:
        """React to an exception in training on rank 0. In a job, training may then continue from the last commit.

        This is not called for a lost worker, for what only another rank raises, or for failures before there are ranks.
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
    """Whether smaller values are better. Raises ValueError if neither ``mode`` nor the name determines that."""
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
        monitor: the number to watch; by default val_loss, or loss without validation.
        patience: how many epochs without improvement are tolerated.
        mode: whether smaller ("min") or larger ("max") values are better; "auto" means "min" for names of losses and errors,
            "max" for accuracy, AUC, F1, precision, recall, R² and scores, and is refused for all other names.
        min_delta: the smallest change that counts as an improvement.
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
        """Store the settings. The number to watch is looked up at the end of the first epoch.

        Raises ``ValueError`` for an unknown ``mode``, and for a ``monitor`` for which "auto" does not know the direction.
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
                self.waited = 0  # a fit that continues this run has ``patience`` epochs again
                ctx.stop()


@saved_as("spark_elastic.estimator")
class BestModel(_Monitor):
    """Makes the model of the best epoch, rather than of the last one, the result of fit.

    ``monitor``, ``mode`` and ``min_delta`` are those of ``EarlyStopping``.
    """

    def on_epoch_end(self, ctx: EpochContext) -> None:
        if self.improved(ctx):
            ctx.keep_model()


@saved_as("spark_elastic.estimator")
class TensorBoard(Callback):
    """Writes all numbers to TensorBoard's event files in ``log_dir``, by default among the run's logs in the store.

    Needs ``spark-elastic[tensorboard]``.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        """Store the folder's name. The end of each epoch imports TensorBoard and writes to the folder.

        There, the fit ends with ``TrainingFailedError`` if TensorBoard is missing or no folder is known.
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
    """Logs all numbers to one MLflow run, which ends with the fit. Needs ``spark-elastic[mlflow]``.

    Args:
        tracking_uri: the tracking server, which must be reachable from workers; by default MLflow's own default.
        experiment: the name of the experiment, which is created if it does not exist.
        run_name: the name of the run.
        params: logged as the run's parameters.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        params: dict[str, object] | None = None,
    ) -> None:
        """Store the settings. The end of the first epoch imports MLflow and creates the run.

        There, the fit ends with ``TrainingFailedError`` if MLflow is missing or the server cannot be reached.
        """
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.params = dict(params or {})
        self.mlflow_run_id: str | None = None

    def on_epoch_end(self, ctx: EpochContext) -> None:
        client = self._client()
        if self.mlflow_run_id is None:
            experiment, name = self.experiment or "spark_elastic", self.run_name or ctx.run_id
            self.mlflow_run_id = new_mlflow_run(client, experiment, name, self.params, {})
        for name, value in _numbers(ctx.metrics).items():
            client.log_metric(self.mlflow_run_id, mlflow_name(name), value, step=ctx.epoch)

    def on_fit_end(self, ctx: FitContext) -> None:
        self._end("FINISHED")

    def on_exception(self, ctx: FitContext, error: Exception) -> None:
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if self.mlflow_run_id is not None:
            self._client().set_terminated(self.mlflow_run_id, status)

    def _client(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.tracking_uri)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and name != "epoch"
    }
