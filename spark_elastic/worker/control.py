"""ControlClient: a worker's connection to the driver, on a thread of its own.

The thread stays responsive while user code computes: it sends heartbeats, aborts collectives at once when the driver says so,
and ends the process when the driver is gone. User code waits here for the driver's decisions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from spark_elastic._text import as_utf8, shortened
from spark_elastic.data.balance import Timing
from spark_elastic.errors import ScriptFailedError, WorkerLostError, public_name
from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import Connection, ConnectionLostError, encode
from spark_elastic.protocol.reports import Report
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.worker.system import REAL_SYSTEM, System
from spark_elastic.worker.tracebacks import find_line, format_for_user

logger = logging.getLogger("spark_elastic")

HEARTBEAT_SECONDS = 1.0
# The time limit for a worker's exit handlers.
GOODBYE_SECONDS = 5.0
# How many characters of an error, and of its traceback, are sent. A message above the limit of a frame would not be sent at all.
MOST_OF_AN_ERROR = 20_000
MOST_OF_A_REPORT = 500_000


class GenerationOverError(WorkerLostError):
    """The driver has given the generation up, so its name space in the control store is closed."""


class ControlledWorld(Protocol):
    """The world that is being formed or used, as the control thread sees it. No method may block.

    The default methods are those of a worker between two worlds, which has nothing to abort and waits for nobody.
    """

    def abort(self, generation: int) -> None:
        """Abort pending operations in the host's group, if the world belongs to this generation or an earlier one."""
        return

    def abort_device(self, generation: int) -> None:
        """Abort pending operations in the device's group, if the world belongs to this generation or an earlier one."""
        return

    def activity(self) -> m.Activity:
        """What this rank has entered and waits for."""
        return m.Activity()

    def is_stuck(self) -> bool:
        """Whether the user's thread may be waiting for something that only an abort can end."""
        return False

    def can_restore(self) -> bool:
        """Whether this worker can go back to the commit that it holds."""
        return True


class NoWorld(ControlledWorld):
    """Stands for the world of a worker between two worlds."""


