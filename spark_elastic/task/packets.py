"""The messages between a task and its warm parent, on a connection of SOCK_SEQPACKET: one JSON object per packet.

A task sends its ticket once, then ``Start`` with two descriptors (stdout, stderr), and ``Kill``. The warm parent answers with
``Started`` and a pidfd, and with ``Exited`` once the worker's whole process tree is gone. If an importer forks the warm parent,
the first packet is ``Fork``, and the first answer ``Forked`` with a pidfd of the warm parent.
"""

from __future__ import annotations

import array
import socket

import msgspec

from spark_elastic.protocol.ticket import Ticket

PACKET_BYTES = 128 * 1024


class Packet(msgspec.Struct, frozen=True, tag=True):
    """The base class of all packets."""


class Begin(Packet, frozen=True):
    """Hands over the ticket with which workers join the job."""

    ticket: Ticket


class Start(Packet, frozen=True):
    """Fork a worker as soon as the previous worker and everything that it started are gone."""

    worker: int
    token: str


class Kill(Packet, frozen=True):
    """Kill the worker and everything that it started."""

    worker: int


class Fork(Packet, frozen=True):
    """For an importer: fork a warm parent that serves this connection, with these variables in its environment."""

    variables: dict[str, str]


class End(Packet, frozen=True):
    """For an importer: end if no task is served. It answers with ``Ending`` if it does."""


class Started(Packet, frozen=True):
    """The worker runs as the process with this pid."""

    worker: int
    pid: int


class Exited(Packet, frozen=True):
    """The worker and everything that it started are gone. ``code`` is minus the signal that killed it."""

    worker: int
    code: int


class Forked(Packet, frozen=True):
    """The warm parent runs as the process with this pid."""

    pid: int


class Ending(Packet, frozen=True):
    """The importer is about to end. Its pidfd comes along."""


Order = Begin | Start | Kill
Request = Fork | End
Answer = Started | Exited | Forked | Ending

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def send(connection: socket.socket, packet: Packet, descriptors: list[int] | None = None) -> None:
    """Send one packet together with open files."""
    try:
        socket.send_fds(connection, [msgspec.json.encode(packet)], descriptors or [])
    except (BrokenPipeError, ConnectionResetError):
        pass  # the other end is gone, as the next read from this socket will show


def receive_order(connection: socket.socket) -> tuple[Order | None, list[int]]:
    """Return the task's next packet and its descriptors; None if the task is gone."""
    data, descriptors = _receive(connection)
    return (_orders.decode(data) if data else None), descriptors


def receive_request(connection: socket.socket) -> Request | None:
    """Return what a task wants of the importer; None if the task is gone."""
    data, _ = _receive(connection)
    return _requests.decode(data) if data else None


def receive_answer(connection: socket.socket) -> tuple[Answer | None, list[int]]:
    """Return the warm parent's next packet and its descriptors; None if the warm parent is gone."""
    data, descriptors = _receive(connection)
    return (_answers.decode(data) if data else None), descriptors


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = connection.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)
