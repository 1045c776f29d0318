"""The Spark session of a run: found or made, and what its configuration says about sizes, GPUs and addresses."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from spark_elastic.errors import SparkElasticError, TrainingFailedError
from spark_elastic.launchers.defaults import cores, fill_sizes
from spark_elastic.launchers.java import starting_spark
from spark_elastic.launchers.resources import TaskResources, check_one_gpu, is_dynamic
from spark_elastic.protocol.fault_points import TASK_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyspark import SparkConf
    from pyspark.sql import SparkSession
    from pyspark.sql.conf import RuntimeConfig
    from pyspark.sql.connect.conf import RuntimeConf as ConnectConfig
    from pyspark.sql.connect.session import SparkSession as ConnectSession

logger = logging.getLogger("spark_elastic")

# Spark's setting of how many partitions a range has.
_LEAF_PARTITIONS, _PARALLELISM = "spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism"

# The newest session of each Spark application in which this process has run jobs.
_used: dict[str, SparkSession | ConnectSession] = {}


def note_use(session: SparkSession | ConnectSession, application: str) -> None:
    """Note that a job runs in a session."""
    _used[application] = session


def used_sessions() -> list[SparkSession | ConnectSession]:
    """Return the sessions in which this process has run jobs. Some may have been stopped since."""
    return list(_used.values())


def is_connect(session: object) -> TypeGuard[ConnectSession]:
    """Whether this is a session of Spark Connect, which has no SparkContext. Imports nothing."""
    module = sys.modules.get("pyspark.sql.connect.session")
    return module is not None and isinstance(session, module.SparkSession)


def check_session(spark: object) -> None:
    """Raise ``TypeError`` unless ``spark`` is a live session."""
    if getattr(spark, "sparkContext", None) is None:
        raise TypeError(f"spark must be a SparkSession, not {spark!r}")


def check_gpus(
    conf: SparkConf | RuntimeConfig | ConnectConfig, wanted: bool = False, resources: TaskResources | None = None
) -> None:
    """Refuse a Spark configuration that gives each task several GPUs, or none if GPUs are wanted.

    ``resources`` overrides the configuration of tasks. Each task also checks what it is actually given.
    """
    if resources is not None:
        resources.check_executors(conf.get)
        if resources.gpus is not None:
            return
    # A profile without GPUs gives its tasks none, whatever the session gives to others.
    amount = "0" if resources is not None else conf.get("spark.task.resource.gpu.amount", "0") or "0"
    check_one_gpu(float(amount), f"spark.task.resource.gpu.amount={amount}")
    if wanted and float(amount) <= 0:
        raise ValueError(
            f"useGpu=True, but Spark gives a task {amount} GPUs: set spark.task.resource.gpu.amount=1 and "
            "spark.executor.resource.gpu.amount, with a discovery script, or give resourceProfile={'gpus': 1}"
        )


def check_session_settings(
    session: SparkSession | ConnectSession, wants_gpus: bool = False, resources: TaskResources | None = None
) -> None:
    """Refuse settings with which no job can run in this session."""
    if is_connect(session):
        check_gpus(session.conf, wants_gpus, resources)
        # SQL is all that Spark Connect offers. Its settings are those of other tasks unless they are set.
        check_idle_timeout(session.conf, "spark.python.worker", "spark.sql.execution.pyspark.udf")
    else:
        # What the session's builder has set since the application started does not count.
        conf = session.sparkContext.getConf()
        check_gpus(conf, wants_gpus, resources)
        check_idle_timeout(conf, "spark.python.worker")


def check_idle_timeout(conf: SparkConf | RuntimeConfig | ConnectConfig | Mapping[str, str], *prefixes: str) -> None:
    """Refuse settings by which Spark kills tasks that return nothing for a while: those of a job return at its end.

    prefixes: of the settings' names; the later ones count if they are set.
    """
    kills: str | None = "false"
    seconds: str | None = "0"
    for prefix in prefixes:
        kills = conf.get(f"{prefix}.killOnIdleTimeout", kills)
        seconds = conf.get(f"{prefix}.idleTimeoutSeconds", seconds)
    if str(kills).lower() == "true" and re.fullmatch(r"0*[a-z]*", str(seconds)) is None:
        # Only settings of SQL can be changed in a session.
        how = "set it to false" if ".sql." in prefixes[-1] else "start the application with killOnIdleTimeout=false"
        raise ValueError(
            f"with {prefixes[-1]}.killOnIdleTimeout=true and idleTimeoutSeconds={seconds}, Spark kills each worker after that "
            f"time, because the tasks of a job return nothing until its end: {how}"
        )


def active_session() -> SparkSession | None:
    """Return this thread's active session, of either kind, else that of ``SPARK_REMOTE`` or another thread; None without one.

    Raises ``ModuleNotFoundError`` if pyspark is not installed, and ``SparkElasticError`` where code works with Spark Connect and
    there is no session.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        if error.name != "pyspark":
            raise
        raise ModuleNotFoundError(
            "pyspark is not installed: give local=True to train in processes of this machine, without Spark, or install it "
            "(pip install 'spark-elastic[spark]')",
            name="pyspark",
        ) from error

    session = SparkSession.getActiveSession()
    if session is not None or TASK_VARIABLE in os.environ:
        return session
    if os.environ.get("SPARK_REMOTE"):
        return SparkSession.builder.getOrCreate()
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:
        from pyspark.errors import PySparkException

        try:
            return SparkSession.active()
        except PySparkException as error:
            raise SparkElasticError(
                "no Spark Connect session is active in this thread, and there is no default one: give yours, as in run(fn, "
                "spark=session), or make one here with SparkSession.builder.remote(…)"
            ) from error
    return None


