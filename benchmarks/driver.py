"""The driver: how long it takes to form a generation of many workers, and to decide about a loss among more.

    python benchmarks/driver.py [--workers 1000] [--repeats 7]

The real service on the loopback; tasks and workers are connections of one other process, which speak as real ones do: a worker
publishes its address, gets those of all others, and says that it is complete. Nothing is timed before all are connected.
The machine alone decides about one failure among 10,000 workers. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from array import array
from typing import Any

import msgspec
import psutil
from report import Table, emit, summarize

from spark_elastic.driver import events as ev
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import JobCancelledError
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import Connection, connect
from spark_elastic.protocol.credentials import Credentials, create_credentials
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import Record, WorldFormed, WorldForming
from spark_elastic.task.facts import gather_facts

CONNECTING_AT_ONCE = 32
# What Gloo publishes of a rank, and how many bytes of that differ from rank to rank; then come 8 bytes for each of the group.
ADDRESS_BYTES = 154
OWN_BYTES = 28


# ---------------------------------------------------------------- the swarm: many tasks and workers in one process


class CachingDecoder:
    def __init__(self, kind: Any) -> None:
        self.decode = functools.lru_cache(8)(msgspec.msgpack.Decoder(kind).decode)


class Swarm:
    """Plays tasks and workers against a driver on this machine.

    What the driver sends to all workers alike is decoded once here, as it is once on each of the machines that this stands for.
    """

    def __init__(self, port: int, credentials: Credentials) -> None:
        self._address = [("127.0.0.1", port)]
        self._credentials = credentials
        self._connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._facts = gather_facts("127.0.0.1", (), 1, 0)
        self._workers: dict[int, Connection] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._decoders = {kind: CachingDecoder(kind) for kind in (m.ToTask, m.ToWorker)}

    async def serve(self, count: int) -> None:
        """Register ``count`` tasks; then do what stdin says: a line is the number of a worker that dies."""
        for slot in range(count):
            self._start(self._task(slot))
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            self._workers[int(line)].abort()

    def _start(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _connect(self, kind: Any) -> Connection:
        async with self._connecting:
            connection = await connect(self._address, self._credentials, kind)
        connection._decoder = self._decoders[kind]
        return connection

    async def _task(self, slot: int) -> None:
        driver = await self._connect(m.ToTask)
        driver.send(m.TaskHello(slot, self._facts))
        async for message in driver.messages():
            if isinstance(message, m.StartWorker):
                driver.send(m.WorkerStarted(message.worker, 1))
                self._start(self._worker(message.worker, message.token))
            elif isinstance(message, m.Ping):
                driver.send(m.Pong(message.number))

    async def _worker(self, number: int, token: str) -> None:
        driver = self._workers[number] = await self._connect(m.ToWorker)
        driver.send(m.WorkerHello(number, 1, token))
        driver.send(m.WorkerReady(0, None))
        async for message in driver.messages():
            if isinstance(message, m.FormWorld):
                await self._form(driver, number, message)
            elif isinstance(message, m.AbortWorld):
                commit = CommitId(message.generation, 0)
                driver.send(m.WorkerAborted(message.generation, commit))
                driver.send(m.WorkerReady(message.generation, commit, "a rank was lost"))

    async def _form(self, driver: Connection, number: int, order: m.FormWorld) -> None:
        """What ``MeshStore`` asks while Gloo connects."""
        size = len(order.members)
        address = os.urandom(OWN_BYTES) + bytes(ADDRESS_BYTES - OWN_BYTES) + array("Q", range(size)).tobytes()
        driver.send(m.StoreRequest(1, order.generation, "gather", ("gloo/",), (address,), size))
        while not isinstance(await driver.receive(), m.StoreReply):
            pass
        driver.send(m.WorldFormed(order.generation))


def play_swarm(port: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    certificate, key = (base64.b64decode(sys.stdin.readline()) for _ in range(2))
    asyncio.run(Swarm(port, Credentials(certificate, key)).serve(count))


# ---------------------------------------------------------------- the driver


class Watch(EventLog):
    """Keeps the times of records, by kind."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.times: dict[type[Record], list[float]] = {}
        self.workers: list[int] = []
        self._changed = threading.Condition()

    def record(self, record: Record) -> None:
        with self._changed:
            self.times.setdefault(type(record), []).append(time.perf_counter())
            if isinstance(record, WorldForming):
                self.workers = record.workers
            self._changed.notify_all()

    def wait(self, kind: type[Record], times: int) -> float:
        """Return when this happened for the ``times``-th time."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.times.get(kind, ())) >= times, 300):
                raise TimeoutError(f"{kind.__name__} happened {len(self.times.get(kind, ()))} times, not {times}")
            return self.times[kind][times - 1]


def form(count: int) -> tuple[float, float, float]:
    """Form a generation of ``count`` workers, then lose one. Return the seconds of each forming, from the last worker ready
    (or the loss) to the last acknowledgement, and the growth of the driver's memory in MB."""
    watch = Watch()
    settings = JobSettings(min_np=1, num_proc=count, max_np=count, join_window=0.05)
    credentials = create_credentials("benchmark")
    before = psutil.Process().memory_info().rss
    with SparkDriverService(settings, credentials, bind_address="127.0.0.1", event_log=watch) as service:
        command = [sys.executable, __file__, "--swarm", str(service.port), "--workers", str(count)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1) as swarm:
            assert swarm.stdin is not None
            for secret in (credentials.certificate, credentials.private_key):
                swarm.stdin.write(base64.b64encode(secret).decode() + "\n")
            first = watch.wait(WorldFormed, 1) - watch.wait(WorldForming, 1)
            start = time.perf_counter()
            swarm.stdin.write(f"{watch.workers[-1]}\n")
            after_loss = watch.wait(WorldFormed, 2) - start
            memory = (psutil.Process().memory_info().rss - before) / 2**20
            service.cancel(JobCancelledError("the benchmark is over"))
            swarm.kill()
    return first, after_loss, memory


