"""Frames over mutual TLS on the loopback: who gets in, what ends a connection, what arrives."""

from __future__ import annotations

import asyncio
import datetime
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
from processes import ports_of

from spark_elastic.protocol import connection as connections
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import (
    ATTEMPTS,
    CHUNK_BYTES,
    FRAME_LIMIT,
    Connection,
    ConnectionLostError,
    chunks,
    connect,
    encode,
)
from spark_elastic.protocol.credentials import Credentials, create_credentials


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test nobody listens who did not before."""
    before = ports_of(psutil.Process())
    yield
    assert ports_of(psutil.Process()) == before


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials("test")


async def _served(
    credentials: Credentials, serve: Callable[[Connection], Awaitable[Any]], use: Callable[[int], Awaitable[Any]]
) -> tuple[Any, Any]:
    """Serve one connection, use it from a client, and return what both came to."""
    served: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, m.ToDriver)
        try:
            served.set_result(await serve(connection))
        except ConnectionLostError as error:
            served.set_result(error)
        finally:
            connection.abort()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=credentials.server_context())
    async with server:
        used = await asyncio.wait_for(use(server.sockets[0].getsockname()[1]), 10)
        return await asyncio.wait_for(served, 10), used


def talk(
    credentials: Credentials, serve: Callable[[Connection], Awaitable[Any]], use: Callable[[Connection], Awaitable[Any]]
) -> tuple[Any, Any]:
    async def used(port: int) -> Any:
        connection = await connect([("127.0.0.1", port)], credentials, m.ToWorker)
        try:
            return await use(connection)
        finally:
            await connection.close()

    return asyncio.run(_served(credentials, serve, used))


async def receive_all(connection: Connection) -> list[Any]:
    return [message async for message in connection.messages()]


def test_a_connection_that_is_reset_leaves_no_exception_that_nobody_has_handled(credentials: Credentials) -> None:
    """After a job with kills, asyncio at times printed "Future exception was never retrieved"."""
    ends: list[Any] = []

    async def receive(connection: Connection) -> None:
        ends.append(connection._writer._protocol._closed)  # type: ignore[attr-defined]
        await connection.receive()

    async def reset(port: int) -> None:
        connection = await connect([("127.0.0.1", port)], credentials, m.ToWorker)
        lingers_not = struct.pack("ii", 1, 0)
        connection._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers_not)
        connection.abort()

    lost, _ = asyncio.run(_served(credentials, receive, reset))
    assert isinstance(lost, ConnectionLostError)
    assert not ends[0]._log_traceback
    assert isinstance(ends[0].exception(), ConnectionResetError)


def test_messages_arrive_in_order(credentials: Credentials) -> None:
    async def send(connection: Connection) -> None:
        for generation in range(200):
            connection.send(m.WorkerReady(generation, m.CommitId(generation, 1), "why"))

    received, _ = talk(credentials, receive_all, send)
    assert received == [m.WorkerReady(generation, m.CommitId(generation, 1), "why") for generation in range(200)]


def test_a_long_byte_string_travels_in_chunks(credentials: Credentials) -> None:
    data = random.Random(1).randbytes(3 * CHUNK_BYTES + 17)

    async def send(connection: Connection) -> None:
        await connection.send_bytes(data)

    received, _ = talk(credentials, receive_all, send)
    assert b"".join(chunk.data for chunk in received) == data
    assert [chunk.last for chunk in received] == [False, False, False, True]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_exactly_the_last_chunk_says_so(size: int) -> None:
    pieces = list(chunks(bytes(size)))
    assert sum(len(piece.data) for piece in pieces) == size
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        encode(m.Chunk(bytes(FRAME_LIMIT + 1), True))


def test_a_send_on_a_closed_connection_is_dropped(credentials: Credentials) -> None:
    async def use(connection: Connection) -> bool:
        connection.abort()
        connection.send(m.Pong(1))
        return connection.open

    received, is_open = talk(credentials, receive_all, use)
    assert received == []
    assert is_open is False


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


NO_MESSAGES = {
    "too long": struct.pack("!I", FRAME_LIMIT + 1),
    "not msgpack": framed(b"\xc1\xc1\xc1\xc1"),
    "empty": framed(b""),
    "cut short": struct.pack("!I", 9) + b"trunc",
    "half a length": b"\x00\x00",
    "for somebody else": encode(m.FormWorld(1, (), 0, "gloo")),
    "cut inside": framed(msgspec.msgpack.encode({"type": "Pong"})[:8]),
    "wrong type": framed(msgspec.msgpack.encode({"type": "Pong", "number": "x"})),
    "deeply nested": framed(b"\x82\xa4type\xa4Pong\xa6number" + b"\x91" * 5000 + b"\x01"),
    "deeply nested and unknown": framed(b"\x82\xa4type\xa4Pong\xa4more" + b"\x91" * 100_000 + b"\x01"),
    "tag not utf-8": framed(b"\x81\xa4type\xa4\xff\xfe\xfd\xfc"),
    "text not utf-8": framed(b"\x82\xa4type\xaaTaskFailed\xa6reason\xa2\xff\xfe"),
}


@pytest.mark.parametrize("frame", NO_MESSAGES.values(), ids=NO_MESSAGES.keys())
def test_what_is_no_message_ends_the_connection(credentials: Credentials, frame: bytes) -> None:
    async def serve(connection: Connection) -> Any:
        try:
            return await connection.receive()
        except Exception as error:
            return error

    async def send(connection: Connection) -> None:
        connection.send_encoded(frame)

    answer, _ = talk(credentials, serve, send)
    assert isinstance(answer, ConnectionLostError)


def test_a_frame_over_the_limit_is_refused_before_it_is_read(credentials: Credentials) -> None:
    async def send(connection: Connection) -> None:
        connection.send_encoded(struct.pack("!I", FRAME_LIMIT + 1))

    answer, _ = talk(credentials, lambda connection: connection.receive(), send)
    assert "over the limit" in str(answer)


def test_ten_thousand_damaged_frames_raise_nothing_but_the_loss_of_the_connection(credentials: Credentials) -> None:
    """The reader is fed directly: this is about parsing, not about TLS."""
    source = random.Random(7)
    originals = [
        encode(m.Heartbeat(3, m.Activity(17), 2, m.CommitId(3, 5))),
        encode(m.WorkerRaised("ValueError: ü", "train.py:3", "Traceback", True)),
        encode(m.StoreRequest(1, 2, "set", ("a", "b"), (b"1", b"2"))),
        encode(m.OutputLines(3, m.Stream.OUT, ("a line",), 0)),
    ]

    async def feed() -> None:
        for _ in range(10_000):
            frame = bytearray(source.choice(originals))
            for _ in range(source.randint(1, 4)):
                frame[source.randrange(4, len(frame))] = source.randrange(256)
            reader = asyncio.StreamReader()
            reader.feed_data(bytes(frame))
            reader.feed_eof()
            connection = Connection.__new__(Connection)
            connection._reader, connection._decoder = reader, msgspec.msgpack.Decoder(m.ToDriver)
            connection._writer = _NoWriter()
            try:
                await connection.receive()
            except ConnectionLostError:
                pass

    asyncio.run(feed())


class _NoWriter:
    def get_extra_info(self, name: str) -> None:
        return None


async def _is_refused(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether a client with this context is thrown out before it gets one of our bytes."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, OSError):
        return True
    try:
        writer.write(encode(m.Pong(1)))
        await writer.drain()
        return await asyncio.wait_for(reader.read(1), 60) == b""
    except (ssl.SSLError, OSError):
        return True
    finally:
        writer.transport.abort()


def _refusal(credentials: Credentials, context: ssl.SSLContext | None) -> tuple[bool, bool]:
    """(refused, whether the server's side ever saw a connection)"""

    async def run() -> tuple[bool, bool]:
        seen = []

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer, m.ToDriver)
            try:
                seen.append(await connection.receive())
            except ConnectionLostError:
                pass
            finally:
                connection.abort()

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=credentials.server_context())
        async with server:
            refused = await _is_refused(server.sockets[0].getsockname()[1], context)
        return refused, bool(seen)

    return asyncio.run(run())


