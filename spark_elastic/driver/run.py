"""``spark_elastic.run``: trains on the executors of a Spark session, or in processes on this machine."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from spark_elastic._callables import is_deferred
from spark_elastic._integers import whole_number
from spark_elastic._pickling import dumps
from spark_elastic._seconds import seconds_from
from spark_elastic._text import brief, shown
from spark_elastic._urls import without_file_scheme
from spark_elastic.checkpoint.best import Metric, metric_of
from spark_elastic.checkpoint.naming import INTERVAL, KEPT
from spark_elastic.driver.client_driver import ClientDriver
from spark_elastic.driver.cluster_driver import ClusterDriver
from spark_elastic.driver.display import ProgressDisplay
from spark_elastic.driver.driver_place import CheckpointWish, DriverPlace
from spark_elastic.driver.event_log import EventLog, LogFile, OnEvent
from spark_elastic.driver.fault_plan import Strikes, active_plan
from spark_elastic.driver.logger_feed import LoggerFeed
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.settings import RARE_SETTINGS, JobSettings
from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers import LAUNCHERS
from spark_elastic.launchers.base import Launcher
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.launchers.resources import TaskResources
from spark_elastic.launchers.session import active_session, is_connect
from spark_elastic.loggers import Logger
from spark_elastic.protocol.fault_points import CLUSTER_ACTIONS, TASK_VARIABLE

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

logger = logging.getLogger("spark_elastic")

T = TypeVar("T")

# Where a driver can run, by the values of ``run(driver=…)``.
DRIVERS: Mapping[str, type[DriverPlace]] = {
    "client": ClientDriver,
    "cluster": ClusterDriver,
}


def run(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    elastic: bool = True,
    start_timeout: float = 600.0,
    elastic_timeout: float = 600.0,
    hang_timeout: float = 300.0,
    reset_limit: int | None = None,
    replace_slow: float | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
    local: bool | LocalCluster = False,
    resources: Mapping[str, float] | ResourceProfile | None = None,
    driver: str = "client",
    network_interface: str | None = None,
    driver_port: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_interval: float = INTERVAL,
    checkpoint_keep: int = KEPT,
    checkpoint_best: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    host_discovery_script: str | os.PathLike[str] | None = None,
    event_log: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    loggers: Sequence[Logger] = (),
    **timeouts: float,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in every worker and return the results of the last generation's workers, in rank order.

    The job survives the loss of workers, tasks and executors as long as ``min_np`` workers are left or come back, and it grows
    to at most ``max_np`` workers as executors arrive.

    Args:
        fn: the function to call in each worker. It travels with its arguments by cloudpickle. If it calls a function decorated
            with ``@elastic``, training survives resets; if not, ``fn`` runs once in each of ``num_proc`` workers, which know
            nothing of each other unless ``elastic=False``.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: the number of workers to wait for before the first generation; ``min_np`` by default. It is no limit: without
            ``min_np``, and without dynamic allocation, it is also the minimum.
        min_np: the number of workers below which training waits.
        max_np: the number of slots to request from Spark, and so the largest number of workers. ``min_np`` and ``max_np`` default
            to the limits of dynamic allocation in the Spark configuration, or without dynamic allocation to the present cores of
            the cluster, divided by ``spark.task.cpus``; with ``local``, to what this machine has.
        elastic: False forms one world of ``num_proc`` workers before ``fn`` is called, so that ``fn`` has its rank, its
            collectives and torch's default group from its first line. When a worker is lost, all workers are ended and
            the whole of ``fn`` runs again in new processes, up to ``reset_limit`` times. An exception in ``fn`` ends the job.
        start_timeout: how many seconds the job may take to get its first hosts.
        elastic_timeout: how many seconds the job may take to get back to ``min_np`` workers after a loss.
        hang_timeout: how many seconds a worker may spend without a collective or a ``state.heartbeat()`` while others wait
            for it, before it is replaced. "Time limits" in docs/howto/training.md has the exact rule.
        reset_limit: how many resets failures may cause before the job fails; None sets no limit. Before an elastic function is
            reached, each loss of workers that makes ``fn`` run again counts as one. Newcomers that fail before they have
            committed with the others do not count, as long as the others keep committing.
        replace_slow: a fraction, such as 0.1: a worker that computes rows at less than this fraction of the others' median speed
            leaves at the next commit, and its slot goes back to Spark. No step is lost. The worker stays if fewer than
            ``min_np`` workers would be left. Speeds are measured on CPUs, with a loader of this package in the State. None
            replaces no worker for being slow. See docs/howto/stragglers.md.
        backend: "gloo", "nccl", or None, which chooses nccl if every worker has a GPU of its own, else gloo.
        env: environment variables for the workers.
        spark: the session, classic or of Spark Connect. The default is the active session, else a local-cluster with as many
            executors as there are cores (``local``, if Spark's own folder cannot be written to). With Spark Connect, executors
            have to reach the machine that calls ``run``.
        local: True trains in processes on this machine, without Spark or Java: unless sizes are given, one for each GPU, or for
            each core if there is no GPU. They listen on the loopback interface only. With a cluster from
            ``testing.local_cluster``, slots can be taken away.
        resources: what each task gets, for this job only, as ``{"cpus": 2, "gpus": 1}`` or as Spark's ``ResourceProfile``:
            cores, and one GPU or a part of one. The GPUs are the executors' (``spark.executor.resource.gpu.amount``, or with
            dynamic allocation the profile's own); ``spark.task.resource.gpu.amount`` need not be set.
        driver: where the driver of the job runs. "client" is the process that calls ``run``, which the executors have to reach.
            "cluster" is a slot of the cluster, for sessions whose executors cannot reach the caller; it takes two slots besides
            those of the workers. See "Where executors cannot reach you" in docs/howto/connect.md.
        network_interface: the interface that workers use among themselves; by default the one that reaches the driver.
        driver_port: the port that the driver listens on; by default any free port.
        checkpoint: a directory or URL, shared by all machines, to which commits are also written. A later run with the same
            ``checkpoint`` resumes from the newest complete one.
        checkpoint_interval: how many seconds pass between two such writes; 0 writes again as soon as the last write has ended.
        checkpoint_keep: how many of the newest undamaged checkpoints to keep; older ones are removed after each write.
        checkpoint_best: the name of a metric that rank 0 gives to ``state.report``. The checkpoints with its ``checkpoint_keep``
            best values are written regardless of ``checkpoint_interval``, and kept besides the newest; ``load_model(url, module,
            best=True)`` loads the best. Losses and errors are better when small, accuracies, AUCs and F1 when large. For other
            metrics, say which: ``"ndcg:max"``.
        storage_options: options for the library that opens ``checkpoint``, on the driver and the workers. They travel by
            cloudpickle.
        host_discovery_script: an executable that prints the machines that may be used, one ``host`` or ``host:slots`` per line.
            It runs every second, and a run of more than 30 seconds counts as failed. Workers on machines that it no longer lists
            leave at their next commit. Machines that it has never listed are left alone, because Spark decides where tasks run.
        event_log: a file to which events are appended as JSON lines; see docs/events.md.
        progress: True shows the progress of the job, as a live line in terminals and notebooks and as plain lines elsewhere.
            None shows it only in terminals and notebooks.
        on_event: a function that is called with each event as a dict, on a thread of its own.
        loggers: where rank 0's ``state.report`` goes, with world sizes and resets: ``loggers.MLflowLogger``,
            ``loggers.TensorBoardLogger``, or classes of your own. With ``checkpoint``, a later run continues the same run there.
        timeouts: ``heartbeat_timeout``, ``ready_timeout``, ``form_timeout``, ``join_window``, ``join_patience`` and
            ``yield_after``, which ``JobSettings`` explains. ``adaptive_np=True`` has fewer workers train if that is measured to
            be faster, on CPUs and with loaders of ``global_batch_size=``, as ``adaptiveNp`` of estimators does.

    Raises:
        TrainingFailedError: the job failed. The error holds the rank, host and traceback of the newest 32 workers that failed.
        NotEnoughHostsError: a timeout passed with fewer than ``min_np`` workers.
        ResetLimitExceededError: failures caused more resets than ``reset_limit`` allows.
        TrainingCodeError: a mistake was found in ``fn``; this error is a ``TrainingFailedError`` as well.
        DiscoveryError: ``host_discovery_script`` is missing, or failed at its first run.
        CheckpointError: ``checkpoint`` cannot be written, or does not fit the state.
        SparkElasticError: a result of ``fn`` cannot be unpickled here, or the session has been stopped.
        ValueError, TypeError: an argument is wrong. Nothing was started.

    A worker's pickled result may have 2 GiB at most. The call blocks until the job ends; Ctrl-C ends it and raises
    ``KeyboardInterrupt``. When it has returned or raised, nothing of the job is left. Processes that have imported torch, but
    no user code, wait for the next run: on executors for as long as Spark keeps its own Python processes, with ``local=True``
    until ``shutdown``, at most for ten minutes.
    """
    call = _pickle_call(fn, args, kwargs)
    _check_linux()
    rare: Mapping[str, Any] = timeouts
    unknown = sorted(set(rare) - set(RARE_SETTINGS))
    if unknown:
        raise TypeError(f"run() got an unexpected keyword argument {unknown[0]!r}")
    min_np, num_proc, max_np = (
        None if value is None else whole_number(name, value, 1)
        for name, value in (("min_np", min_np), ("num_proc", num_proc), ("max_np", max_np))
    )
    if min_np is not None and max_np is not None and min_np > max_np:
        raise ValueError(f"min_np <= max_np must hold, but min_np={min_np}, max_np={max_np}")
    if not isinstance(elastic, bool):
        raise TypeError(f"elastic must be True or False, not {elastic!r}")
    if not elastic:
        num_proc = min_np = max_np = _one_size(num_proc, min_np, max_np)
    if driver not in DRIVERS:
        raise ValueError(f"driver must be one of {', '.join(repr(place) for place in DRIVERS)}, not {driver!r}")
    launcher = _choose_launcher(spark, local, None if resources is None else TaskResources.of(resources))
    wish = _check_checkpoint(checkpoint, checkpoint_interval, checkpoint_keep, checkpoint_best, storage_options)
    path = None if event_log is None else _log_path(event_log)
    caller = None if on_event is None else OnEvent(on_event)
    feed = LoggerFeed(loggers, None if wish is None else shown(wish.url))
    settings = JobSettings(
        start_timeout=start_timeout,
        elastic_timeout=elastic_timeout,
        hang_timeout=hang_timeout,
        reset_limit=reset_limit,
        replace_slow=replace_slow,
        backend=backend,
        env=_mapping("env", env),
        network_interface=network_interface,
        driver_port=0 if driver_port is None else driver_port,
        host_discovery_script=None if host_discovery_script is None else os.fspath(host_discovery_script),
        elastic=elastic,
        durable=wish is not None,
        **rare,
    )
    place = DRIVERS[driver](wish)
    place.check(launcher, host_discovery_script)
    with ExitStack() as stack:
        display = stack.enter_context(ProgressDisplay(progress))
        stack.enter_context(launcher)
        low, start, high = place.sizes(launcher, num_proc, min_np, max_np)
        if not elastic and low != high:
            raise ValueError("give num_proc: with elastic=False it is the number of workers in the one world")
        settings = dataclasses.replace(
            settings, min_np=low, num_proc=start, max_np=high, memory_setting=launcher.memory_setting
        )
        strikes = Strikes()
        watchers = [display.see, strikes.see]
        if loggers:
            watchers.append(stack.enter_context(feed).see)
        if caller is not None:  # a log of its own, so that a slow callable costs the file nothing
            watchers.append(stack.enter_context(EventLog(caller)).pass_on)
        with _log_is_written(event_log):
            opened = EventLog(None if path is None else LogFile(path), watchers)
        log = stack.enter_context(opened)
        try:
            results = place.run(launcher, settings, call, log, OutputPrinter(display.aside))
        except SparkElasticError as error:
            log.failed(error)
            raise error.with_traceback(None)  # noqa: B904  # our own frames say nothing about what went wrong in the job
        except BaseException as error:
            log.failed(error)
            raise
    strikes.warn_of_missing()
    return [_unpickle_result(place, result) for place, result in enumerate(results)]


