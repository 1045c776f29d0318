"""The process in which a driver's addresses are left ends when they were fetched, with its executor, or when nobody comes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from spark_elastic.driver import meeting as module
from spark_elastic.driver.meeting import EndMeeting, OpenMeeting, own_addresses, read_addresses
from spark_elastic.driver.post import Addresses, Fetch, Put, visit
from spark_elastic.protocol.credentials import Credentials, create_credentials

ENDS_WITHIN = 60.0


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials("meeting")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[Any]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        monkeypatch.setattr(module, "find_executor", lambda: process.pid)
        yield process
        process.kill()


def listener(addresses: Addresses) -> psutil.Process:
    listening = [entry for entry in psutil.net_connections() if entry.status == psutil.CONN_LISTEN]
    (found,) = [entry.pid for entry in listening if entry.laddr.port == addresses[0][1]]
    return psutil.Process(found)


def open_meeting(credentials: Credentials, seconds: float = 60.0) -> Addresses:
    (row,) = OpenMeeting(credentials, "127.0.0.1", seconds)([])
    return read_addresses(row)


def test_what_one_task_leaves_there_another_one_fetches_and_then_it_ends(
    credentials: Credentials, executor: subprocess.Popen[Any]
) -> None:
    addresses = open_meeting(credentials)
    process = listener(addresses)
    assert "KEY" not in " ".join(process.cmdline()) + str(process.environ())
    visit(addresses, credentials, Put(b"here"))
    assert [letter.content for letter in visit(addresses, credentials, Fetch(0))] == [b"here"]
    process.wait(ENDS_WITHIN)


def test_it_ends_with_its_executor(credentials: Credentials, executor: subprocess.Popen[Any]) -> None:
    process = listener(open_meeting(credentials))
    executor.kill()
    process.wait(ENDS_WITHIN)


def test_it_ends_when_nobody_comes(credentials: Credentials, executor: subprocess.Popen[Any]) -> None:
    begun = time.monotonic()
    addresses = open_meeting(credentials, seconds=1.0)
    while nobody_refuses(addresses):
        assert time.monotonic() - begun < ENDS_WITHIN
        time.sleep(0.01)
    assert time.monotonic() - begun >= 1.0


def nobody_refuses(addresses: Addresses) -> bool:
    try:
        socket.create_connection(addresses[0]).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_is_ended_where_no_driver_is_going_to_come(
    credentials: Credentials, executor: subprocess.Popen[Any]
) -> None:
    addresses = open_meeting(credentials)
    process = listener(addresses)
    assert EndMeeting(addresses, credentials)([]) == []
    process.wait(ENDS_WITHIN)
    assert EndMeeting(addresses, credentials)([]) == [], "it has ended already"


def test_an_executor_is_reached_by_its_address_towards_spark_and_by_its_name() -> None:
    assert own_addresses("127.0.0.1", 7)[0] == ("127.0.0.1", 7)
    assert len(own_addresses("", 7)) == 1
