"""SessionWatch: the end of a session is noticed, with the reason, and a busy server is not taken for gone."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from connect_session import session

from spark_elastic.launchers import session_watch
from spark_elastic.launchers.session_watch import SessionWatch, endpoint_of


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("spark.example:15002", ("spark.example", 15002)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:15002", ("::1", 15002)),
        (None, ("", 15002)),
    ],
)
def test_the_servers_address_is_that_of_the_client(endpoint: str | None, found: tuple[str, int]) -> None:
    assert endpoint_of(session(endpoint)) == found


@pytest.fixture(autouse=True)
def looks_follow_each_other_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_watch, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(session_watch, "PROBE_SECONDS", 0.01)


def session_at(port: int, is_stopped: bool = False) -> Any:
    made = session(f"127.0.0.1:{port}")
    made.is_stopped = is_stopped
    return made


@pytest.fixture
def server() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_server_that_goes_away_is_noticed_once_and_named(server: socket.socket) -> None:
    port, reasons, ended = server.getsockname()[1], list[str](), threading.Event()

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watch = SessionWatch(session_at(port), end)
    with watch:
        assert not watch.find_end()
        assert not ended.is_set()
        server.close()
        assert ended.wait(30)
    assert reasons == [f"the Spark Connect server at 127.0.0.1:{port} is gone"]
    assert watch.find_end() == reasons[0]


def test_a_session_that_was_stopped_has_ended_whatever_its_server_does(server: socket.socket) -> None:
    made, ended = session_at(server.getsockname()[1]), threading.Event()
    with SessionWatch(made, lambda reason: ended.set()) as watch:
        made.is_stopped = True
        assert ended.wait(30)
        assert watch.find_end() == "its Spark Connect session was stopped"


def test_refusals_that_are_not_in_a_row_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server under load refuses a connection now and then."""
    looks = iter([True, True, False] * 5)
    seen, reasons = threading.Event(), list[str]()

    def is_refused() -> bool:
        is_refused = next(looks, None)
        if is_refused is None:
            seen.set()
        return bool(is_refused)

    watch = SessionWatch(session_at(1), reasons.append)
    monkeypatch.setattr(watch, "_is_refused", is_refused)
    with watch:
        assert seen.wait(30)
    assert reasons == []


def test_a_server_that_does_not_answer_may_only_be_busy_and_one_without_an_address_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_out(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)
    assert SessionWatch(session_at(1), print).find_end() == ""
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it was asked"))
    unknown = session(None)
    unknown.is_stopped = False
    assert SessionWatch(unknown, print).find_end() == ""
