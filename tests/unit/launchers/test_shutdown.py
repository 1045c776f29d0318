"""shutdown() ends what waits for the next run, here and on executors, and does not fail where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import spark_elastic
from spark_elastic.launchers import shutdown as module
from spark_elastic.task.importer import end_idle_importers


class Jobs:
    """Stands for the queries of sessions, which end as a test says."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, Any, int]] = []
        self.left = 0
        self.end: Callable[[], object] = lambda: None
        self._session: Any = None

    def __call__(self, session: Any, run_id: str) -> Jobs:
        self._session = session
        return self

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *raised: object) -> None:
        self.left += 1

    def submit(self, function: Any, name: str, tasks: int) -> Future[object]:
        self.submitted.append((self._session, function, tasks))
        ended: Future[object] = Future()
        try:
            ended.set_result(self.end())
        except Exception as error:
            ended.set_exception(error)
        return ended


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(module, "Queries", made)
    return made


def session(cores: int, is_stopped: bool = False) -> Any:
    scala = SimpleNamespace(isStopped=lambda: is_stopped)
    return SimpleNamespace(
        sparkContext=SimpleNamespace(defaultParallelism=cores, _jsc=SimpleNamespace(sc=lambda: scala))
    )


def test_in_every_session_that_lives_as_many_tasks_as_it_has_cores_end_importers(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, stopped, other = session(4), session(8, is_stopped=True), session(2)
    monkeypatch.setattr(module, "used_sessions", lambda: [one, stopped, other])
    spark_elastic.shutdown()
    assert jobs.submitted == [(one, end_idle_importers, 4), (other, end_idle_importers, 2)]
    assert jobs.left == 2


def test_a_spark_connect_server_that_is_gone_is_not_asked(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only to ask it for its cores would take minutes."""
    gone, alive = session(4), session(2)
    monkeypatch.setattr(module, "used_sessions", lambda: [gone, alive])
    monkeypatch.setattr(module, "is_connect", lambda session: session is gone)
    monkeypatch.setattr(module, "find_end", lambda session: "the Spark Connect server at node1:15002 is gone")
    spark_elastic.shutdown()
    assert jobs.submitted == [(alive, end_idle_importers, 2)]


def test_the_process_that_is_kept_here_ends_first(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    jobs.end = lambda: order.append("executors")
    monkeypatch.setattr(module, "used_sessions", lambda: [session(1)])
    monkeypatch.setattr(module, "KEPT", SimpleNamespace(end=lambda: order.append("here")))
    spark_elastic.shutdown()
    assert order == ["here", "executors"]


def test_executors_that_cannot_be_asked_are_a_line_in_the_log_and_the_next_session_is_asked(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the session is closed")

    jobs.end = fail
    monkeypatch.setattr(module, "used_sessions", lambda: [session(1), session(2)])
    with caplog.at_level(logging.INFO, "spark_elastic"):
        spark_elastic.shutdown()
    assert len(jobs.submitted) == 2
    assert ["end by themselves: the session is closed" in message for message in caplog.messages] == [True, True]


def test_where_no_core_becomes_free_that_is_said(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "submit", lambda *_, tasks: Future())
    monkeypatch.setattr(module, "EXECUTORS_SECONDS", 0.01)
    monkeypatch.setattr(module, "used_sessions", lambda: [session(1)])
    with caplog.at_level(logging.INFO, "spark_elastic"):
        spark_elastic.shutdown()
    assert "end by themselves: no core was free" in caplog.text
