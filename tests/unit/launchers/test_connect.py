"""What a session of Spark Connect tells about itself, and which of its errors end a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.launchers.connect import ConnectLauncher, endpoint_of, find_end


def session(endpoint: str | None, **settings: str) -> Any:
    builder = SimpleNamespace() if endpoint is None else SimpleNamespace(endpoint=endpoint)
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    return SimpleNamespace(client=SimpleNamespace(_builder=builder), conf=conf)


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
    assert sign in find_end(said)


def test_a_lost_executor_does_not_end_the_job() -> None:
    assert not find_end("Job aborted due to stage failure: ExecutorLostFailure (executor 0 exited)")
