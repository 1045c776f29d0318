"""Loggers send what a job reports to experiment trackers.

Pass them as ``run(loggers=[…])`` or as the Param ``loggers`` of an estimator. They run in the process that called ``run`` and
read the job's events. So nothing is logged once per rank, workers need neither a connection nor credentials, and no training
step waits for a logger.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger"]

logger = logging.getLogger("spark_elastic")

# The MLflow tag by which a resuming job finds its run.
RESUMES = "spark_elastic.checkpoint"
# Characters that MLflow does not take in the name of a metric, and how many characters it takes.
_REFUSED = re.compile(r"[^\w\-./: ]")
_LONGEST = 250
# To how many characters releases of MLflow cut the value of a param.
_CUTS = (250, 500, 6000)
RUN_ID = "spark_elastic.run_id"
ERROR = "spark_elastic.error"
# How the names of the job's own numbers begin. The others are reported by its function.
_OF_THE_JOB = "job/"


class Logger(ABC):
    """The interface of a logger. Calls come one after another, from one thread at a time. Values are numbers only.

    If ``start`` raises, the job is not started. If another method raises, the error is logged once, the logger is not called
    again, and the job continues.
    """

    @abstractmethod
    def start(self, resumes: str | None) -> None:
        """Begin, before any part of the job starts. ``resumes`` is the URL of the job's checkpoint, without secrets, or None."""

    @abstractmethod
    def named(self, run_id: str) -> None:
        """Receive the job's id, which is also in the names of its Spark jobs."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log values by name. ``step`` counts commits and never decreases for a name; ``seconds`` is the time since 1970."""

    @abstractmethod
    def finish(self, error: str | None) -> None:
        """End. ``error`` says why the job failed; None if it succeeded."""


class MLflowLogger(Logger):
    """Logs to one run of MLflow. Needs ``spark-elastic[mlflow]``.

    A job with ``checkpoint=`` continues the experiment's newest run that was logged for the same checkpoint. Values of steps
    that it does again are left out, because MLflow cannot replace those that the run has.

    Args:
        tracking_uri: the tracking server; by default MLflow's own default. Only the process that calls ``run`` has to reach it.
        experiment: the name of the experiment, which is created if it does not exist.
        run_name: the name of the run; by default MLflow's own choice.
        params: logged as the run's parameters when the job begins. A run that is continued keeps those that it has. A warning
            names the ones that differ.
        run_id: an existing MLflow run to log to.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "spark_elastic",
        run_name: str | None = None,
        params: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ) -> None:
        """Store the settings. Raises only ``TypeError``: MLflow is imported, and the server contacted, in ``start``."""
        if tracking_uri is not None and not isinstance(tracking_uri, str):
            raise TypeError(f"tracking_uri must be MLflow's address of a server or folder, not {tracking_uri!r}")
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.params = dict(params or {})
        self.run_id = run_id
        self._client: MlflowClient | None = None
        self._run = ""
        # The newest step of each metric when the job resumed.
        self._logged: dict[str, int] = {}

    def start(self, resumes: str | None) -> None:
        """Find the run to continue, or create one. Raises what MLflow raises if the server cannot be reached."""
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ImportError("MLflowLogger needs MLflow: pip install 'spark-elastic[mlflow]'") from error
        client = self._client = MlflowClient(self.tracking_uri)
        self._logged = {}
        found = self.run_id or self._find(client, resumes)
        if found is None:
            tags = {} if resumes is None else {RESUMES: resumes}
            self._run = new_mlflow_run(client, self.experiment, self.run_name, self.params, tags)
        else:
            self._continue(client, client.get_run(found), resumes)

    def named(self, run_id: str) -> None:
        """Set the tag ``spark_elastic.run_id``."""
        assert self._client is not None
        self._client.set_tag(self._run, RUN_ID, run_id)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log a batch of metrics. What MLflow does not take in names becomes ``_``, and long names are cut."""
        from mlflow.entities import Metric

        assert self._client is not None
        if step == 0:
            self._logged = {}  # the checkpoint's folder was empty, and all of this is new
        stamp = int(seconds * 1000)
        metrics = []
        for name, value in values.items():
            key = mlflow_name(name)
            logged = self._logged.get(key, -1)
            # The size of a world holds beyond the step at which it begins.
            if step > logged or name.startswith(_OF_THE_JOB):
                metrics.append(Metric(key, value, stamp, max(step, logged)))
        if metrics:
            self._client.log_batch(self._run, metrics)

    def finish(self, error: str | None) -> None:
        """End the run as FINISHED, or as FAILED with the tag ``spark_elastic.error``."""
        assert self._client is not None
        if error is not None:
            self._client.set_tag(self._run, ERROR, error)
        self._client.set_terminated(self._run, "FINISHED" if error is None else "FAILED")

    def _continue(self, client: MlflowClient, run: Run, resumes: str | None) -> None:
        self._run = run.info.run_id
        known = run.data.params
        _log_params(client, self._run, {key: value for key, value in self.params.items() if key not in known})
        differ = [key for key, value in self.params.items() if key in known and not _is_kept(known[key], str(value))]
        if differ:
            logger.warning(
                "MLflow run %s keeps the values of params that it has, which differ: %s", self._run, ", ".join(differ)
            )
        client.update_run(self._run, status="RUNNING")
        if ERROR in run.data.tags:
            client.delete_tag(self._run, ERROR)
        if resumes is None:
            return
        if run.data.tags.get(RESUMES) == resumes:
            # Of each metric, a run has the entry with the newest step. ``run.data.metrics`` would only give its value.
            self._logged = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        else:  # named by run_id: what it has was not logged for this checkpoint
            client.set_tag(self._run, RESUMES, resumes)

    def _find(self, client: MlflowClient, resumes: str | None) -> str | None:
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None or resumes is None:
            return None
        runs = client.search_runs(
            [experiment.experiment_id],
            f"tags.`{RESUMES}` = {_quoted(resumes)}",
            order_by=["start_time DESC"],
            max_results=1,
        )
        return str(runs[0].info.run_id) if runs else None


