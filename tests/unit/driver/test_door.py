"""Door: strangers who only knock cost little, and keep nobody out who has the job's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from spark_elastic.driver.door import Door, DoorLimits, WaitingLine, listen
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.credentials import create_credentials

SECONDS = 30.0
CREDENTIALS = create_credentials("test")


def test_addresses_take_turns_and_of_one_address_the_last_goes_first() -> None:
    line: WaitingLine[str] = WaitingLine(10)
    for address, who in [("x", "x1"), ("x", "x2"), ("x", "x3"), ("y", "y1"), ("z", "z1"), ("z", "z2")]:
        assert line.join(address, who) is None
    assert [line.call() for _ in range(len(line))] == ["x3", "y1", "z2", "x2", "z1", "x1"]
    assert len(line) == 0


def test_who_has_to_go_where_the_line_is_full_is_of_those_who_are_most_and_waits_longest() -> None:
    line: WaitingLine[str] = WaitingLine(3)
    for address, who in [("y", "y1"), ("x", "x1"), ("x", "x2")]:
        assert line.join(address, who) is None
    assert line.join("x", "x3") == "x1"
    assert line.join("z", "z1") == "x2"
    assert len(line) == 3


@contextlib.contextmanager
def strangers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


class FewDescriptors(socket.socket):
    """Listens in a process that has no descriptor left while ten connections wait."""

    door: Door

    def accept(self) -> Any:
        if self.door.waiting == 10:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class BadConnection(socket.socket):
    """Listens, and finds an error of the network in the fourth connection, which ``accept`` raises."""

    accepted = 0

    def accept(self) -> Any:
        connection = super().accept()
        self.accepted += 1
        if self.accepted == 4:
            connection[0].close()
            raise OSError(errno.EPROTO, "Protocol error")
        return connection


def play(scene: Any, limits: DoorLimits, listens: type[socket.socket] = socket.socket) -> Any:
    """Run ``scene(port, door)``; the door says b"hello" to whoever has come in."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        await reader.read()
        writer.transport.abort()

    async def run() -> Any:
        listener = listens(fileno=socket.create_server(("127.0.0.1", 0), backlog=128).detach())
        door = Door(listener, CREDENTIALS.server_context(), greet, limits)
        if isinstance(listener, FewDescriptors):
            listener.door = door
        door.open()
        try:
            return await asyncio.wait_for(scene(door.port, door), SECONDS)
        finally:
            door.close()
            await asyncio.sleep(0)

    return asyncio.run(run())


async def come_in(port: int, context: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context or CREDENTIALS.client_context())
    try:
        return await reader.readexactly(5)
    finally:
        writer.transport.abort()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_flood_of_silent_strangers_gets_few_handshakes_and_a_member_comes_in_all_the_same() -> None:
    async def scene(port: int, door: Door) -> Any:
        with strangers(port, 60):
            await until(lambda: door.waiting == 20)
            assert door.handshakes == 5
            greetings = await asyncio.gather(*(come_in(port) for _ in range(3)))
            assert door.handshakes <= 5
            assert door.waiting <= 20
            return greetings

    assert play(scene, DoorLimits(handshakes=5, waiting=20)) == [b"hello"] * 3


def test_where_no_descriptor_is_left_those_who_wait_give_way_and_a_member_comes_in() -> None:
    async def scene(port: int, door: Door) -> bytes:
        def is_turned_away(stranger: socket.socket) -> bool:
            with contextlib.suppress(BlockingIOError):
                return not stranger.recv(1, socket.MSG_DONTWAIT)
            return False

        with strangers(port, 30) as made:
            await until(lambda: sum(map(is_turned_away, made)) == 15)
            door._limits = DoorLimits(handshakes=6)
            return await come_in(port)

    assert play(scene, DoorLimits(handshakes=5, hurried_seconds=SECONDS), FewDescriptors) == b"hello"


def test_an_error_of_one_connection_ends_none_of_those_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(port: int, door: Door) -> int:
        with strangers(port, 4):
            await until(lambda: len(caplog.records) == 1)
            return door.waiting

    assert play(scene, DoorLimits(handshakes=1, hurried_seconds=SECONDS), BadConnection) == 2