class ControlClient:
    """Talks to the driver. Public methods are for user threads. Those that may block say what they wait for."""

    def __init__(self, ticket: Ticket, worker: int, token: str, system: System = REAL_SYSTEM) -> None:
        self._system = system
        self._ticket = ticket
        self._token = token
        self._worker = worker
        self._changed = system.threads.Condition()
        self._form: m.FormWorld | None = None
        self._finished = 0
        self._aborted = 0
        self._abort_reason = ""
        self._interrupted = 0
        self._said_goodbye = False
        self._ending = False
        self._numbers = itertools.count(1)
        self._replies: dict[int, concurrent.futures.Future[m.StoreReply]] = {}
        self._payload: concurrent.futures.Future[bytes] = system.future()
        self._connection: Connection | None = None
        self._loop = system.new_event_loop()
        self._thread = system.threads.Thread(target=self._run, name="spark_elastic-control", daemon=True)
        self.generation = 0
        self.commit: m.CommitId | None = None
        # The slices that this worker holds of its commits; None where it holds ``commit`` whole.
        self.slices: tuple[m.Slices, ...] | None = None
        self.beats = 0
        self._world: ControlledWorld = NoWorld()

    def __enter__(self) -> ControlClient:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the driver, even a paused one, has taken the result or the error. Without a driver this process ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._said_goodbye or not self._ending)

    # ------------------------------------------------------------------ the job

    def payload(self) -> bytes:
        """Wait for the user's function, pickled."""
        return self._payload.result()

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self._ticket.run_id

    @property
    def address(self) -> str:
        """The local address of the connection to the driver, which other machines of the cluster can reach."""
        assert self._connection is not None
        return self._connection.local_address

    def failed(self, error: BaseException, fatal: bool = False) -> None:
        """Tell the driver of an exception; nothing more comes from this worker."""
        text = _in_words(error)
        kind = public_name(error)
        if getattr(error, "is_final", False):
            fatal = True
            text = str(error) if kind else text
        # The frames of this package above a script tell nothing of it.
        report = error.script_traceback if isinstance(error, ScriptFailedError) else format_for_user(error)
        self.raised(text, find_line(error), report, fatal, kind)

    def raised(self, error: str, where: str, report: str, fatal: bool = False, kind: str = "") -> None:
        """Tell the driver that something was raised, ``where`` as file:line; nothing more comes from this worker."""
        self._ending = True
        error, report = shortened(error, MOST_OF_AN_ERROR), shortened(report, MOST_OF_A_REPORT)
        self._send(m.WorkerRaised(as_utf8(error), where, as_utf8(report), fatal, kind))

    def send_result(self, data: bytes, elastic: bool) -> None:
        """Send the result; blocks until the driver has taken it."""
        self._ending = True
        assert self._connection is not None
        self._send(m.ResultFollows(elastic))
        self._system.call_in_loop(self._connection.send_bytes(data), self._loop).result()

    def report(self, report: Report) -> None:
        """Put a fact into the job's event log; never blocks."""
        self._send(m.Reported(self.generation, report))

    def steps_timed(self, timing: Timing) -> None:
        """Tell the driver how long each rank needs for its share of a step; never blocks."""
        self._send(
            m.StepsTimed(self.generation, timing.before, timing.microseconds, timing.period, timing.rows, timing.fixed)
        )

    def claim_fault(self, fault: int) -> bool:
        """Ask the driver whether this injected fault has strikes left, and is to strike here."""
        number = next(self._numbers)
        return bool(self._ask(number, m.ClaimFault(number, fault)).result().amount)

    def beat(self) -> None:
        """Note that this worker makes progress although it enters no collective."""
        self.beats += 1

    # ------------------------------------------------------------------ worlds

    def ready(self, reason: str) -> m.FormWorld:
        """Tell the driver that this worker has reached the elastic function, and wait for a world that includes it."""
        with self._changed:
            last = self.generation
            self._send(m.WorkerReady(last, self.commit, reason, self.slices))
            self._changed.wait_for(lambda: self._form is not None and self._form.generation > last)
            assert self._form is not None
            # The world is reset before the generation changes: a heartbeat of the new generation must not report activity of
            # the old world.
            self._world = NoWorld()
            for member in self._form.members:
                if member.worker == self._worker:
                    self.commit = member.commit  # possibly an older commit, whose other slices other workers hold
            self.generation = self._form.generation
            return self._form

    def enter(self, world: ControlledWorld) -> None:
        """Pass the driver's messages about generations on to this world, from before it is formed until ``leave``."""
        self._world = world

    def leave(self) -> None:
        """Stop passing messages on to the world that was entered."""
        self._world = NoWorld()

    def formed(self) -> None:
        """Tell the driver that this rank is connected to all others of the present generation."""
        self._send(m.WorldFormed(self.generation))

    def vote(self) -> None:
        """Tell the driver that this worker has left the elastic function, and wait until all have. Raises ``WorkerLostError``."""
        with self._changed:
            self._send(m.WorkerReturned(self.generation, self.commit))
            self._changed.wait_for(lambda: self._finished == self.generation or self.is_aborted(self.generation))
            if self._finished != self.generation:
                raise WorkerLostError(self._abort_reason)

    def is_aborted(self, generation: int) -> bool:
        """Whether the driver has given the generation up."""
        return self._aborted >= generation

    @property
    def abort_reason(self) -> str:
        """Why the last generation was given up."""
        return self._abort_reason

    @property
    def is_interrupted(self) -> bool:
        """Whether the driver wants the present generation to end at a commit."""
        return self._interrupted == self.generation

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition`` holds. It is checked whenever the driver has said something, or ``notify`` was called."""
        with self._changed:
            return bool(self._changed.wait_for(condition, seconds))

    def notify(self) -> None:
        """Wake the threads that are in ``wait``."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ the control store

    def store(
        self,
        operation: m.StoreOperation,
        keys: tuple[str, ...],
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        generation: int | None = None,
    ) -> m.StoreReply:
        """Run an operation on the control store. A ``get`` blocks until its keys exist.

        There is no timeout: the driver watches over the forming of a world, and may itself be paused. Raises
        ``GenerationOverError`` when the generation ends first.
        """
        number = next(self._numbers)
        space = self.generation if generation is None else generation
        request = m.StoreRequest(number, space, operation, keys, values, amount)
        reply = self._ask(number, request).result()
        if reply.error:
            raise ValueError(reply.error)
        if reply.gone:
            raise GenerationOverError(f"generation {space} is over")
        return reply

    def _ask(self, number: int, request: m.Message) -> concurrent.futures.Future[m.StoreReply]:
        waiting: concurrent.futures.Future[m.StoreReply] = self._system.future()
        self._replies[number] = waiting
        self._send(request)
        return waiting

    # ------------------------------------------------------------------ the thread

    def _send(self, message: m.Message) -> None:
        assert self._connection is not None
        # The message is encoded here, so that a value that cannot be encoded raises in the caller.
        self._loop.call_soon_threadsafe(self._connection.send_encoded, encode(message))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._converse())
        finally:
            # Without the driver there is no job, however the connection ended. The warm parent ends whatever this process
            # started.
            self._system.exit(0 if self._said_goodbye else 1)

    async def _converse(self) -> None:
        self._connection = connection = await self._system.connect(
            list(self._ticket.addresses), self._ticket.credentials, m.ToWorker
        )
        connection.send(m.WorkerHello(self._worker, self._system.pid(), self._token))
        beating = asyncio.ensure_future(self._beat(connection))
        payload = bytearray()
        while not self._said_goodbye:
            try:
                message = await connection.receive()
            except ConnectionLostError as error:
                logger.warning("this worker ends: %s", error)
                return
            if isinstance(message, m.Chunk):
                payload += message.data
                if message.last:
                    self._payload.set_result(bytes(payload))
            elif isinstance(message, m.StoreReply):
                waiting = self._replies.pop(message.number, None)
                if waiting is not None:
                    waiting.set_result(message)
            else:
                self._obey(message, connection)
        beating.cancel()
        if not self._ending:
            return
        # The main thread runs its exit handlers now, and then ends the process.
        await asyncio.sleep(GOODBYE_SECONDS)

    def _obey(self, message: m.Message, connection: Connection) -> None:
        with self._changed:
            match message:
                case m.FormWorld():
                    self._form = message
                case m.AbortWorld(generation, reason):
                    self._aborted = max(self._aborted, generation)
                    self._abort_reason = reason
                case m.InterruptWorld(generation):
                    self._interrupted = generation
                case m.FinishWorld(generation):
                    self._finished = generation
                case m.LeaveJob():
                    self._said_goodbye = True
            self._changed.notify_all()
        if isinstance(message, m.AbortWorld):
            self._world.abort(message.generation)
            held = self.commit if self._world.can_restore() else None
            connection.send(m.WorkerAborted(message.generation, held))
        elif isinstance(message, m.AbortDevice):
            self._world.abort_device(message.generation)

    async def _beat(self, connection: Connection) -> None:
        while True:
            if self._world.is_stuck():
                connection.send(m.WorldBroken(self.generation, "a connection to another rank ended"))
            connection.send(m.Heartbeat(self.generation, self._world.activity(), self.beats, self.commit))
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _in_words(error: BaseException) -> str:
    """Return an exception's type, message and notes."""
    lines = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):  # Python shows the place in the source before them
        lines = list(itertools.dropwhile(lambda line: line.startswith(" "), lines))
    return "".join(lines).strip()