def use_own_python(session: SparkSession) -> None:
    """Have the executors of a local master run this process's Python, unless the user has chosen one.

    These executors are on this machine, and Spark would run whatever ``python3`` is on the path: another Python, if the script
    was started by the full path of its environment's.
    """
    context = session.sparkContext
    chosen = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python")
    if not chosen and str(context.master).startswith("local"):
        context.pythonExec = sys.executable


def find_session(stack: ExitStack) -> SparkSession:
    """Return the active session, else a new local-cluster that ends with the run, with all that Spark has written for it.

    Where Spark's own folder cannot be written to, which a local-cluster needs, the new session's master is ``local``.
    """
    from pyspark import SparkContext
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.sql import SparkSession

    session = active_session()
    if session is not None:
        return session
    context = SparkContext._active_spark_context
    if context is not None and context._jsc is not None:
        # The user may have made a session on another thread: each thread has its own active session.
        return SparkSession.builder.getOrCreate()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    count, work = cores(), Path(_find_spark_home(), "work")
    has_place = os.access(work if work.is_dir() else work.parent, os.W_OK | os.X_OK)
    if not has_place:
        text = "a local-cluster would write to %s, and this process cannot: the session's master is local[%d], without executors"
        logger.warning(text, work, count)
    builder = (
        SparkSession.builder.master(f"local-cluster[{count},1,1024]" if has_place else f"local[{count}]")
        .appName("spark_elastic")
        .config("spark.ui.showConsoleProgress", "false")
        # Spark's own default counts only the executors that have started so far.
        .config(_PARALLELISM, count)
    )
    with starting_spark():
        session = builder.getOrCreate()
    application, sent = session.sparkContext.applicationId, _sent_files(session)

    def clean_up(kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TrainingFailedError) and not any(failure.traceback for failure in error.failures):
            logger.warning("the logs of Spark's executors, which may tell more, are in %s", work / application)
        else:
            remove_logs(work, application, sent)

    if has_place:
        stack.push(clean_up)
    stack.callback(session.stop)
    return session


def remove_logs(work: Path, application: str, sent: Collection[str] = ()) -> None:
    """Remove the logs of a local-cluster's executors, the files that Spark has sent them, and the folders of both.

    Whatever else user code has written there stays, with a warning.
    """
    folders = list((work / application).glob("*"))
    with suppress(OSError):
        for entry in (entry for folder in folders for entry in folder.iterdir()):
            if entry.name not in ("stdout", "stderr", "__pycache__", *sent):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    for folder in (*folders, work / application, work):
        with suppress(OSError):  # it is not empty
            folder.rmdir()
    if left := [str(folder) for folder in folders if folder.exists()]:
        logger.warning("files with relative paths that workers have written are in %s", ", ".join(left))


def _sent_files(session: SparkSession) -> list[str]:
    """Return the names of what Spark copies into its executors' folders: files, archives and jars."""
    context = session.sparkContext
    jars = context._jsc.sc().listJars()
    urls = [*context.listFiles, *context.listArchives, *(jars.apply(number) for number in range(jars.size()))]
    return [name for url in urls for name in url.rpartition("/")[2].split("#")]


def default_sizes(
    session: SparkSession | ConnectSession,
    num_proc: int | None,
    min_np: int | None,
    max_np: int | None,
    resources: TaskResources | None = None,
) -> tuple[int, int, int]:
    """Fill in ``min_np``, ``num_proc`` and ``max_np`` from the Spark configuration; return them in this order."""
    conf = session.conf
    if not is_dynamic(conf.get):
        if resources is not None and num_proc is None and max_np is None:
            raise ValueError(
                "give max_np or num_proc: how many tasks with these resources the cluster has room for is not known to Spark"
            )
        is_sized = max_np is not None or resources is not None
        present = 0 if is_sized else known_slots(session)
        if present is None and num_proc is None:
            present = task_slots(session)  # which says why nobody knows
        return fill_sizes(present or 0, num_proc, min_np, max_np)
    slots = max((resources or TaskResources.of_session(conf.get)).slots_of_executor(conf.get), 1)
    if max_np is None:
        limit = str(conf.get("spark.dynamicAllocation.maxExecutors", "infinity"))
        if limit.lower() in ("infinity", str(2**31 - 1)):
            raise ValueError(
                "give max_np: spark.dynamicAllocation.maxExecutors is not set, so there is no bound to the slots that "
                "could be asked of Spark"
            )
        max_np = int(limit) * slots
    minimum = _number(conf, "spark.dynamicAllocation.minExecutors", 0)
    initial = _number(conf, "spark.dynamicAllocation.initialExecutors", minimum)
    if min_np is None:
        min_np = min(max(1, minimum * slots), num_proc or max_np, max_np)
    if num_proc is None:
        num_proc = min(max(initial * slots, min_np), max_np)
    return min_np, num_proc, max_np