@pytest.mark.parametrize(
    ("limit", "waiting"), [(1024, 750), (1_048_576, 1024), (resource.RLIM_INFINITY, 1024), (24, 1)]
)
def test_a_quarter_of_the_descriptors_of_the_process_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, limit: int, waiting: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    monkeypatch.setattr(psutil.Process, "num_fds", lambda process: 24)
    assert DoorLimits().waiting == waiting


def test_who_is_slow_is_not_hurried_while_nobody_waits() -> None:
    async def scene(port: int, door: Door) -> Any:
        with strangers(port, 1) as (slow,):
            await until(lambda: door.handshakes == 1)
            assert await come_in(port) == b"hello"
            await asyncio.sleep(0)
            return [slow.fileno() >= 0, door.handshakes]

    assert play(scene, DoorLimits(handshakes=2, waiting=20, hurried_seconds=0.0)) == [True, 1]


def test_who_has_no_certificate_does_not_come_in() -> None:
    async def scene(port: int, door: Door) -> Any:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await come_in(port, context)
        await until(lambda: not door.handshakes)
        return await come_in(port)

    assert play(scene, DoorLimits()) == b"hello"


def test_a_door_that_closes_turns_away_all_who_are_not_in() -> None:
    async def scene(port: int, door: Door) -> Any:
        with strangers(port, 10) as made:
            await until(lambda: door.waiting == 8)
            door.close()
            await until(lambda: not door.handshakes)
            for connection in made:
                connection.settimeout(SECONDS)
            return [await asyncio.to_thread(connection.recv, 1) for connection in made]

    assert play(scene, DoorLimits(handshakes=2)) == [b""] * 10


def test_who_is_in_stays_in_where_the_door_closes_in_the_same_turn_of_the_loop() -> None:
    async def scene() -> bytes:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            door.close()  # the first to run after the handshake, before the task that has waited for its end
            for _ in range(5):
                await asyncio.sleep(0)
            writer.write(b"close" if writer.transport.is_closing() else b"hello")
            await writer.drain()
            await reader.read()
            writer.transport.abort()

        door = Door(socket.create_server(("127.0.0.1", 0)), CREDENTIALS.server_context(), greet)
        door.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=CREDENTIALS.client_context())
        greeting = await asyncio.wait_for(reader.readexactly(5), SECONDS)
        writer.transport.abort()
        await until(lambda: not door.visits)
        assert not door.handshakes
        return greeting

    assert asyncio.run(scene()) == b"hello"


def test_nobody_comes_in_once_the_door_has_closed_however_far_the_handshake_is() -> None:
    async def close_after(turns: int) -> bool:
        """Close after some turns of the loop, with the guest on the same loop. Return whether the guest was in by then."""
        came: list[str] = []
        closed = asyncio.Event()

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append("the guest")
            await closed.wait()
            writer.transport.abort()

        door = Door(socket.create_server(("127.0.0.1", 0)), CREDENTIALS.server_context(), greet)
        door.open()
        guest = asyncio.create_task(come_in(door.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        door.close()
        inside = len(door.visits)
        closed.set()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(guest, SECONDS)
        await until(lambda: not door.handshakes)
        await until(lambda: not door.visits)
        assert len(came) == inside
        return bool(inside)

    turns = 0
    while not asyncio.run(close_after(turns)):
        turns += 1
    assert turns > 0


def test_a_port_that_is_in_use_is_no_matter_of_sparks_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SparkElasticError, match=rf"listen on 127.0.0.1, port {port}: .*; choose another driver_port$"
        ):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_names_the_setting_that_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "port any: .*; set spark.driver.bindAddress to an address of this machine"
    with pytest.raises(SparkElasticError, match=f"192.0.2.1, {told}"):
        listen("192.0.2.1", 0)

    def resolve(*arguments: Any, **others: Any) -> None:
        raise OSError(socket.EAI_NONAME, "Name or service not known")  # as socket.create_server passes on a gaierror

    monkeypatch.setattr(socket, "create_server", resolve)
    with pytest.raises(SparkElasticError, match=f"node7, {told}"):
        listen("node7", 0)
