"""The post office of a job whose driver runs in a slot: it keeps letters until somebody fetches them.

Spark returns nothing from a task before the task ends, and a driver runs as long as its job. So the driver leaves its reports
in a post office, from which short tasks fetch them. Whoever puts or fetches letters shows the job's certificate, as on all
connections.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from spark_elastic.driver.door import Door, listen
from spark_elastic.protocol.connection import Connection, ConnectionLostError, connect
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.messages import Message

Addresses = tuple[tuple[str, int], ...]

REQUEST_SECONDS = 15.0
# How many seconds a fetch that finds no letter waits for one, because each fetch is a Spark job.
WAIT_SECONDS = 20.0
# How many seconds a first letter waits for further letters, so that they travel together.
GATHER_SECONDS = 0.5
# How many letters may wait. Once there are this many, new ones are turned away.
LIMIT = 50_000
END_SECONDS = 5.0


class Put(Message, frozen=True):
    """Leave a letter."""

    letter: bytes


class Fetch(Message, frozen=True):
    """Ask for the letters after this number. Letters up to it have arrived, and are forgotten."""

    after: int


class Letter(Message, frozen=True):
    """One letter. Letters are numbered from 1."""

    number: int
    content: bytes


class NoMore(Message, frozen=True):
    """Marks the end of the present letters."""


class PostOffice:
    """Keeps letters and serves them, on a thread of its own, from ``__enter__`` to ``__exit__``."""

    def __init__(self, credentials: Credentials, listener: socket.socket | None = None) -> None:
        self._credentials = credentials
        self._listener = listener
        self._letters: deque[Letter] = deque()
        self._last = 0
        self._turned_away = 0
        self._lock = threading.Lock()
        self._changed: asyncio.Event
        self._is_closing = False
        # Whether any letter has been fetched, and whether all letters had been acknowledged at the last check.
        self.taken, self.emptied = threading.Event(), threading.Event()
        self.port = 0
        self._door: Door
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="spark_elastic-post", daemon=True)

    def __enter__(self) -> PostOffice:
        self._listener = self._listener or listen("", 0)
        self.port = self._listener.getsockname()[1]
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(self._listener), self._loop).result()
        return self

    def __exit__(self, *raised: object) -> None:
        """Answer waiting fetches and refuse new ones."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        self._loop.close()

    def put(self, content: bytes) -> None:
        """Leave a letter, from any thread, without waiting. If too many wait, it is turned away and counted."""
        with self._lock:
            if len(self._letters) >= LIMIT:
                self._turned_away += 1
                return
            self._last += 1
            self._letters.append(Letter(self._last, content))
            self.emptied.clear()
        self._loop.call_soon_threadsafe(self._changed.set)

    def take_turned_away(self) -> int:
        """Return how many letters have been turned away since the last call."""
        with self._lock:
            count, self._turned_away = self._turned_away, 0
            return count

    def left(self) -> list[Letter]:
        """Return the letters that have not been acknowledged."""
        with self._lock:
            return list(self._letters)

    async def _open(self, listener: socket.socket) -> None:
        self._changed = asyncio.Event()
        self._door = Door(listener, self._credentials.server_context(), self._visited)
        self._door.open()

    async def _close(self) -> None:
        self._is_closing = True
        self._changed.set()
        self._door.close()
        if self._door.visits:
            await asyncio.wait(self._door.visits, timeout=END_SECONDS)

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, Put | Fetch)
        try:
            match await asyncio.wait_for(connection.receive(), REQUEST_SECONDS):
                case Put(letter):
                    self.put(letter)
                    letters = []
                case Fetch(after):
                    letters = await self._after(after)
            if letters:
                self.taken.set()
            for answer in (*letters, NoMore()):
                connection.send(answer)
            await connection.close(REQUEST_SECONDS)
        except (ConnectionLostError, asyncio.TimeoutError, ConnectionError):
            pass  # the caller fetches again if it still wants the letters
        finally:
            connection.abort()

    async def _after(self, number: int) -> list[Letter]:
        """Wait a while for letters after this number, and return them."""
        with self._lock:
            while self._letters and self._letters[0].number <= number:
                self._letters.popleft()
            self._changed.clear()
            if not self._letters:
                self.emptied.set()
        try:
            if not self.left() and not self._is_closing:
                await asyncio.wait_for(self._changed.wait(), WAIT_SECONDS)
            if not self._is_closing:
                await asyncio.sleep(GATHER_SECONDS)
        except asyncio.TimeoutError:
            pass
        return self.left()


@dataclass(frozen=True, slots=True)
class FetchLetters:
    """The function of a task that fetches letters."""

    addresses: Addresses
    credentials: Credentials
    after: int

    def __call__(self, rows: Iterable[bytes]) -> list[bytes]:
        """Fetch the letters, waiting a while for the first. Return no row if the post office cannot be reached."""
        try:
            letters = visit(self.addresses, self.credentials, Fetch(self.after))
        except OSError:
            return []
        return [msgspec.msgpack.encode(letters)]


def read_letters(rows: Iterable[bytes]) -> list[Letter] | None:
    """Read what a ``FetchLetters`` task has returned; None if the post office could not be reached."""
    answers = [msgspec.msgpack.decode(row, type=list[Letter]) for row in rows]
    return answers[0] if answers else None


def visit(addresses: Addresses, credentials: Credentials, request: Put | Fetch) -> list[Letter]:
    """Put a letter, or fetch some. Raises ``OSError`` if the post office cannot be reached or goes away."""
    # asyncio.run would leave this Python process without an event loop for whatever Spark runs in it next.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_visit(addresses, credentials, request))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _visit(addresses: Addresses, credentials: Credentials, request: Put | Fetch) -> list[Letter]:
    connection = await connect(list(addresses), credentials, Letter | NoMore)
    try:
        connection.send(request)
        letters: list[Letter] = []
        while isinstance(letter := await connection.receive(), Letter):
            letters.append(letter)
        return letters
    finally:
        await connection.close()