def decide(workers: int) -> tuple[float, float]:
    """Return the seconds that the machine takes for one failure among ``workers``: to note the loss and order the abort, and
    to note that all others are ready and order the next world."""
    machine = DriverMachine(JobSettings(min_np=1, num_proc=workers, max_np=workers), 0.0)
    for number in range(workers):
        machine.note(ev.TaskRegistered(number, number, f"host{number // 8}", Place(f"host{number // 8}", number)), 0.0)
    machine.decide()
    started = list(machine.job.workers)
    for worker in started:
        machine.note(ev.WorkerConnected(worker), 0.0)
        machine.note(ev.WorkerReady(worker, 0, None), 0.0)
    machine.decide()
    for worker in started:
        machine.note(ev.GroupFormed(worker, 1), 0.0)
    machine.decide()
    gc.collect()  # what the machine of the turn before has left is not this one's
    start = time.perf_counter()
    machine.handle(ev.WorkerGone(started[0], FirstSign.PROCESS_DIED), 1.0)
    aborted = time.perf_counter()
    for worker in started[1:]:
        machine.note(ev.WorkerReady(worker, 1, CommitId(1, 0), "a rank was lost"), 1.0)
    machine.decide()
    assert machine.job.generation == 2
    return aborted - start, time.perf_counter() - aborted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--swarm", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.swarm:
        play_swarm(options.swarm, options.workers)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    abort, reform = (summarize(seconds) for seconds in zip(*(decide(10_000) for _ in range(7)), strict=True))
    sizes = [size for size in (10, 100) if size < options.workers] + [options.workers]
    table = Table("workers", "first forming", "after a loss", "driver memory", unit="seconds, MB")
    results = {}
    for size in sizes:
        firsts, after_loss, memory = zip(*(form(size) for _ in range(options.repeats)), strict=True)
        first, next_one = summarize(firsts), summarize(after_loss)
        table.add(size, first, next_one, max(memory))
        results[size] = {"first": first.asdict(), "after_loss": next_one.asdict(), "memory_mb": max(memory)}
    table.print()
    print(f"\nDriverMachine, one failure among 10,000 workers: abort ordered after {abort} s,")
    print(f"next world ordered {reform} s after that, with 9,999 answers noted between")
    emit("driver", forming=results, machine_10000={"abort": abort.asdict(), "next_world": reform.asdict()})


if __name__ == "__main__":
    main()
