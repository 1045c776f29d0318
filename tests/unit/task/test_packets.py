"""What a task and its warm parent tell each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import packets

TICKET = Ticket("run", (("node1", 1), ("node2", 2)), Credentials(b"certificate \xff", b"key"), "eth0")
ORDERS = [packets.Begin(TICKET), packets.Start(3, "token"), packets.Kill(3)]
ANSWERS = [packets.Started(3, 4711), packets.Exited(3, -9), packets.Forked(4711), packets.Ending()]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_orders_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket], order: packets.Order) -> None:
    packets.send(pair[0], order)
    assert packets.receive_order(pair[1]) == (order, [])


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_answers_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket], answer: packets.Answer) -> None:
    packets.send(pair[0], answer)
    assert packets.receive_answer(pair[1]) == (answer, [])


@pytest.mark.parametrize("request_", [packets.Fork({"NAME": "value"}), packets.End()], ids=["Fork", "End"])
def test_requests_arrive_as_they_were_sent(
    pair: tuple[socket.socket, socket.socket], request_: packets.Request
) -> None:
    packets.send(pair[0], request_)
    assert packets.receive_request(pair[1]) == request_


def test_open_files_come_along(pair: tuple[socket.socket, socket.socket]) -> None:
    reading, writing = os.pipe()
    packets.send(pair[0], packets.Start(3, "token"), [writing])
    os.close(writing)
    _, (received,) = packets.receive_order(pair[1])
    os.write(received, b"here")
    os.close(received)
    assert os.read(reading, 10) == b"here"
    os.close(reading)


def test_an_end_that_is_gone_is_told_apart_from_a_packet(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert packets.receive_order(pair[1]) == (None, [])
    packets.send(pair[1], packets.Kill(3))  # nobody is there: its reader is about to learn
