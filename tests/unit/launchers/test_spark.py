"""SparkSlots beside a Spark that is made up: what ends a job, and what is only tried again."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers import defaults
from spark_elastic.launchers import spark as launcher
from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.spark import SparkSlots, cancellation_in, is_gone
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket

SECONDS = 30.0  # only a failing test waits for so long
TICKET = Ticket("1", (("127.0.0.1", 1),), Credentials(b"", b""), None)


class Future:
    """A slot's Spark job: running, or ended with an error or with rows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.error: Exception | None = None
        self.rows: list[int] | None = None

    def jobIds(self) -> list[int]:  # noqa: N802
        return [self.number]

    def isDone(self) -> bool:  # noqa: N802
        return self.error is not None or self.rows is not None

    def get(self) -> list[int]:
        if self.rows is not None:
            return self.rows
        assert self.error is not None
        raise self.error


class Spark:
    """A session and its SparkContext, as far as the launcher asks. ``trouble`` is called at each submission."""

    pythonExec = "python3"  # noqa: N815

    def __init__(self, trouble: Callable[[], None] = lambda: None) -> None:
        self.futures: list[Future] = []
        self.trouble = trouble
        self.is_stopped: Callable[[], bool] = lambda: False
        self.submitted = threading.Condition()
        self.sparkContext = self._jsc = self._jsparkSession = self
        # The local properties of the thread that calls, and those with which each Spark job was submitted.
        self.own = threading.local()
        self.properties: list[dict[str, str]] = []

    def getConf(self) -> dict[str, str]:  # noqa: N802
        return {}

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        return vars(self.own).get(name)

    def setLocalProperty(self, name: str, value: str) -> None:  # noqa: N802
        vars(self.own)[name] = value

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool = False) -> None:  # noqa: N802, N803
        self.setLocalProperty("spark.jobGroup.id", group)
        self.setLocalProperty("spark.job.interruptOnCancel", str(interruptOnCancel).lower())

    def sessionJobTag(self) -> str:  # noqa: N802
        raise Py4JError("Spark 3.5 has no such method")

    def setJobDescription(self, text: str) -> None: ...  # noqa: N802

    def sc(self) -> Spark:
        return self

    def isStopped(self) -> bool:  # noqa: N802
        return self.is_stopped()

    def parallelize(self, *_: Any) -> Spark:
        self.trouble()
        return self

    def mapPartitions(self, task: Any) -> Spark:  # noqa: N802
        return self

    @property
    def _jrdd(self) -> Spark:
        return self

    def collectAsync(self) -> Future:  # noqa: N802
        with self.submitted:
            self.properties.append(dict(vars(self.own)))
            self.futures.append(Future(len(self.futures)))
            self.submitted.notify_all()
        return self.futures[-1]

    def statusTracker(self) -> Spark:  # noqa: N802
        return self

    def getActiveJobIds(self) -> list[int]:  # noqa: N802
        for future in self.futures:
            future.error = future.error or RuntimeError("Job 0 cancelled part of cancelled job group")
        return []

    def getJobIdsForTag(self, tag: str) -> list[int]:  # noqa: N802
        return []

    def wait_for_submissions(self, count: int) -> None:
        with self.submitted:
            assert self.submitted.wait_for(lambda: len(self.futures) >= count, SECONDS)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "RESUBMIT_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "WATCH_SECONDS", 0.01)


class Stopped(threading.Event):
    """Notes why a launcher says that the job is over."""

    reason = ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.set()


