"""Queries of one task each: what a session is asked, what is logged, how they are taken back, which of their errors end a job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_elastic.launchers import queries as module
from spark_elastic.launchers import session_watch
from spark_elastic.launchers.queries import Queries, RowsMap
from spark_elastic.launchers.session_watch import SessionWatch

WAIT = 20.0


class Session:
    """Runs tasks where they are asked for; those that wait end when they are interrupted by their tag."""

    is_stopped = False
    client = SimpleNamespace()

    def __init__(self) -> None:
        self.own = threading.local()
        self.interrupted: dict[str, threading.Event] = {}
        self.waits = threading.Event()
        self.shuffled: list[int] = []

    def getTags(self) -> set[str]:
        return {"the user's"}

    def addTag(self, tag: str) -> None:
        self.own.tag = tag
        self.interrupted[tag] = threading.Event()

    def interruptTag(self, tag: str) -> None:
        if tag in self.interrupted:
            self.interrupted[tag].set()

    def range(self, *args: int, numPartitions: int) -> Any:
        assert numPartitions == 1
        return SimpleNamespace(selectExpr=lambda *expressions: self.frame([]))

    def createDataFrame(self, rows: list[tuple[int, bytes]], schema: str) -> Any:
        return SimpleNamespace(
            coalesce=lambda count: self.frame(rows[::-1]),
            repartition=lambda count: self.shuffled.append(len(rows)) or self.frame(rows[::-1]),
        )

    def frame(self, rows: list[tuple[int, bytes]]) -> Any:
        numbers, contents = pa.array([n for n, _ in rows], pa.int64()), pa.array([r for _, r in rows], pa.binary())
        batch = pa.record_batch([numbers, contents], ["number", "row"])

        def collect(task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> list[tuple[bytes]]:
            logging.getLogger("py4j.java_gateway").error("the key")
            found = [row for answer in task(iter([batch])) for row in answer.to_pydict()["row"]]
            if found == [b"wait"]:
                self.waits.set()
                assert self.interrupted[self.own.tag].wait(WAIT)
                raise RuntimeError("OPERATION_CANCELED")
            return [(row,) for row in found if row is not None]

        def answers(task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str) -> Any:
            return SimpleNamespace(where=lambda condition: SimpleNamespace(collect=lambda: collect(task)))

        return SimpleNamespace(mapInArrow=answers)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(module, "is_connect", lambda session: True)
    return Session()


def test_rows_are_given_and_come_back_in_their_order_and_nothing_of_it_is_logged(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        assert queries.submit(lambda rows: [*rows, b"end"], "", [b"one", b"two"]).result(WAIT) == [
            b"one",
            b"two",
            b"end",
        ]
        assert queries.submit(list, "").result(WAIT) == []
    assert caplog.messages == []


def test_only_large_rows_come_in_several_tasks_and_a_shuffle_brings_them_together(session: Session) -> None:
    """Spark refuses tasks beyond 128 MiB, and a server with little memory cannot send tasks of half that size."""
    large = [bytes([number]) * 2**20 for number in range(9)]
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        assert queries.submit(list, "", large[:8]).result(WAIT) == large[:8]
        assert session.shuffled == []
        assert queries.submit(list, "", large).result(WAIT) == large
    assert session.shuffled == [9]


def test_a_server_that_is_gone_is_not_waited_for(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark Connect's client asks such a server for many minutes, to interrupt a query as well as for the query's result."""
    is_over = threading.Event()
    monkeypatch.setattr(Session, "interruptTag", lambda self, tag: is_over.wait(WAIT))
    monkeypatch.setattr(session_watch, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(SessionWatch, "_is_refused", lambda self: session.waits.is_set())
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        waiting = queries.submit(lambda rows: [b"wait"], "")
        assert session.waits.wait(WAIT)
    assert "is gone" in queries.ended
    assert not waiting.done()
    assert not is_over.is_set()
    is_over.set()
    for interrupted in session.interrupted.values():
        interrupted.set()


def test_queries_that_still_run_are_taken_back_at_the_end(session: Session) -> None:
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        waiting = queries.submit(lambda rows: [b"wait"], "")
        assert session.waits.wait(WAIT)
    assert queries.find_end(waiting.exception(0)) == "its queries were interrupted"  # type: ignore[arg-type]
    assert [thread for thread in threading.enumerate() if thread.name == "spark_elastic-query"] == []


@pytest.mark.parametrize(
    ("said", "sign"),
    [
        ("[INVALID_HANDLE.SESSION_CLOSED] The handle is invalid.", "closed"),
        ("Job aborted due to stage failure: ExecutorLostFailure (executor 0 exited)", ""),
    ],
)
def test_a_lost_executor_does_not_end_a_job_but_a_lost_session_does(session: Session, said: str, sign: str) -> None:
    end = Queries(session, "run").find_end(RuntimeError(said))  # type: ignore[arg-type]
    assert sign in end
    assert bool(end) == bool(sign)


@pytest.mark.parametrize(("stopped", "sign"), [(False, "were cancelled"), (True, "SparkContext was stopped")])
def test_in_a_classic_session_cancelled_jobs_end_a_job(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, sign: str
) -> None:
    monkeypatch.setattr(module, "is_gone", lambda context: stopped)
    classic: Any = SimpleNamespace(sparkContext=None)
    assert sign in Queries(classic, "run").find_end(RuntimeError("Job 7 cancelled as part of cancellation of all jobs"))


class Context:
    """A SparkContext, and its session in the JVM, that note who asks them for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *given: self.asked.append((threading.current_thread().name, name, given)) or "fair"


def test_in_a_classic_session_threads_of_queries_have_the_callers_properties_and_the_caller_asks_the_jvm_for_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_connect", lambda session: False)
    session.sparkContext = session._jsparkSession = context = Context()  # type: ignore[attr-defined]
    monkeypatch.setattr("spark_elastic.launchers.spark._session_tags", lambda session: "session")
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        assert {name for _, name, _ in context.asked} == {"getLocalProperty"}
        context.asked.clear()
        for _ in range(2):
            queries.submit(list, "a query").result(WAIT)
    assert {thread for thread, _, _ in context.asked} == {"spark_elastic-query"}
    asked = [(name, *given) for _, name, given in context.asked]
    of_one = asked[: len(asked) // 2]
    assert of_one[:3] == [
        ("setLocalProperty", "spark.scheduler.pool", "fair"),
        ("setLocalProperty", "spark.jobGroup.id", "fair"),
        ("setLocalProperty", "spark.job.tags", "fair,session"),
    ]
    assert of_one[3] == ("addJobTag", "spark_elastic-run-driver-0"), "after the caller's, which it would be replaced by"
    assert asked[len(of_one) :][:3] == of_one[:3]


def test_in_spark_connect_queries_have_the_callers_tags_and_one_of_their_own(session: Session) -> None:
    with Queries(session, "run") as queries:  # type: ignore[arg-type]
        queries.submit(list, "a query").result(WAIT)
    assert list(session.interrupted) == ["the user's", "spark_elastic-run-driver-0"]


def test_a_map_yields_each_row_by_itself_and_fills_pyspark_s_buffer_with_those_that_are_null() -> None:
    first, null, last = RowsMap(lambda rows: [b"a", None, b"b"])(iter([]))
    assert [batch.to_pydict()["row"] for batch in (first, null, last)] == [[b"a"], [None], [b"b"]]
    assert first.nbytes < 100
    assert null.nbytes >= 65536