def _stranger() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_a_client_without_a_certificate_is_refused(credentials: Credentials) -> None:
    assert _refusal(credentials, _stranger()) == (True, False)


def test_a_client_with_another_jobs_certificate_is_refused(credentials: Credentials) -> None:
    assert _refusal(credentials, create_credentials("other").client_context()) == (True, False)


def test_a_client_with_another_jobs_certificate_that_trusts_anybody_is_refused(credentials: Credentials) -> None:
    context = create_credentials("other").client_context()
    context.verify_mode = ssl.CERT_NONE
    assert _refusal(credentials, context) == (True, False)


def test_an_old_version_of_tls_is_refused(credentials: Credentials) -> None:
    context = credentials.client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert _refusal(credentials, context) == (True, False)


def test_a_client_that_does_not_speak_tls_is_refused(credentials: Credentials) -> None:
    assert _refusal(credentials, None) == (True, False)


def test_a_client_with_the_jobs_certificate_is_heard(credentials: Credentials) -> None:
    assert _refusal(credentials, credentials.client_context()) == (True, True)


@pytest.mark.parametrize("days", [-400, 400], ids=["the client's clock is ahead", "it is behind"])
def test_a_client_whose_clock_is_a_year_off_is_heard_and_strangers_are_not(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of the clock, the certificate's dates are off by so many days."""
    off = datetime.timedelta(days=days)
    monkeypatch.setattr("spark_elastic.protocol.credentials.BACKDATED", -off)
    monkeypatch.setattr("spark_elastic.protocol.credentials.VALID_FOR", off + datetime.timedelta(days=1))
    ours, of_another_job = create_credentials("test"), create_credentials("other")
    assert _refusal(ours, ours.client_context()) == (True, True)
    assert _refusal(ours, of_another_job.client_context()) == (True, False)


def test_a_client_refuses_a_server_of_another_job(credentials: Credentials) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        other = create_credentials("other").server_context()
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=other)
        async with server:
            await connect([("127.0.0.1", server.sockets[0].getsockname()[1])], credentials, m.ToWorker)

    with pytest.raises(ssl.SSLError):
        asyncio.run(run())