class Busy(Spark):
    """Spark whose view of its jobs shows no task that has started. What it is not told to cancel has ended soon afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []

    def getActiveJobIds(self) -> list[int]:  # noqa: N802
        return [future.number for future in self.futures if not future.isDone()]

    def getJobIdsForTag(self, tag: str) -> list[int]:  # noqa: N802
        return list(range(len(self.futures)))

    def getJobInfo(self, job: int) -> Any:  # noqa: N802
        return SimpleNamespace(stageIds=[job])

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802
        return SimpleNamespace(numActiveTasks=0)

    def cancelJob(self, job: int) -> None:  # noqa: N802
        self.cancelled.append(job)
        for future in self.futures:
            if future.number == job:
                future.error = RuntimeError(f"Job {job} cancelled")
            elif not future.isDone():
                future.rows = [1]


def launch(spark: Spark, slots: int = 2) -> tuple[SparkSlots, Stopped]:
    stopped = Stopped()
    listener = SlotListener(
        on_stopped=stopped,
        on_failed=lambda reason: stopped(f"failed: {reason}"),
        on_draining=lambda slot: None,
        on_given_up=lambda slot, reason: None,
    )
    return SparkSlots(spark, TICKET, slots, listener), stopped


def test_slots_have_a_tag_of_the_run_and_whatever_cancels_the_callers_own_spark_jobs_also_when_they_come_again() -> (
    None
):
    spark = Spark()
    given = {"spark.jobGroup.id": "mine", "spark.job.tags": "one,two", "spark.scheduler.pool": "fair"}
    for name, value in {**given, "spark.job.interruptOnCancel": "true", "spark.sql.execution.id": "3"}.items():
        spark.setLocalProperty(name, value)
    slots, _ = launch(spark, slots=1)
    with slots:
        spark.wait_for_submissions(1)
        spark.futures[0].error = RuntimeError("Job aborted due to stage failure: ExecutorLostFailure")
        spark.wait_for_submissions(2)
    expected = {**given, "spark.job.tags": "one,two,spark_elastic-1", "spark.job.interruptOnCancel": "false"}
    assert spark.properties == [expected, expected]
    assert spark.getLocalProperty("spark.job.tags") == "one,two", "the caller's own stay"


@pytest.mark.parametrize(
    "left", [None, "spark_elastic-0"], ids=["none", "that of an earlier run in a thread of its pool"]
)
def test_slots_of_a_caller_without_a_job_group_are_in_one_of_the_run(left: str | None) -> None:
    spark = Spark()
    if left is not None:
        spark.setLocalProperty("spark.jobGroup.id", left)
        spark.setLocalProperty("spark.job.tags", left)
    slots, _ = launch(spark, slots=1)
    with slots:
        spark.wait_for_submissions(1)
    assert spark.properties[0]["spark.jobGroup.id"] == spark.properties[0]["spark.job.tags"] == "spark_elastic-1"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        Py4JNetworkError("Error while sending", OSError(errno.EMFILE, "Too many open files")),
        ValueError("whatever"),
    ],
    ids=lambda error: f"{type(error).__name__} {getattr(error, 'errno', '')}",
)
def test_what_fails_in_the_launcher_for_a_while_is_tried_again_and_said(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    left = [error] * 3

    def trouble() -> None:
        if left:
            raise left.pop()

    spark = Spark(trouble)
    own, stopped = launch(spark)
    with own:
        spark.wait_for_submissions(2)
    assert not stopped.is_set()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"({type(error).__name__}: {error})" in warning for warning in warnings] == [True] * 3


def test_spark_that_cannot_be_asked_for_a_while_is_not_taken_for_gone() -> None:
    spark = Spark()
    left = [OSError(errno.EMFILE, "Too many open files")] * 5

    def ask() -> bool:
        if left:
            raise left.pop()
        return False

    spark.is_stopped = ask
    own, stopped = launch(spark)
    with own:
        spark.wait_for_submissions(2)
    assert not stopped.is_set()


def refused() -> bool:
    raise Py4JNetworkError("cannot connect to the Java server", ConnectionRefusedError(errno.ECONNREFUSED, "refused"))


@pytest.mark.parametrize("answer", [lambda: True, refused], ids=["stopped", "the JVM has ended"])
def test_the_end_of_spark_ends_the_job(answer: Callable[[], bool]) -> None:
    spark = Spark()
    spark.is_stopped = answer
    assert is_gone(spark)
    own, stopped = launch(spark)
    with own:
        assert stopped.wait(SECONDS)
    assert stopped.reason == "the SparkContext was stopped"


CANCELLED = "Job 3 cancelled as part of cancellation of all jobs"


def test_a_cancelled_spark_job_ends_the_job_and_is_not_submitted_again() -> None:
    spark = Spark()
    own, stopped = launch(spark)
    with own:
        spark.wait_for_submissions(2)
        spark.futures[1].error = RuntimeError(CANCELLED)
        assert stopped.wait(SECONDS)
        assert CANCELLED in own.find_cancellation()
    assert CANCELLED in stopped.reason
    assert len(spark.futures) == 2


def test_a_cancellation_is_known_to_who_asks_before_the_launcher_has_looked() -> None:
    spark = Spark()
    own, _ = launch(spark, slots=1)
    own._slots[0].future = future = Future(0)
    assert own.find_cancellation() == ""
    future.error = RuntimeError("Job aborted due to stage failure")
    assert own.find_cancellation() == ""
    future.error = RuntimeError(CANCELLED)
    assert CANCELLED in own.find_cancellation()


def test_a_slot_that_spark_has_given_up_is_submitted_again() -> None:
    spark = Spark()
    own, stopped = launch(spark)
    with own:
        spark.wait_for_submissions(2)
        spark.futures[0].error = RuntimeError("Job aborted due to stage failure: Task 0 failed 4 times")
        spark.wait_for_submissions(3)
        assert not stopped.is_set()


@pytest.mark.parametrize("rows", [[], [0]])
def test_a_slot_whose_task_has_reached_a_driver_that_could_not_tell_so_was_not_given_up(
    rows: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    spark = Spark()
    own, _ = launch(spark)
    with own:
        spark.wait_for_submissions(2)
        spark.futures[0].rows = rows
        spark.wait_for_submissions(3)
    assert [record.message[:24] for record in caplog.records] == ["Spark gave up slot 0 (it"] * (not rows)


@pytest.mark.parametrize(
    ("reason", "is_cancellation"),
    [
        (CANCELLED, True),
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all jobs SQLSTATE: XXKDA", True),
        ("Job 3 cancelled part of cancelled job group spark_elastic-1", True),
        ("Job 3 cancelled because Stage 4 was cancelled", True),
        ("Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times", False),
        ("Job aborted due to stage failure: ExecutorLostFailure (executor 0 exited): Executor was killed", False),
        ("", False),
    ],
)
def test_a_cancellation_is_told_from_a_loss(reason: str, is_cancellation: bool) -> None:
    assert bool(cancellation_in(reason)) == is_cancellation


def test_a_cancellation_is_told_in_one_line_without_javas_stack() -> None:
    line = "[SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all jobs SQLSTATE: XXKDA"
    story = f"An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: {line}\n\tat org.apache"
    assert cancellation_in(story) == cancellation_in(line) == f"its Spark jobs were cancelled ({line})"
    reason = "Job 3 cancelled because of\na reason of two lines"
    assert cancellation_in(f"{reason}\n\nDriver stacktrace:") == f"its Spark jobs were cancelled ({reason})"


def test_a_stopped_context_that_cancels_its_jobs_is_said_to_be_stopped() -> None:
    assert cancellation_in("Job 0 cancelled because SparkContext was shut down") == "the SparkContext was stopped"


def test_a_session_that_has_been_stopped_is_told_of_before_it_is_asked_for_anything() -> None:
    stopped = launcher.SparkLauncher(None)
    stopped._given = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))  # type: ignore[assignment]
    with pytest.raises(SparkElasticError, match="the Spark session has been stopped"), stopped:
        pass


def test_at_the_end_what_waits_is_cancelled_and_what_is_connected_is_not_though_spark_has_not_seen_it_start() -> None:
    spark = Busy()
    own, _ = launch(spark, slots=2)
    with own:
        spark.wait_for_submissions(2)
        own.slot_registered(0)
        own.slot_registered(1)
        own.slot_lost(1)
    assert spark.cancelled == [1]
