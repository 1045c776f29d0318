"""Attacks a job's driver: ``fuzzer.py HOST PORT SLOTS FRAMES SEED``, with the job's pickled credentials on stdin.

Sends frames as strangers (no TLS, no certificate, another job's, an old version) and as somebody who holds the job's key:
damaged, truncated and oversized ones to open with, and streams of replayed, stale and out-of-order ones as a host and as its
worker, each ended by a damaged one. It does not lie where that is a member's right: it raises no fatal error, and takes no part
in a world. Prints what it has sent, by kind.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import FRAME_LIMIT, Connection, ConnectionLostError, connect, encode
from spark_elastic.protocol.credentials import Credentials, create_credentials
from spark_elastic.protocol.reports import Metrics
from spark_elastic.task.facts import gather_facts

BURST = 20


class Bomb:
    """Unpickling this is noticed: it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


class Fuzzer:
    def __init__(self, host: str, port: int, slots: int, credentials: Credentials, bomb: bytes, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self._address = (host, port)
        self._slots = slots
        self._credentials = credentials
        self._bomb = bomb
        self._dice = random.Random(seed)
        self._facts = gather_facts(host, (), 1, 0)
        self._stranger = create_credentials("another job")

    async def run(self, frames: int) -> None:
        acts = [self.be_a_stranger, self.open_wrongly, self.be_a_host]
        while (left := frames - self.sent.total()) > 0:
            # The cheap acts send most of the frames, the expensive ones make most of the connections.
            act = self._dice.choices(acts, (1, 4, 2))[0]
            try:
                await asyncio.wait_for(act(left), 60)
            except (OSError, ConnectionLostError, asyncio.TimeoutError):
                pass

    # ------------------------------------------------------------------ without the key

    async def be_a_stranger(self, left: int) -> None:
        context = self._dice.choice([None, self._anonymous, self._other, self._old])
        name = "plain text" if context is None else context.__name__.strip("_")
        frames = [self._damaged() if self._dice.random() < 0.5 else self._stale(0) for _ in range(min(BURST, left))]
        self.sent[f"stranger: {name}"] += len(frames)
        reader, writer = await asyncio.open_connection(*self._address, ssl=context and context())
        try:
            writer.write(b"".join(frames))
            answer = await asyncio.wait_for(reader.read(1), 1)
            assert not answer, f"a stranger ({name}) was answered {answer!r}"
        finally:
            writer.transport.abort()

    def _anonymous(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    def _other(self) -> ssl.SSLContext:
        context = self._stranger.client_context()
        context.verify_mode = ssl.CERT_NONE
        return context

    def _old(self) -> ssl.SSLContext:
        context = self._credentials.client_context()
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    # ------------------------------------------------------------------ with the key

    async def open_wrongly(self, left: int) -> None:
        connection = await connect([self._address], self._credentials, m.ToTask)
        try:
            self.sent["member: wrong opening"] += 1
            connection.send_encoded(self._damaged() if self._dice.random() < 0.7 else self._stale(0))
        finally:
            await connection.close()

    async def be_a_host(self, left: int) -> None:
        """Offer every slot: duplicates of the real ones wait, the free one is taken and told to start a worker."""
        count = min(left, self._dice.randint(1, 8) * BURST * 4)
        offers = [await self._offer(slot) for slot in range(self._slots)]
        waiting = [asyncio.ensure_future(self._first(offer)) for offer in offers]
        try:
            done, _ = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return  # the slot is still taken by the host before
            host, start = await done.pop()
            link = await connect([self._address], self._credentials, m.ToWorker)
            link.send(m.WorkerHello(start.worker, 1, start.token))
            try:
                await self._stream(host, start.worker, count // 2, "host", self._stale_of_host)
                await self._stream(link, start.worker, count - count // 2, "worker", self._stale)
            finally:
                await link.close()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for offer in offers:
                await offer.close()

    async def _offer(self, slot: int) -> Connection:
        connection = await connect([self._address], self._credentials, m.ToTask)
        # Another executor each time, as a place whose workers fail cools down.
        connection.send(m.TaskHello(slot, replace(self._facts, executor_pid=self._dice.randrange(2**40))))
        return connection

    @staticmethod
    async def _first(offer: Connection) -> tuple[Connection, m.StartWorker]:
        while not isinstance(message := await offer.receive(), m.StartWorker):
            pass
        return offer, message

    async def _stream(
        self, connection: Connection, worker: int, count: int, kind: str, draw: Callable[[int], bytes]
    ) -> None:
        swallowing = asyncio.ensure_future(self._swallow(connection))
        for number in range(count - 1):
            connection.send_encoded(draw(worker))
            if number % BURST == 0:
                await connection._writer.drain()
                if not connection.open:
                    break
        connection.send_encoded(self._damaged())
        self.sent[f"member: as a {kind}"] += count
        swallowing.cancel()

    @staticmethod
    async def _swallow(connection: Connection) -> None:
        async for _ in connection.messages():
            pass

    # ------------------------------------------------------------------ frames

    def _damaged(self) -> bytes:
        """What is no frame, or no message."""
        frame = bytearray(self._stale(0))
        match self._dice.randrange(6):
            case 0:
                return bytes(frame[: self._dice.randrange(len(frame))])
            case 1:
                return struct.pack("!I", self._dice.randint(FRAME_LIMIT + 1, 2**32 - 1)) + bytes(frame)
            case 2:
                return struct.pack("!I", len(self._bomb)) + self._bomb
            case 3:
                return self._dice.randbytes(self._dice.randint(1, 300))
            case 4:
                nested = b"\x82\xa4type\xa4Pong\xa4more" + b"\x91" * self._dice.randint(1000, 50_000)
                return struct.pack("!I", len(nested)) + nested
        for _ in range(self._dice.randint(1, 8)):
            frame[self._dice.randrange(4, 8)] = self._dice.randrange(256)  # where msgpack says what comes
        return bytes(frame)

    def _stale_of_host(self, worker: int) -> bytes:
        """What a host might send too late, twice, or for somebody else; its own worker it keeps."""
        other = self._dice.randrange(max(worker, 1))
        return encode(
            self._dice.choice(
                [
                    m.Pong(self._dice.randrange(2**40)),
                    m.WorkerStarted(other, 1),
                    m.WorkerDying(other),
                    m.WorkerExited(other, self._dice.choice([0, 1, -9]), ("a line",)),
                    m.OutputLines(other, m.Stream.OUT, ()),
                ]
            )
        )

    def _stale(self, worker: int) -> bytes:
        """What a worker might send too late, twice, or out of order."""
        dice = self._dice
        commit = m.CommitId(dice.randrange(1000), dice.randrange(1000))
        generation = dice.choice([1, 1, 2, dice.randrange(1, 2**31)])
        keys, value = (f"{dice.randrange(100)}",), (dice.randbytes(10),)
        operation = dice.choice(["set", "get", "add", "check", "delete", "set_default"])
        return encode(
            dice.choice(
                [
                    m.Heartbeat(generation, m.Activity(dice.randrange(10**6)), dice.randrange(10**6), commit),
                    m.WorkerReady(generation, commit, "again"),
                    m.WorkerAborted(generation, commit),
                    m.WorldBroken(generation, "a connection ended"),
                    m.WorldFormed(generation),
                    m.WorkerReturned(generation, commit),
                    m.StoreRequest(1, dice.choice([0, generation]), operation, keys, value),
                    m.Reported(generation, Metrics({"loss": 1.0})),
                    m.ClaimFault(1, dice.randrange(10)),
                    m.Pong(1) if worker == 0 else m.Heartbeat(0, m.Activity(), 0, None),
                ]
            )
        )


def main() -> None:
    host, port, slots, frames, seed, trap = sys.argv[1:]
    credentials = pickle.loads(sys.stdin.buffer.read())
    fuzzer = Fuzzer(host, int(port), int(slots), credentials, pickle.dumps(Bomb(trap)), int(seed))
    asyncio.run(fuzzer.run(int(frames)))
    for kind, count in sorted(fuzzer.sent.items()):
        print(f"{count:>9,} {kind}")


if __name__ == "__main__":
    main()