def test_connecting_tries_the_next_address(credentials: Credentials) -> None:
    async def use(port: int) -> Any:
        connection = await connect([("127.0.0.1", 1), ("127.0.0.1", port)], credentials, m.ToWorker)
        connection.send(m.Pong(5))
        await connection.close()

    received, _ = asyncio.run(_served(credentials, receive_all, use))
    assert received == [m.Pong(5)]


def test_connecting_to_nobody_raises_what_the_last_address_said(credentials: Credentials) -> None:
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect([("127.0.0.1", 1)], credentials, m.ToWorker))


@pytest.mark.parametrize("closed", [3, ATTEMPTS])
def test_a_connection_that_the_peer_ends_in_the_handshake_is_tried_again(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch, closed: int
) -> None:
    """A driver that all workers of a large job reach at once, with few descriptors, ends some of the connections."""
    monkeypatch.setattr(connections, "PAUSE_SECONDS", (0.0, 0.0))

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        addresses = [("127.0.0.1", listener.getsockname()[1]), ("127.0.0.1", 1)]
        connecting = asyncio.create_task(connect(addresses, credentials, m.ToWorker))
        for _ in range(closed):
            (await loop.sock_accept(listener))[0].close()
        async with await asyncio.start_server(lambda *_: None, sock=listener, ssl=credentials.server_context()):
            try:
                made = await connecting
            except ConnectionResetError:
                return False
            await made.close()
            return True

    assert asyncio.run(run()) == (closed < ATTEMPTS)


def test_connecting_without_an_address_says_so(credentials: Credentials) -> None:
    with pytest.raises(OSError, match="no address"):
        asyncio.run(connect([], credentials, m.ToWorker))
