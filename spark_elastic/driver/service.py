"""SparkDriverService: one event loop that carries messages between tasks, workers and the ``DriverMachine``.

The machine decides; this file only translates messages into events and commands into messages. Only the loop's thread touches
any state; other threads enter through ``call``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from spark_elastic._exhaustive import assert_never
from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.clock import TICK_SECONDS
from spark_elastic.driver.compatibility import why_refuse, why_warn
from spark_elastic.driver.control_store import ControlStore
from spark_elastic.driver.door import Door
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.links import Standby, TaskLink, WorkerLink, choose_backend
from spark_elastic.driver.narration import Narration
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.runtime import REAL_RUNTIME, DriverRuntime
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.translation import event_of_task, event_of_worker
from spark_elastic.errors import SparkElasticError, TrainingFailedError, name_worker
from spark_elastic.protocol import messages as m
from spark_elastic.protocol import records
from spark_elastic.protocol.connection import Connection, ConnectionLostError, encode
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.fault_points import CLUSTER_ACTIONS, ENDING_ACTIONS, Action, Fault
from spark_elastic.worker.backends import HOST_BACKEND

if TYPE_CHECKING:  # launchers start tasks, which the driver never imports
    from spark_elastic.launchers.base import SlotKeeper

logger = logging.getLogger("spark_elastic")

T = TypeVar("T")

HELLO_SECONDS = 15.0
# How many seconds released tasks may take to end before their connections are cut.
RELEASE_SECONDS = 10.0
RESULT_LIMIT = 2 * 2**30


class SparkDriverService:
    """Runs the driver's side of one job, from ``__enter__`` to ``__exit__``.

    ``outcome`` resolves to the pickled results in rank order, or to the job's error. Nothing here may block the loop.
    """

    def __init__(
        self,
        settings: JobSettings,
        credentials: Credentials,
        *,
        bind_address: str = "",
        event_log: EventLog | None = None,
        printer: OutputPrinter | None = None,
        faults: Sequence[Fault] = (),
        runtime: DriverRuntime = REAL_RUNTIME,
    ) -> None:
        self._runtime = runtime
        self.settings = settings
        self.outcome: concurrent.futures.Future[list[bytes]] = concurrent.futures.Future()
        self.port = 0
        self._credentials = credentials
        self._payload = b""
        self._bind_address = bind_address
        self._log = event_log or EventLog()
        self._has_failed = False
        self._printer = printer or OutputPrinter()
        self._faults = {fault.number: fault for fault in faults}
        self._strikes = {fault.number: fault.times for fault in faults}
        self._keeper: SlotKeeper | None = None
        self._machine = runtime.machine(settings, runtime.clock())
        # The machine's own state. This class only reads it.
        self._job = self._machine.job
        self._store = ControlStore()
        self._tasks: dict[int, TaskLink] = {}
        self._slots: dict[int, int] = {}
        self._standby = Standby()
        self._links: dict[int, WorkerLink] = {}
        # Tokens by which workers prove their identity when they connect; each token is valid once.
        self._tokens: dict[int, str] = {}
        self._results: dict[int, bytes] = {}
        self._ranks: dict[int, int] = {}
        self._next_host = 0
        self._pings = 0
        self._next_ping = runtime.clock()
        self._backend: str | None = settings.backend
        self._has_device_group = False
        self._timer: asyncio.TimerHandle | None = None
        self._deciding: asyncio.Handle | None = None
        self._loop = runtime.new_event_loop()
        self._narration = Narration(settings.elastic, self._printer.log, self._loop.call_later)
        self._door: Door | None = None
        self._closing: concurrent.futures.Future[None] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="spark_elastic-driver", daemon=True)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> SparkDriverService:
        self._thread.start()
        try:
            self.call(self.start())
        except BaseException:
            self._stop_loop()
            raise
        self._printer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_serving()
        self._stop_loop()
        self._printer.__exit__(kind, error, trace)

    def stop_serving(self, release_seconds: float = RELEASE_SECONDS) -> None:
        """Release all tasks and refuse new ones. Blocks until the tasks are gone, at most for ``release_seconds``.

        A second call waits for the first to finish, because impatient users press Ctrl-C twice.
        """
        if self._closing is None:
            self._closing = asyncio.run_coroutine_threadsafe(self.close(release_seconds), self._loop)
        self._closing.result()

    def begin(self, payload: bytes, keeper: SlotKeeper | None) -> None:
        """Name the encoded job that workers are given, and the keeper of its slots. Tasks may come only afterwards."""
        self._payload, self._keeper = payload, keeper

    def call(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop from another thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def cancel(self, error: SparkElasticError) -> None:
        """End the job from any thread, without waiting."""
        self._loop.call_soon_threadsafe(self._cancel, error)

    def drain_slot(self, slot: int, deadline: float | None = None) -> None:
        """Have the worker of a slot leave at the next commit; from any thread, without waiting."""
        self._loop.call_soon_threadsafe(self._drain_slot, slot, deadline)

    def slot_given_up(self, slot: int, reason: str) -> None:
        """Report why Spark no longer starts the task of a slot; from any thread, without waiting."""
        self._loop.call_soon_threadsafe(self._handle, ev.SlotGivenUp(slot, reason))

    def hosts_listed(self, slots: Mapping[str, int | None]) -> None:
        """Report which machines may be used; from any thread, without waiting."""
        self._loop.call_soon_threadsafe(self._handle, ev.HostsListed(slots))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def start(self) -> None:
        """Listen, and begin to check timeouts. To be called on the service's loop, which ``__enter__`` runs on a thread."""
        self._door = self._runtime.open_door(
            self._bind_address, self.settings.driver_port, self._credentials, self._serve_connection
        )
        self.port = self._door.port
        self._schedule_tick()

    async def close(self, release_seconds: float = RELEASE_SECONDS) -> None:
        """Wait for released tasks to go, then cut what is left. Called on the loop; other threads call ``stop_serving``."""
        if self._timer is not None:
            self._timer.cancel()
        self._narration.close()
        assert self._door is not None
        # Connections are refused from now on, which tells late tasks that the job is over.
        self._door.close()
        for link in self._links.values():
            link.connection.send(m.LeaveJob())
        for task in self._tasks.values():
            task.connection.send(m.ReleaseTask())
        self._standby.close()
        pending = set(self._door.visits)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=release_seconds)
        for connection in pending:
            connection.cancel()
        if pending:
            await asyncio.wait(pending, timeout=RELEASE_SECONDS)

    # ------------------------------------------------------------------ connections

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._runtime.connection(reader, writer, m.ToDriver)
        try:
            hello = await asyncio.wait_for(connection.receive(), HELLO_SECONDS)
            if isinstance(hello, m.TaskHello):
                await self._serve_task(hello, connection)
            elif isinstance(hello, m.WorkerHello):
                await self._serve_worker(hello, connection)
            else:
                who, what = connection.peer_address, type(hello).__name__
                self._printer.log(logging.WARNING, f"a connection from {who} was refused: it began with {what}")
        except (ConnectionLostError, asyncio.TimeoutError, ConnectionError) as error:
            logger.debug("connection from %s ended: %s", connection.peer_address, error)
        finally:
            connection.abort()

    async def _serve_task(self, hello: m.TaskHello, connection: Connection) -> None:
        if not self._admit_host(hello.facts, connection):
            await connection.close()
            return
        slot = hello.slot
        if not 0 <= slot < self.settings.max_np:
            raise ConnectionLostError(f"slot {slot} does not exist")
        while slot in self._slots.values():
            if not await self._standby.wait(slot, connection):
                return
        host = self._next_host
        self._next_host += 1
        self._tasks[host] = TaskLink(host, hello.facts, connection)
        self._slots[host] = slot
        connection.send(m.Welcome(host, dict(self.settings.env)))
        for warning in hello.facts.warnings:
            self._printer.log(logging.WARNING, f"host {host} on {hello.facts.name}: {warning}")
        if self._keeper is not None:
            self._keeper.slot_registered(slot)
        self._log.record(records.HostFacts(host, slot, msgspec.json.decode(msgspec.json.encode(hello.facts))))
        self._handle(ev.TaskRegistered(host, slot, hello.facts.name, Place.of(hello.facts), hello.facts.address))
        reason = FirstSign.CONNECTION_BROKE.value
        try:
            async for message in connection.messages():
                if isinstance(message, m.TaskFailed):
                    reason = message.reason
                else:
                    self._task_said(host, message)
        finally:
            self._tasks.pop(host, None)
            self._slots.pop(host, None)
            self._handle(ev.TaskLost(host, reason))
            if self._keeper is not None and self._closing is None:
                self._keeper.slot_lost(slot)
            self._standby.vacate(slot)

    def _admit_host(self, facts: m.HostFacts, connection: Connection) -> bool:
        """Return whether a host can take part. A host that cannot ends the job, because the others are likely to be the same."""
        others = [task.facts for task in self._tasks.values()]
        problem = why_refuse(facts, () if self._job.has_begun(self._next_host) else others)
        if problem:
            self._cancel(TrainingFailedError(problem))
            connection.send(m.ReleaseTask())
            return False
        if warning := why_warn(facts, others):
            self._printer.log(logging.WARNING, warning)
        return True

    async def _serve_worker(self, hello: m.WorkerHello, connection: Connection) -> None:
        number = hello.worker
        token = self._tokens.get(number)
        is_expected = token is not None and hmac.compare_digest(token.encode(), hello.token.encode())
        if not is_expected or number not in self._job.workers:
            connection.send(m.LeaveJob())
            await connection.close()
            return
        del self._tokens[number]
        link = self._links[number] = WorkerLink(number, connection)
        self._handle(ev.WorkerConnected(number))
        try:
            await connection.send_bytes(self._payload)
            async for message in connection.messages():
                self._worker_said(link, message)
        finally:
            del self._links[number]
            self._handle(ev.WorkerGone(number, FirstSign.CONNECTION_BROKE))

    # ------------------------------------------------------------------ messages → events

    def _task_said(self, host: int, message: m.Message) -> None:
        worker = self._job.workers.get(getattr(message, "worker", -1))
        if worker is not None and worker.host != host:
            logger.debug("host %d speaks of worker %d, which is not its own: %s", host, worker.worker, message)
        elif isinstance(message, m.OutputLines):
            self._print(message)
        elif isinstance(message, m.WorkerStarted):
            self._log.record(records.WorkerStarted(message.worker, host, message.pid))
        elif isinstance(message, m.WorkerSampled):
            sample = self._tasks[host].samples.take(message, len(self._tasks), self._runtime.clock())
            if sample is not None:
                self._log.record(sample)
        elif (event := event_of_task(host, message)) is not None:
            self._handle(event)
        else:
            raise ConnectionLostError(f"a task may not send {type(message).__name__}")

    def _worker_said(self, link: WorkerLink, message: m.Message) -> None:
        worker = link.worker
        match message:
            case m.StoreRequest(number, generation):
                if generation == m.WHOLE_JOB or self._job.is_member(worker):
                    self._store.handle(message, link.connection.send)
                else:
                    link.connection.send(m.StoreReply(number, gone=True))
            case m.WorkerRaised(traceback=traceback):
                self._narration.narrator.hear_traceback(worker, traceback)
                self._hear(worker, message)
            case m.ResultFollows():
                link.elastic_result = message.elastic
                link.result.clear()
            case m.Chunk() if link.elastic_result is not None:
                self._take_result(link, message, link.elastic_result)
            case m.Reported(generation, report):
                record = records.WorkerReported(worker, self._ranks.get(worker), generation, report)
                self._narration.tell(record)
                self._log.record(record)
            case m.ClaimFault():
                strikes = self._strike(worker, message.fault)
                link.connection.send(m.StoreReply(message.number, amount=int(strikes)))
            case _:
                self._hear(worker, message)

    def _hear(self, worker: int, message: object) -> None:
        event = event_of_worker(worker, message)
        if event is None:
            raise ConnectionLostError(f"a worker may not send {type(message).__name__}")
        self._handle(event)

    def _take_result(self, link: WorkerLink, chunk: m.Chunk, is_elastic: bool) -> None:
        """Add a piece to a worker's result; the last piece completes it."""
        link.result += chunk.data
        if len(link.result) > RESULT_LIMIT:
            who = f"the result of {name_worker(link.worker, self._ranks.get(link.worker))}"
            limit = RESULT_LIMIT // 2**30
            self._cancel(TrainingFailedError(f"{who} exceeds {limit} GiB; write it to a file and return its path"))
        elif not chunk.last:
            self._handle(ev.ResultFlowed(link.worker))
        else:
            self._results[link.worker] = bytes(link.result)
            link.result.clear()
            link.connection.send(m.LeaveJob())
            self._handle(ev.ResultArrived(link.worker, is_elastic))

    def _strike(self, worker: int, number: int) -> bool:
        """Use up one strike of an injected fault; return whether it had any left. Faults that need the driver happen here."""
        left = self._strikes.get(number, 0)
        self._strikes[number] = left - 1
        if left <= 0 or worker not in self._job.workers:
            return False
        self._log.record(records.FaultInjected(worker, self._ranks.get(worker), number))
        host = self._job.workers[worker].host
        fault = self._faults[number]
        if fault.action in ENDING_ACTIONS:
            self._handle(ev.FaultStruck(worker, str(fault)))
        elif fault.action is Action.DRAIN:
            self._handle(ev.HostDraining(host))
        elif fault.action in CLUSTER_ACTIONS and host in self._slots and self._keeper is not None:
            self._keeper.strike(fault, self._slots[host])
        return True

    def _print(self, message: m.OutputLines) -> None:
        rank = self._ranks.get(message.worker)
        prefix = f"[{rank}]" if rank is not None else f"[worker {message.worker}]"
        self._printer.show(message.stream, prefix, message.lines, message.dropped)

    # ------------------------------------------------------------------ events → commands

    def _handle(self, event: ev.Event) -> None:
        """Note an event now, and decide once the loop has noted all pending events, because many arrive at a time."""
        self._attempt(type(event).__name__, lambda: self._machine.note(event, self._runtime.clock()))
        if self._deciding is None:
            self._deciding = self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = None
        self._attempt("a decision", self._machine.decide)
        self._schedule_tick()

    def _attempt(self, what: str, ask: Callable[[], list[do.Command]]) -> None:
        """Execute the machine's commands. If that fails (a bug in this package), the job ends: no timeout would ever fire."""
        if self._has_failed:
            return
        try:
            for command in ask():
                self._execute(command)
        except Exception as error:
            self._has_failed = True
            logger.exception("the driver failed at %s", what)
            if not self.outcome.done():
                problem = SparkElasticError(
                    f"a fault of spark_elastic itself, at {what}: {type(error).__name__}: {error}"
                )
                problem.__cause__ = error
                self.outcome.set_exception(problem)

    def _schedule_tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._runtime.clock()
        due = self._machine.deadline()
        regular = self._next_ping
        self._timer = self._loop.call_later(max(0.0, min(regular, due or regular) - now), self._tick)

    def _tick(self) -> None:
        if self._runtime.clock() >= self._next_ping:
            self._next_ping = self._runtime.clock() + TICK_SECONDS
            self._pings += 1
            ping = encode(m.Ping(self._pings))
            for task in self._tasks.values():
                task.connection.send_encoded(ping)
        # Messages that arrived while this process stood still are handled in this turn of the loop, before the tick checks who
        # is late.
        self._loop.call_soon(self._handle, ev.Tick())

    def _execute(self, command: do.Command) -> None:  # noqa: C901  # a case for each command
        match command:
            case do.Record(record):
                self._narration.tell(record)
                self._log.record(record)
            case do.StartWorker(host, worker):
                self._tokens[worker] = secrets.token_hex(16)
                self._to_task(host, m.StartWorker(worker, self._tokens[worker]))
            case do.KillWorker(host, worker):
                self._to_task(host, m.KillWorker(worker))
                self._to_workers((worker,), m.LeaveJob())
            case do.RestartTask(host, reason):
                self._to_task(host, m.RestartTask(reason))
                if self._job.hosts.get(host) is None and host in self._tasks:
                    # The task was silent, and may stay so until TCP gives up; a duplicate that waits for the slot takes over now.
                    self._tasks[host].closing = self._loop.create_task(self._tasks[host].connection.close())
            case do.ReleaseTask(host):
                self._to_task(host, m.ReleaseTask())
            case do.YieldSlots():
                if self._keeper is not None:
                    self._keeper.give_back()
            case do.FormWorld(generation, members, previous_size):
                self._store.open_generation(generation)
                self._ranks.update({member.worker: member.rank for member in members})
                tasks = [self._tasks.get(self._job.workers[member.worker].host) for member in members]
                backend = self._backend or choose_backend(tasks)
                self._has_device_group = backend != HOST_BACKEND
                self._to_workers(
                    tuple(member.worker for member in members),
                    m.FormWorld(generation, members, previous_size, backend),
                )
            case do.AbortWorld(generation, workers, reason):
                self._store.close_generation(generation)
                self._to_workers(workers, m.AbortWorld(generation, reason))
            case do.AbortDevice(generation, workers):
                if self._has_device_group:
                    self._to_workers(workers, m.AbortDevice(generation))
            case do.InterruptWorld(generation, workers):
                self._to_workers(workers, m.InterruptWorld(generation))
            case do.FinishWorld(generation, workers):
                self._to_workers(workers, m.FinishWorld(generation))
            case do.LeaveJob(worker):
                self._to_workers((worker,), m.LeaveJob())
            case do.FinishJob(workers):
                if not self.outcome.done():
                    self.outcome.set_result([self._results[worker] for worker in workers])
            case do.FailJob(error):
                for link in self._links.values():
                    link.connection.send(m.LeaveJob())
                if isinstance(error, TrainingFailedError):
                    self._narration.narrator.forget()  # the error itself says which workers were lost, and why
                if not self.outcome.done():
                    self.outcome.set_exception(error)
            case _:
                assert_never(command)

    def _to_task(self, host: int, message: m.Message) -> None:
        if (task := self._tasks.get(host)) is not None:
            task.connection.send(message)

    def _to_workers(self, workers: tuple[int, ...], message: m.Message) -> None:
        frame = encode(message)
        for worker in workers:
            if (link := self._links.get(worker)) is not None:
                link.connection.send_encoded(frame)

    def _drain_slot(self, slot: int, deadline: float | None) -> None:
        for host, taken in self._slots.items():
            if taken == slot:
                self._handle(ev.HostDraining(host, deadline))
                return

    def _cancel(self, error: SparkElasticError) -> None:
        for command in self._machine.cancel(error):
            self._execute(command)
