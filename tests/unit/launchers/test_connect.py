"""What a session of Spark Connect tells about itself, and which of its errors end a job."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from connect_session import session

from spark_elastic.launchers import connect
from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.connect import ConnectLauncher, ConnectSlots, end_in
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.ticket import Ticket

WAIT = 20.0


def test_executors_find_a_driver_beside_the_server_under_the_servers_own_name() -> None:
    beside = ConnectLauncher(session("127.0.0.1:15002", spark_driver_host="10.1.2.3")).addresses(7)
    assert beside[:2] == (("10.1.2.3", 7), ("127.0.0.1", 7))


def test_executors_find_a_driver_elsewhere_by_its_address_towards_the_server() -> None:
    elsewhere = ConnectLauncher(session("192.0.2.1:15002", spark_driver_host="10.1.2.3")).addresses(7)
    assert ("10.1.2.3", 7) not in elsewhere
    assert elsewhere


@pytest.mark.parametrize(
    ("said", "sign"),
    [
        ("[INVALID_HANDLE.SESSION_CLOSED] The handle is invalid. Session was closed.", "closed"),
        ("[INVALID_HANDLE.SESSION_NOT_FOUND] The handle is invalid.", "timed out"),
        ("[INVALID_HANDLE.SESSION_CHANGED] The existing Spark server driver instance has restarted.", "restarted"),
        ("Job 3 cancelled because SparkContext was shut down", "SparkContext"),
    ],
)
def test_errors_after_which_no_query_runs_end_the_job(said: str, sign: str) -> None:
    assert sign in end_in(said)


def test_a_lost_executor_does_not_end_the_job() -> None:
    assert not end_in("Job aborted due to stage failure: ExecutorLostFailure (executor 0 exited)")


class Session:
    """A session whose first query fails; the others run until they are interrupted by their tag."""

    is_stopped = False
    client = SimpleNamespace()

    def __init__(self) -> None:
        self.own = threading.local()
        self.queries: dict[str, threading.Event] = {}
        self.tags: list[str] = []
        self.logged: list[str] = []
        self.failed, self.runs = threading.Event(), threading.Event()

    def getTags(self) -> set[str]:
        return {"the user's"}

    def addTag(self, tag: str) -> None:
        self.own.tag = tag
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:
        assert self.own.tag == tag

    def range(self, *_: int, numPartitions: int) -> Session:
        return self

    def mapInArrow(self, task: Any, schema: str) -> Session:
        logging.getLogger("pyspark.sql.connect.logging").error("the key")
        return self

    def collect(self) -> None:
        if not self.failed.is_set():
            self.failed.set()
            raise OSError("an executor was lost")
        query = self.queries[self.own.tag] = threading.Event()
        self.runs.set()
        query.wait(WAIT)
        raise RuntimeError("[OPERATION_CANCELED] Operation has been canceled.")

    def interruptTag(self, tag: str) -> None:
        self.runs.wait(WAIT)  # it takes its time
        if tag in self.queries:
            self.queries[tag].set()


def one_slot(session: Any) -> tuple[ConnectSlots, list[str]]:
    stopped: list[str] = []
    listener = SlotListener(
        on_stopped=stopped.append,
        on_failed=lambda reason: stopped.append(f"failed: {reason}"),
        on_draining=lambda slot: None,
        on_given_up=lambda slot, reason: None,
    )
    ticket = Ticket("run", (("127.0.0.1", 1),), create_credentials("run"), None)
    return ConnectSlots(session, ticket, 1, listener), stopped


def test_slots_that_are_given_back_while_they_wait_do_not_take_the_next_query_for_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "YIELD_SECONDS", (0.05, 0.05))
    session = Session()
    interrupt = ConnectSlots._interrupt

    def late(slots: ConnectSlots, *queries: Any) -> None:
        session.runs.wait(WAIT)  # the thread, too, takes its time
        interrupt(slots, *queries)

    monkeypatch.setattr(ConnectSlots, "_interrupt", late)
    slots, stopped = one_slot(session)
    with slots:
        assert session.failed.wait(WAIT)
        slots.give_back()
        assert session.runs.wait(WAIT)
        for thread in threading.enumerate():
            if thread.name == "spark_elastic-give-back":
                thread.join(WAIT)
        assert not any(query.is_set() for query in session.queries.values())
    assert not stopped


def test_a_task_that_was_lost_when_the_job_ended_is_not_waited_for() -> None:
    session = Session()
    slots, _ = one_slot(session)
    with slots:
        assert session.runs.wait(WAIT)
        slots.slot_registered(0)
        slots.slot_lost(0)
        slots.submit_no_more()
        taker = threading.Thread(target=slots._take_back, args=(float("inf"),), daemon=True)
        taker.start()
        taker.join(WAIT)
        assert not taker.is_alive()
        (query,) = session.queries.values()
        assert query.is_set()


def test_a_query_that_somebody_else_interrupts_ends_the_job() -> None:
    session = Session()
    slots, stopped = one_slot(session)
    with slots:
        assert session.runs.wait(WAIT)
        (query,) = session.queries.values()
        query.set()
        slots._threads[0].join(WAIT)
    assert stopped == ["its queries were interrupted, or its Spark Connect session was stopped"]


def test_queries_have_the_tags_of_the_thread_that_calls_by_which_the_user_interrupts_them() -> None:
    session = Session()
    slots, _ = one_slot(session)
    with slots:
        assert session.runs.wait(WAIT)
    assert session.tags == ["the user's", "spark_elastic-run-0-0", "spark_elastic-run-0-1"]


def test_the_jobs_key_is_in_no_log_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    slots, _ = one_slot(session)
    with slots:
        assert session.runs.wait(WAIT)
    assert "the key" not in caplog.text