class TensorBoardLogger(Logger):
    """Writes TensorBoard's event files. Needs ``spark-elastic[tensorboard]``.

    A job that resumes with the same folder continues there. Older numbers are hidden from the step on at which the job's function
    first reports again.

    Args:
        log_dir: the folder, on the machine that calls ``run``.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        """Store the folder's name; ``start`` creates the folder.

        Raises ``TypeError`` for anything but a path, and ``ValueError`` for an empty one.
        """
        self.log_dir = os.path.expanduser(os.fspath(log_dir))
        if not self.log_dir:
            raise ValueError("log_dir must be a folder, not empty")
        self._writer: SummaryWriter | None = None
        self._run_id = ""
        # What is to be written when the job's function first reports.
        self._waiting: list[tuple[int, Mapping[str, float], float]] = []

    def start(self, resumes: str | None) -> None:
        """Create the folder."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs TensorBoard: pip install 'spark-elastic[tensorboard]'"
            ) from error
        try:
            os.makedirs(self.log_dir, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"TensorBoardLogger: the folder log_dir={self.log_dir!r} cannot be made: {error.strerror or error}"
            ) from error
        self._waiting = []  # copies of this logger must not share it

    def named(self, run_id: str) -> None:
        """Store the id, which is written as the text ``job/run_id``."""
        self._run_id = run_id

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Write scalars. The file is created when the job's function first reports, which tells what it does again."""
        self._waiting.append((step, values, seconds))
        if self._writer is not None or not all(name.startswith(_OF_THE_JOB) for name in values):
            self._write(step)

    def finish(self, error: str | None) -> None:
        """Close the file."""
        if self._waiting:
            self._write(None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, again_from: int | None) -> None:
        """Write what waits. If that creates the file, hide what other files have from the given step on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            begun_at = self._waiting[0][0]
            self._writer = SummaryWriter(self.log_dir, purge_step=again_from if begun_at else None)
            self._writer.add_text("job/run_id", self._run_id, begun_at)
        waiting, self._waiting = self._waiting, []
        for step, values, seconds in waiting:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step, walltime=seconds)
        self._writer.flush()


def list_of_loggers(value: object) -> list[Logger]:
    """Return a list of loggers. Raises ``TypeError`` for anything else."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"loggers must be a list of loggers, not {value!r}")
    for each in value:
        if not isinstance(each, Logger):
            raise TypeError(f"{each!r} is not a logger of spark_elastic.loggers, nor derived from its Logger")
    return list(value)


def mlflow_name(metric: str) -> str:
    """Return the name of a metric as MLflow takes it.

    Characters that it refuses become underscores. Names must not change as paths: a part between slashes that is empty, ``.``
    or begins with ``..`` gets an underscore ahead. What is too long ends with a checksum of the whole name.
    """
    parts = _REFUSED.sub("_", metric).split("/")
    name = "/".join(f"_{part}" if part in ("", ".") or part.startswith("..") else part for part in parts)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 9]}_{zlib.crc32(metric.encode()):08x}"


def new_mlflow_run(
    client: MlflowClient,
    experiment: str,
    run_name: str | None,
    params: Mapping[str, object],
    tags: Mapping[str, str],
) -> str:
    """Begin an MLflow run in the named experiment, which is created if it does not exist, and return the run's id.

    A run whose params MLflow refuses is deleted, because a later job would continue it.
    """
    found = client.get_experiment_by_name(experiment)
    number = found.experiment_id if found else client.create_experiment(experiment)
    run = str(client.create_run(number, run_name=run_name, tags=dict(tags)).info.run_id)
    try:
        _log_params(client, run, params)
    except BaseException:
        with contextlib.suppress(Exception):  # a server that has just failed may fail again
            client.delete_run(run)
        raise
    return run


def _log_params(client: MlflowClient, run: str, params: Mapping[str, object]) -> None:
    for key, value in params.items():
        client.log_param(run, key, value)


def _is_kept(known: str, value: str) -> bool:
    """Whether what MLflow has of a param is this value, or what it keeps of one so long."""
    return known == value or (len(known) in _CUTS and value.startswith(known))


def _quoted(text: str) -> str:
    """Quote a value for MLflow's filters. They have no escapes, so use a quote that the value does not contain."""
    return f'"{text}"' if "'" in text else f"'{text}'"
