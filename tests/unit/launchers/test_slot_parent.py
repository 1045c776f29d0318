"""The process that slots are forked from outlives what goes wrong with one of them."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import pytest
from other_processes import wait_until

from spark_elastic.launchers import slot_parent
from spark_elastic.launchers.slot_parent import Order
from spark_elastic.launchers.slot_process import SlotParent
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import processes
from spark_elastic.task.service import TaskPlace

ORDER = Order(Ticket("1", (("127.0.0.1", 1),), Credentials(b"", b""), None), TaskPlace(0, 0, (), 1))
KILLED = str(-signal.SIGKILL).encode()


class Parent(slot_parent._Parent):
    """A parent in this process, whose slots wait to be killed, with the driver's end of the connection to it."""

    def __init__(self) -> None:
        self.driver_end, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # How many slots there were each time that it was idle.
        self.idle: list[int] = []
        super().__init__(orders, os.pidfd_open(os.getpid()), lambda: self.idle.append(len(self._slots)))

    @staticmethod
    def _become_slot(*_: object) -> int:
        signal.pause()
        return 1

    def serve_until_no_slot_is_left(self) -> None:
        self.driver_end.close()
        self.serve()

    def close(self) -> None:
        self._selector.close()
        self._orders.close()
        self.driver_end.close()
        for descriptor in (self._driver, *self._spare):
            os.close(descriptor)
        for slot in self._slots:  # of a test that has failed
            signal.pidfd_send_signal(slot.pidfd, signal.SIGKILL)


class Slot:
    """The driver's side of a slot that it has ordered."""

    def __init__(self, parent: Parent) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output, writing = os.pipe()
        with theirs:
            socket.send_fds(parent.driver_end, [msgspec.json.encode(ORDER)], [writing, theirs.fileno()])
        os.close(writing)

    def kill(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        self._connection.close()
        os.close(self._output)

    def end(self) -> tuple[bytes, str]:
        """Return the exit code that was told, and what the slot has printed."""
        with self._connection, open(self._output) as output:
            return self._connection.recv(64), output.read()


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


def test_a_slot_that_the_driver_kills_when_it_has_just_ended_is_reaped_once(parent: Parent) -> None:
    slot = Slot(parent)
    parent._take_order()
    [forked] = parent._slots
    os.kill(forked.pid, signal.SIGKILL)
    select.select([forked.pidfd], [], [])
    slot.kill()
    parent.serve_until_no_slot_is_left()
    assert slot.end() == (KILLED, "")


def test_a_slot_that_the_driver_kills_or_forgets_before_it_is_forked_never_runs(parent: Parent) -> None:
    killed, forgotten = Slot(parent), Slot(parent)
    killed.kill()
    forgotten.forget()
    parent._take_order()
    parent._take_order()
    assert not parent._slots
    assert killed.end() == (KILLED, "")


def test_a_driver_that_never_read_that_its_parent_is_ready_has_retired_it(parent: Parent) -> None:
    """What was not read resets the connection."""
    parent._orders.send(slot_parent.READY)
    parent.driver_end.close()
    parent._take_order()
    parent.serve()  # without slots and orders it ends at once


def test_it_says_when_it_has_imported_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = SlotParent(1)
    try:
        assert not parent.may_have_forked, "its imports take longer than this line"
        wait_until(lambda: parent.may_have_forked, "the imports were to end", seconds=60)
        parent.retire()
        assert parent.may_have_forked
    finally:
        parent.end()


@pytest.mark.parametrize("call", ["fork", "pidfd_open"])
def test_a_slot_that_cannot_be_forked_says_why_and_others_go_on(
    call: str, parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, failing = Slot(parent), Slot(parent)
    parent._take_order()

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "no room")

    monkeypatch.setattr(slot_parent.os, call, refuse)
    parent._take_order()
    assert failing.end() == (b"1", f"it cannot be forked: [Errno {errno.EAGAIN}] no room")
    living.kill()
    parent.serve_until_no_slot_is_left()
    assert living.end() == (KILLED, "")


def test_a_slot_for_which_no_descriptor_is_left_says_so_and_the_next_one_is_forked(parent: Parent) -> None:
    failing = Slot(parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        parent._take_order()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failing.end() == (b"1", f"it cannot be forked: [Errno {errno.EMFILE}] Too many open files")
    living = Slot(parent)
    parent._take_order()
    living.kill()
    parent.serve_until_no_slot_is_left()
    assert living.end() == (KILLED, "")


def test_it_ends_when_it_has_had_no_slot_for_long_and_waits_for_ever_while_it_has_one(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    select_ready = parent._selector.select

    def note(timeout: float | None) -> list[Any]:
        waits.append(timeout)
        if timeout is not None:
            return []  # nothing came
        slot.kill()
        return select_ready(None)

    monkeypatch.setattr(parent._selector, "select", note)
    slot = Slot(parent)
    parent._take_order()
    parent.serve()
    assert slot.end() == (KILLED, "")
    assert waits[0] is None
    assert waits[-1] == processes.IDLE_SECONDS
    assert waits.count(processes.IDLE_SECONDS) == 1
    assert parent.idle == [0], "once, between the last slot and the next order"


def test_it_starts_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    parent = SlotParent(1)
    parent.retire()
    assert parent.story() == "the process that slots are forked from ended with exit code 0"