def parallelism(session: SparkSession | ConnectSession) -> int:
    """Return how many cores Spark has now, or what a setting says. Raises ``ValueError`` if Spark does not tell."""
    if not is_connect(session):
        return int(session.sparkContext.defaultParallelism)
    # The plan of a range without a number of partitions shows the server's default, and costs no Spark job. ``explain`` would
    # print the plan, and a single thread must not redirect the output of the whole process.
    frame: Any = session.range(1)
    found = re.search(r"splits=(?:Some\()?(\d+)", frame._explain_string())
    if found is None:
        raise ValueError("give max_np: this session of Spark Connect does not tell how many cores its cluster has")
    return int(found.group(1))


def known_slots(session: SparkSession | ConnectSession, resources: TaskResources | None = None) -> int | None:
    """Return what ``task_slots`` does; None if Spark does not tell."""
    try:
        return task_slots(session, resources)
    except ValueError:
        return None


def task_slots(session: SparkSession | ConnectSession, resources: TaskResources | None = None) -> int:
    """Return how many of our tasks Spark can run at a time now, at least 1. Raises ``ValueError`` if Spark does not tell.

    Where ``spark.executor.cores`` is not set, that may be a few too many, if executors have cores or GPUs that are left over.
    """
    conf = session.conf
    task = resources or TaskResources.of_session(conf.get)
    local = _slots_of_local_master(_master(session), conf, task)
    if local is not None:
        return max(local, 1)
    present = _cores_of_cluster(session)
    cores = task.executor_cpus or _number(conf, "spark.executor.cores", 0)
    executors, rest = divmod(present, cores) if cores else (0, present)
    return max(executors * task.slots_of_executor(conf.get) + int(rest / task.cores(conf.get)), 1)


def _cores_of_cluster(session: SparkSession | ConnectSession) -> int:
    """Return how many cores there are, in a classic session also where ``spark.default.parallelism`` names another number."""
    if is_connect(session):
        for name in (_LEAF_PARTITIONS, _PARALLELISM):
            if session.conf.get(name, None):
                raise ValueError(
                    f"give max_np: Spark Connect does not tell how many cores its cluster has while {name} is set"
                )
        return parallelism(session)
    if session.conf.get(_PARALLELISM, None) is None:
        return parallelism(session)
    if _master(session).startswith("local"):
        return cores()
    scheduler = session.sparkContext._jsc.sc().schedulerBackend()
    return max(int(scheduler.totalCoreCount()), 2)  # which is Spark's own default parallelism where nobody has set it


def _master(session: SparkSession | ConnectSession) -> str:
    return session.conf.get("spark.master", None) or "" if is_connect(session) else str(session.sparkContext.master)


def _slots_of_local_master(master: str, conf: RuntimeConfig | ConnectConfig, task: TaskResources) -> int | None:
    """Return how many of these tasks a local master runs at a time; None for other masters and ``local[*]``."""
    found = re.fullmatch(r"local(?:\[ *(\d+) *(?:, *\d+ *)?\])?|local-cluster\[ *(\d+) *, *(\d+) *,.*\]", master)
    if found is None:
        return None
    threads, executors, each = (int(number or 1) for number in found.groups())
    if found[2]:
        executors = min(executors, int(conf.get("spark.cores.max", None) or executors * each) // each)
    return executors * replace(task, executor_cpus=threads * each).slots_of_executor(conf.get)


def warn_of_too_few_cores(session: SparkSession, wanted: int, resources: TaskResources | None = None) -> None:
    """Say it if a job waits for more workers than a local master ever runs tasks at a time. Those of others may grow."""
    conf, master = session.conf, str(session.sparkContext.master)
    slots = _slots_of_local_master(master, conf, resources or TaskResources.of_session(conf.get))
    if slots is not None and slots < wanted:
        logger.warning(
            "num_proc=%d workers are waited for, but %s runs %d %s at a time: lower num_proc and min_np, or give the session "
            "more cores",
            wanted,
            master,
            slots,
            "task" if slots == 1 else "tasks",
        )


def _number(conf: RuntimeConfig | ConnectConfig, name: str, default: int) -> int:
    return int(conf.get(name, str(default)) or default)


def addresses_of(session: SparkSession, port: int) -> tuple[tuple[str, int], ...]:
    """Return where executors reach the driver: at the host that Spark tells them, else at this machine's name."""
    conf = session.sparkContext.getConf()
    host = (conf.get("spark.driver.host", "") or socket.gethostname()).strip("[]")
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        logger.warning(
            "spark.driver.host=%s does not resolve here (%s). Executors where it does not resolve, either, cannot reach the "
            "driver: set it to an address that they reach",
            host,
            error,
        )
    return ((host, port),)
