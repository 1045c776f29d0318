"""WorkerSupervisor: starts workers through the warm parent, and reports their end as early as it can be noticed."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

import psutil

from spark_elastic.protocol.connection import Connection
from spark_elastic.protocol.messages import Stream, WorkerExited, WorkerStarted
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import packets, processes
from spark_elastic.task.importer import RequestedParent
from spark_elastic.task.output import LAST_LINES, OutputForwarder
from spark_elastic.task.warm import StartedParent, WarmParent
from spark_elastic.task.watched_worker import WatchedWorker

# How long the warm parent may take to end. It takes milliseconds, but the kernel may have gigabytes to free.
END_SECONDS = 10.0
# A warm parent that owes an answer but is stopped (SIGSTOP, a debugger) is given up after this time.
HELD_SECONDS = 10.0
# How long to wait for output that is still in the pipes when a worker has exited.
LAST_WORDS_SECONDS = 0.5


class WorkerSupervisor:
    """Owns the warm parent from ``__aenter__`` to ``__aexit__``, after which neither it nor any of its descendants is left.

    It runs on the task's event loop, on the thread that entered it, because the kernel ties the warm parent's life to that
    thread.
    """

    def __init__(
        self,
        ticket: Ticket,
        connection: Connection,
        environment: dict[str, str],
        start: Callable[[Mapping[str, str]], WarmParent] = StartedParent,
    ) -> None:
        self._start_parent = start
        self._ticket = ticket
        self._driver = connection
        self._environment = environment
        self._parent: WarmParent | None = None
        self._spared: list[psutil.Process] = []
        # The worker that runs, until the first sign of its end.
        self._watched: WatchedWorker | None = None
        self._answer_due: asyncio.TimerHandle | None = None
        self._outputs: list[OutputForwarder] = []
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._quiet = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        # Why this host cannot run workers any more, so that its task has to fail.
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> WorkerSupervisor:
        self._parent = self._start_parent(self._environment)
        self._socket = self._parent.connection
        if self._parent.is_child:
            # If the warm parent is killed, for example when memory runs out, this process adopts its descendants.
            processes.adopt_orphans()
        self._spared = psutil.Process().children()
        self._send(packets.Begin(self._ticket))
        asyncio.get_running_loop().add_reader(self._socket, self._parent_said)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._stop_watching()
        self._expect_nothing()
        for output in self._outputs:
            output.close()
        await loop.run_in_executor(None, self._end_parent)
        assert self._parent is not None
        if self._parent.is_child:
            await loop.run_in_executor(None, processes.kill_descendants, self._spared)
            processes.adopt_orphans(False)

    def _end_parent(self) -> None:
        assert self._parent is not None
        self._socket.close()  # this ends the warm parent with all its descendants
        if self._parent_is_held():
            self._parent.kill()
        if not self._parent.wait(END_SECONDS):
            self._parent.kill()
            self._parent.wait()

    def start(self, worker: int, token: str) -> None:
        """Have a worker forked as soon as the previous worker and everything that it started are gone."""
        self.idle.clear()
        outputs = [
            OutputForwarder(worker, stream, self._driver, self._last_lines, self._output_ended)
            for stream in (Stream.OUT, Stream.ERR)
        ]
        for output in outputs:
            output.start()
        self._outputs = [*self._outputs, *outputs]
        self._send(packets.Start(worker, token), [output.write_end for output in outputs])
        for output in outputs:
            os.close(output.write_end)
        self._expect_answer()

    def kill(self, worker: int) -> None:
        """Have the worker and everything that it started killed. Its exit is reported as usual."""
        self._send(packets.Kill(worker))
        self._expect_answer()

    # ------------------------------------------------------------------ what the warm parent says

    def _parent_said(self) -> None:
        answer, descriptors = packets.receive_answer(self._socket)
        self._expect_nothing()
        loop = asyncio.get_running_loop()
        match answer:
            case None:
                loop.remove_reader(self._socket)
                self._break("ended; see this executor's stderr")
            case packets.Forked(pid):
                assert isinstance(self._parent, RequestedParent)
                self._parent.is_forked(pid, descriptors[0])
                if not self.idle.is_set():
                    self._expect_answer()  # to the order that waits there
            case packets.Started(worker, pid):
                self._quiet.clear()
                self._driver.send(WorkerStarted(worker, pid))
                self._watched = WatchedWorker(
                    worker, pid, descriptors[0], self._driver, self._last_lines, self._worker_dies
                )
            case packets.Exited(worker, code):
                self._stop_watching()
                self._reporting = loop.create_task(self._report_exit(worker, code))

    def _worker_dies(self) -> None:
        self._stop_watching()
        self._expect_answer()

    def _expect_answer(self) -> None:
        """Check later whether the warm parent can answer: while stopped, it neither starts a worker nor reports its end."""
        if self._answer_due is None:
            self._answer_due = asyncio.get_running_loop().call_later(HELD_SECONDS, self._answer_is_due)

    def _expect_nothing(self) -> None:
        if self._answer_due is not None:
            self._answer_due.cancel()
            self._answer_due = None

    def _answer_is_due(self) -> None:
        self._answer_due = None
        if self._parent_is_held():
            self._break("is stopped (SIGSTOP or a debugger)")
        else:
            self._expect_answer()  # the kernel may take long to end a large worker

    def _parent_is_held(self) -> bool:
        assert self._parent is not None
        sign = processes.ExitSign(self._parent.pid)
        try:
            return sign.is_stopped()
        finally:
            sign.close()

    def _break(self, what: str) -> None:
        assert self._parent is not None
        if not self.broken.done():
            self.broken.set_result(f"the warm parent process {self._parent.pid} {what}")

    def _stop_watching(self) -> None:
        if self._watched is not None:
            self._watched.close()
            self._watched = None

    async def _report_exit(self, worker: int, code: int) -> None:
        """Report the exit once the last output has been read, because a traceback in it explains the exit code."""
        try:
            await asyncio.wait_for(self._quiet.wait(), LAST_WORDS_SECONDS)
        except asyncio.TimeoutError:
            pass  # a descendant that cannot be killed holds the pipe open
        self._driver.send(WorkerExited(worker, code, tuple(self._last_lines)))
        self._last_lines.clear()
        self.idle.set()

    def _output_ended(self) -> None:
        self._outputs = [output for output in self._outputs if output.is_open]
        if not self._outputs:
            self._quiet.set()

    def _send(self, order: packets.Packet, descriptors: list[int] | None = None) -> None:
        packets.send(self._socket, order, descriptors)
