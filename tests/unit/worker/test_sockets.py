"""GroupSockets.traffic: bytes that arrive are counted, and a peer whose packets vanish without a word is seen to be silent."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from spark_elastic.worker.sockets import GroupSockets

SECONDS = 30.0
SO_ATTACH_FILTER = 26
# Of the states of a connection in the kernel's struct tcp_info.
ESTABLISHED = 1


@pytest.fixture
def ends() -> Iterator[tuple[GroupSockets, socket.socket, socket.socket]]:
    """Two ends of a connection of a group, of which the group has noted the first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    sockets = GroupSockets()
    sockets._kept.append(mine)
    yield sockets, mine, theirs
    theirs.close()
    sockets.close()


def test_a_peer_does_not_see_the_end_of_a_later_connection_before_the_group_is_closed() -> None:
    """Gloo closes what was shut. A peer that sees that before it is told of the abort takes it for an error of its user's."""
    sockets = GroupSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets.addresses.add(listener.getsockname())
        sockets.capture()
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    sockets.shut()
    mine.close()
    assert state_of(theirs) == ESTABLISHED
    sockets.close()
    theirs.close()


def test_connections_that_are_known_are_shut_where_no_descriptor_is_left_to_look_for_others(
    ends: tuple[GroupSockets, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_nothing(path: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files", path)

    sockets, mine, _ = ends
    monkeypatch.setattr(os, "listdir", list_nothing)
    sockets.shut()
    assert mine.recv(1) == b""


def state_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def swallow(connection: socket.socket) -> None:
    """Have the kernel drop all that comes in, also what would acknowledge it."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def wait_for(sockets: GroupSockets, moved: int, silent: int) -> None:
    end = time.monotonic() + SECONDS
    while sockets.traffic() != (moved, silent):
        assert time.monotonic() < end, sockets.traffic()
        time.sleep(0.05)


def test_what_has_come_and_what_has_arrived_counts_and_what_vanishes_is_told_by_its_silence(
    ends: tuple[GroupSockets, socket.socket, socket.socket],
) -> None:
    sockets, mine, theirs = ends
    before, _ = sockets.traffic()  # the kernel counts the connection's making as a byte
    mine.sendall(b"12345")
    theirs.sendall(b"123")
    wait_for(sockets, before + 8, silent=0)
    swallow(theirs)
    mine.sendall(b"1234567")
    wait_for(sockets, before + 8, silent=1)
