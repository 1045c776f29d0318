"""A cluster of local processes and one of real executor JVMs, for as many tests as they can serve, and a leak check around each.

What does not depend on Spark is tested with local processes: there a job takes seconds less, as torch is imported once for all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import training
from descendants import TEMPORARY, descendants
from jobs import SUPPORT, runner
from processes import command_of, ports_of
from settling import assert_settles
from standalone import Standalone

from spark_elastic.launchers.kept import KEPT
from spark_elastic.testing import LocalCluster, local_cluster

EXECUTORS = 4
# What a finished job has started ends within this; Spark keeps idle Python processes of its own, which do not count.
SETTLE_SECONDS = 30.0

# pytest's folder, torch's cache of compiled code, and the sockets of a DataLoader's workers, where their warm parent is killed.
NOT_OURS = ("pytest-of-", "torchinductor_", "pymp-")

cloudpickle.register_pickle_by_value(training)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(EXECUTORS) as made:
        yield made


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master(f"local-cluster[{EXECUTORS},1,1024]")
        .appName("spark_elastic tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.decommission.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        # Spark kills the Python processes of cancelled tasks after two seconds; what is ours ends by itself, and sooner.
        .config("spark.python.task.killTimeout", "10min")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events of the runs that estimators start."""
    import spark_elastic

    seen: list[dict[str, Any]] = []
    run: Callable[..., Any] = spark_elastic.run
    monkeypatch.setattr(
        spark_elastic, "run", lambda *args, **settings: run(*args, **{**settings, "on_event": seen.append})
    )
    return seen


def ours() -> list[psutil.Process]:
    """What these tests have brought about on this machine, and Spark has not: warm parents, workers, all that these started.

    The importer of an executor, which is kept for the next job, does not count.
    """
    return [process for process in descendants() if not _is_sparks(process) and not _is_kept(process)]


def _is_kept(process: psutil.Process) -> bool:
    try:
        above = process.parent()
        return "importer" in command_of(process) and "importer" not in command_of(above) and not process.children()
    except psutil.Error:
        return False  # it has just ended


def _is_sparks(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        sparks = process.name().startswith("java") or "pyspark" in command or "spark-class" in command
        return sparks and "spark_elastic" not in command
    except psutil.Error:
        return True  # it has just ended


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("spark_elastic")}


def is_probe(path: Path) -> bool:
    """Whether Python's tempfile made this file to see if it can write to the folder.

    A process that is killed before it has removed the file leaves it. Warm parents are, now and then: torch._dynamo asks for the
    folder when it is imported.
    """
    with contextlib.suppress(OSError):
        return re.fullmatch("[a-z0-9_]{8}", path.name) is not None and path.read_bytes() in (b"", b"blat")
    return False


def open_files() -> set[str]:
    """Files that this process has open, and temporary ones that anybody in these tests has left lying about."""
    made = [path for path in TEMPORARY.iterdir() if not path.name.startswith(NOT_OURS)]
    left = {str(path) for path in made if not is_probe(path)}
    return left | {file.path for file in psutil.Process().open_files() if not file.path.startswith("/proc/")}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no process, thread, listening socket, file or Spark job may be there that was not there before."""
    shared: list[LocalCluster] = []
    if "cluster" in request.fixturenames:
        shared.append(request.getfixturevalue("cluster"))
    looks: dict[str, Callable[[], set[Any]]] = {
        "processes": lambda: {process for process in ours() if not any(process.pid in made.pids for made in shared)},
        "threads": our_threads,
        "sockets": lambda: ports_of(psutil.Process()),
        "files": open_files,
    }
    if "spark" in request.fixturenames:
        tracker = request.getfixturevalue("spark").sparkContext.statusTracker()
        looks["Spark jobs"] = lambda: set(tracker.getActiveJobsIds())
    before = {what: look() for what, look in looks.items()}
    yield
    KEPT.end()  # shutdown() would also end what the next test finds warm on executors
    assert_settles(
        lambda: {what: more for what, look in looks.items() if (more := look() - before[what])}, SETTLE_SECONDS
    )


@pytest.fixture
def run(cluster: LocalCluster) -> Callable[..., Any]:
    """``run(fn, *args, faults=[…], **settings)``: results and events of a run in local processes."""
    return runner(local=cluster)


@pytest.fixture
def run_on_spark(spark: Any) -> Callable[..., Any]:
    """The same on the shared cluster of real executors."""
    return runner(spark=spark)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``script(master, *acts)`` starts ``driver_script.py``; what is left of it is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(master: str, *acts: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "driver_script.py"), master, str(tmp_path), *acts],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1000 rows in three files with row groups of odd sizes."""
    folder = tmp_path_factory.mktemp("rows")
    start = 0
    for number, (rows, group) in enumerate([(1, 1), (600, 97), (399, 1000)]):
        table = pa.table({"id": pa.array(range(start, start + rows), pa.int64())})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)
        start += rows
    return folder.as_uri()
