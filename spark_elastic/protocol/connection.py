"""Frames over TLS: a four-byte length, then one msgpack-encoded message.

Nothing is parsed before the handshake has proved that the peer holds the job's key. A frame that is longer than ``FRAME_LIMIT``
or does not fit the schema ends the connection.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.messages import Chunk, Message

FRAME_LIMIT = 64 * 2**20
CHUNK_BYTES = 2**20
HANDSHAKE_SECONDS = 15.0
READ_BYTES = 32 * 1024
# How often a connection is tried that the peer ends in the handshake, and the shortest and longest pause in between.
ATTEMPTS = 8
PAUSE_SECONDS = (0.2, 1.0)
# How many bytes may wait in a connection before forwarded output is dropped, line by line.
CROWDED_BYTES = 4 * 2**20

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


class ConnectionLostError(ConnectionError):
    """The peer is gone, or has sent something that is not a frame of this protocol."""


def encode(message: Message) -> bytes:
    """Encode a message. One that goes to many peers is encoded only once."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ValueError(f"a message of {len(body):,} bytes exceeds the limit of {FRAME_LIMIT:,} bytes a frame")
    return _LENGTH.pack(len(body)) + body


class Connection:
    """One authenticated connection. Only the event loop that made it may use it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: object) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(expected)
        self._socket: socket.socket = writer.get_extra_info("socket")
        _notice_lost_hosts(self._socket)
        _read_in_small_pieces(writer.transport)
        _expect_loss(writer)

    @property
    def local_address(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        """The address of the other end."""
        peer = self._writer.get_extra_info("peername")
        return str(peer[0]) if peer else "unknown"

    @property
    def descriptor(self) -> int:
        """The number of the socket's file descriptor; -1 once that is closed, as its number may be another file's then."""
        return self._socket.fileno()

    @property
    def crowded(self) -> bool:
        """Whether the peer reads messages more slowly than they are sent."""
        return self._writer.transport.get_write_buffer_size() > CROWDED_BYTES

    @property
    def open(self) -> bool:
        """Whether the connection has not been closed yet."""
        return not self._writer.is_closing()

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. On a closed connection the message is dropped: the reader notices the loss."""
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """Queue an encoded frame. On a closed connection it is dropped."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def send_bytes(self, data: bytes | memoryview) -> None:
        """Send a long byte string as chunks, waiting for the peer to read them."""
        for chunk in chunks(data):
            self.send(chunk)
            await self._writer.drain()

    async def receive(self) -> Message:
        """Wait for the next message. Raises ``ConnectionLostError`` at the end, or at anything but a message."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_LIMIT:
                raise ConnectionLostError(f"a frame of {length:,} bytes from {self.peer_address} is over the limit")
            message: Message = self._decoder.decode(await self._reader.readexactly(length))
            return message
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionLostError(f"the connection to {self.peer_address} broke: {error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionLostError(f"{self.peer_address} sent what is not a message: {error}") from error

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the connection ends."""
        while True:
            try:
                message = await self.receive()
            except ConnectionLostError:
                return
            yield message

    async def close(self, flush_seconds: float = 1.0) -> None:
        """Close once all queued messages have been sent, or after ``flush_seconds``."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), flush_seconds)
        except (asyncio.TimeoutError, OSError):
            self.abort()

    def abort(self) -> None:
        """Close at once; queued messages are lost."""
        self._writer.transport.abort()


def chunks(data: bytes | memoryview) -> Iterator[Chunk]:
    """Cut a byte string into chunks; an empty one becomes a single empty last chunk."""
    view = memoryview(data)
    for start in range(0, max(len(view), 1), CHUNK_BYTES):
        yield Chunk(bytes(view[start : start + CHUNK_BYTES]), last=start + CHUNK_BYTES >= len(view))


async def connect(addresses: list[tuple[str, int]], credentials: Credentials, expected: object) -> Connection:
    """Connect to the first address that answers. Raises the last ``OSError`` if none does.

    A driver to which too many connect at the same time closes some of the connections. So a connection that ends in the handshake
    is tried again, after a pause of random length.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await _connect_once(addresses, credentials, expected)
        except ConnectionResetError:
            await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
    return await _connect_once(addresses, credentials, expected)


async def _connect_once(addresses: list[tuple[str, int]], credentials: Credentials, expected: object) -> Connection:
    context = credentials.client_context()
    failure: OSError = OSError("no address to connect to")
    for host, port in addresses:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS),
                2 * HANDSHAKE_SECONDS,
            )
        except asyncio.TimeoutError:
            failure = TimeoutError(f"{host}:{port} did not answer within {2 * HANDSHAKE_SECONDS:.0f} s")
        except (OSError, ssl.SSLError) as error:
            failure = failure if isinstance(failure, ConnectionResetError) else error
        else:
            return Connection(reader, writer, expected)
    raise failure


def _read_in_small_pieces(transport: asyncio.BaseTransport) -> None:
    """Shrink asyncio's TLS buffer of a connection: at 256 KiB each, the buffers of a large job take half a gigabyte."""
    protocol: Any = getattr(transport, "_ssl_protocol", None)
    if hasattr(protocol, "_ssl_buffer") and hasattr(protocol, "max_size"):  # Python 3.11 and later
        protocol.max_size = READ_BYTES
        protocol._ssl_buffer = bytearray(READ_BYTES)
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)


def _expect_loss(writer: asyncio.StreamWriter) -> None:
    """Keep asyncio from reporting a reset connection as an exception that nobody has handled: readers are told of it."""
    closed = getattr(getattr(writer, "_protocol", None), "_closed", None)  # what wait_closed waits for
    if closed is not None:
        closed.add_done_callback(lambda closed: closed.cancelled() or closed.exception())


def _notice_lost_hosts(connection: socket.socket) -> None:
    """Have the kernel end the connection when the other *machine* is gone.

    A paused process keeps its connections, because its kernel continues to answer. So no timeout is needed to tell a dead
    driver from one that is paused, for example by a garbage collection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