def _unpickle_result(place: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise SparkElasticError(
            f"fn has returned in all workers, and result {place} cannot be unpickled here: {type(error).__name__}: {error}; "
            "return plain values, tensors or arrays"
        ) from error


# ---------------------------------------------------------------- arguments


def _pickle_call(fn: object, args: Sequence[object], kwargs: Mapping[str, object] | None) -> bytes:
    if not callable(fn):
        raise TypeError(
            f"fn must be callable, not {brief(fn)}: give the function itself, as in run(train_fn, args=(3,)), and not what a "
            "call of it has returned"
        )
    if is_deferred(fn):
        raise TypeError(
            "fn is a coroutine function or a generator, so that calling it only makes an object and runs none of its code: give "
            "a plain function, which may call asyncio.run(…)"
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence of arguments for fn, not {brief(args)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments for fn, not {brief(kwargs)}")
    try:
        inspect.signature(fn).bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise TypeError(f"fn cannot be called with the given args and kwargs: {error}") from error
    except ValueError:
        pass  # builtins without a signature
    for name, value in (("fn", fn), *((f"args[{i}]", arg) for i, arg in enumerate(args)), *(kwargs or {}).items()):
        try:
            dumps(value)
        except Exception as error:
            raise TypeError(
                f"{name} cannot be pickled, so it cannot travel to the workers: {brief(value)}: {error}. Create what cannot "
                "travel (connections, locks, open files) inside fn"
            ) from error
    return dumps((fn, tuple(args), dict(kwargs or {}), tuple(sys.argv)))


def _check_checkpoint(
    checkpoint: str | os.PathLike[str] | None,
    interval: float,
    keep: int,
    best: str | None,
    storage_options: Mapping[str, object] | None,
) -> CheckpointWish | None:
    """Check the arguments for checkpoints, even if none are written: whoever gives one expects them."""
    interval = seconds_from("checkpoint_interval", interval)
    keep = whole_number("checkpoint_keep", keep, 1)
    metric = None if best is None else _metric_named(best)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ValueError(f"storage_options must be a dict of options, not {storage_options!r}")
    if checkpoint is None:
        others = {
            f"checkpoint_interval={interval:g}": interval != INTERVAL,
            f"checkpoint_keep={keep!r}": keep != KEPT,
            f"checkpoint_best={best!r}": best is not None,
            "storage_options": bool(storage_options),
        }
        for given in (given for given, is_given in others.items() if is_given):
            raise ValueError(f"{given} needs checkpoint=, the place where checkpoints are written")
        return None
    url = os.fspath(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else ""
    if not isinstance(url, str) or not url:
        raise ValueError(f"checkpoint must be a directory or a URL, not {checkpoint!r}")
    url = without_file_scheme(url)  # the next run may be given the path, and has to be known as the same job
    if "://" not in url and "::" not in url:
        url = os.path.abspath(os.path.expanduser(url))  # workers have working directories of their own
    return CheckpointWish(url, float(interval), storage_options, keep, metric)


def _log_path(event_log: str | os.PathLike[str]) -> str:
    """Return the path of the log. Raises ValueError, and makes no file, if it cannot be written."""
    if not isinstance(event_log, (str, os.PathLike)) or not os.fspath(event_log):
        raise ValueError(f"event_log must be the path of a file, not {event_log!r}")
    path = os.path.expanduser(os.fspath(event_log))
    with _log_is_written(event_log):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "it is a directory; give the path of a file")
        if os.path.isfile(path):
            open(path, "a+").close()  # what was written before is looked at, too
        elif not os.path.exists(path):
            folder = os.path.dirname(path) or os.curdir
            if not os.path.isdir(folder):
                raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}; create it")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"the folder {folder} is not writable")
    return path


@contextmanager
def _log_is_written(event_log: object) -> Iterator[None]:
    """Turn the errors of a file into a ValueError that names the argument."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"event_log={str(event_log)!r} cannot be written: {error.strerror or error}") from error


def _metric_named(best: str) -> Metric:
    if not isinstance(best, str) or not best:
        raise ValueError(f"checkpoint_best must be the name of a metric, not {best!r}")
    return metric_of(best)


def _choose_launcher(
    spark: SparkSession | None, local: bool | LocalCluster, resources: TaskResources | None
) -> Launcher:
    needs_cluster = {fault.action.value for fault in active_plan() if fault.action in CLUSTER_ACTIONS}
    if needs_cluster and not isinstance(local, LocalCluster):
        raise ValueError(
            f"{' and '.join(sorted(needs_cluster))} need a cluster that they can change: give run() local=cluster, with one of "
            "spark_elastic.testing.local_cluster"
        )
    if local is False:
        session = active_session() if spark is None else spark
        if session is None and TASK_VARIABLE in os.environ:
            raise ValueError(
                "run() was called in a worker, which has no Spark session, and would start another Spark there. Call it where "
                "the session is; if a module that workers import calls it, guard the call by if __name__ == '__main__'. For a "
                "job of its own on this machine, give local=True"
            )
        return LAUNCHERS["connect"](session, resources) if is_connect(session) else LAUNCHERS["spark"](spark, resources)
    if spark is not None:
        raise ValueError("local=True trains in processes of this machine, without Spark: give either spark or local")
    if resources is not None:
        raise ValueError(
            "resources= is what Spark gives to tasks: with local a worker has a GPU of this machine, if there is one"
        )
    return LAUNCHERS["local"](local)


def _one_size(num_proc: int | None, min_np: int | None, max_np: int | None) -> int | None:
    """Return the size of a fixed world; None if Spark's configuration decides."""
    given = [size for size in (num_proc, min_np, max_np) if size is not None]
    if len(set(given)) > 1:
        raise ValueError(
            f"elastic=False makes a world of one size, but num_proc={num_proc}, min_np={min_np}, max_np={max_np}: give "
            "num_proc only"
        )
    return given[0] if given else None


def _mapping(name: str, given: object) -> dict[str, str]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of strings, not {given!r}")
    return dict(given or {})


def _check_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise SparkElasticError(f"spark_elastic runs on Linux only, and this is {sys.platform}")
