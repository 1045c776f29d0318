"""One local-cluster of real executor JVMs for as many tests as it can serve, and a leak check around each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import training

import spark_elastic
from spark_elastic.testing import Fault, inject
from spark_elastic.timeline.schema import COMMON, fields_of

HERE = Path(__file__).parent
EXECUTORS = 4
# Python processes of a finished task end within this; Spark keeps idle ones of its own, which do not count.
SETTLE_SECONDS = 10.0

# These JVMs live for minutes: a second compiler and a parallel collector cost them more than they bring on few cores.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
# In the environment of all that these tests start, so that orphans are told from other people's processes.
MARK = "SPARK_ELASTIC_TEST_RUN"
os.environ[MARK] = uuid.uuid4().hex

cloudpickle.register_pickle_by_value(training)


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
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def ours() -> list[psutil.Process]:
    """The processes of spark_elastic that these tests have brought about: warm parents and all below them."""
    parents = [process for process in psutil.process_iter() if _is_warm_parent(process)]
    return [process for parent in parents for process in _tree(parent)]


def _is_warm_parent(process: psutil.Process) -> bool:
    try:
        named = any("spark_elastic.task.warm_parent" in part for part in process.cmdline())
        return named and process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("spark_elastic")]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test no process, thread, listening socket or Spark job of ours may be there."""
    yield
    _, alive = psutil.wait_procs(ours(), timeout=SETTLE_SECONDS)
    assert not alive, f"left behind: {[(process.pid, process.cmdline()) for process in alive]}"
    assert not our_threads()


@pytest.fixture
def run(spark: Any, nothing_left: None) -> Iterator[Callable[..., Any]]:
    """``run(fn, *args, faults=[…], **settings)``: results and events of a run on the shared cluster."""

    def call(fn: Callable[..., Any], *args: Any, faults: list[Fault] | None = None, **settings: Any) -> Run:
        events: list[dict[str, Any]] = []
        watch = settings.pop("on_event", None)

        def note(event: dict[str, Any]) -> None:
            events.append(event)
            if watch is not None:
                watch(event)

        try:
            with inject(*(faults or [])):
                results = spark_elastic.run(fn, args=args, spark=spark, on_event=note, **settings)
        except BaseException as error:
            error.events = events  # type: ignore[attr-defined]
            raise
        unknown = [event for event in events if set(event) - set(COMMON) != fields_of(event["event"])]
        assert not unknown, "events that docs/events.md does not know"
        return Run(results, events)

    yield call
    tracker = spark.sparkContext.statusTracker()
    assert not tracker.getActiveJobsIds(), "Spark jobs of ours still run"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``script(master, *acts)`` starts ``driver_script.py``; what is left of it is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(master: str, *acts: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "driver_script.py"), master, str(tmp_path), *acts],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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


class Run:
    """What came out of a run."""

    def __init__(self, results: list[Any], events: list[dict[str, Any]]) -> None:
        self.results = results
        self.events = events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def sizes(self) -> list[int]:
        return [event["size"] for event in self.of("world_formed")]

    @property
    def faults(self) -> int:
        return len(self.of("fault_injected"))
