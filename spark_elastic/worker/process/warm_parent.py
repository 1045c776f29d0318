"""The warm parent: a process that has imported torch, forks training workers on request, and is their guardian.

Its fork is ready to train in milliseconds, where a fresh interpreter takes seconds. The parent runs no thread and does not
touch CUDA, so forking is safe. It adopts whatever a worker leaves behind. It serves one task of one job; when that process ends,
so does the parent, with everything below it. A parent in an interpreter of its own is a child of the task; on an executor most
are forked from its importer (``worker/process/importer.py``). ``task/packets.py`` defines the messages between the processes.
"""

from __future__ import annotations

import multiprocessing.util
import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import packets, processes
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.process.imports import importing, preload
from spark_elastic.worker.process.program_end import forget_handlers

# The process that has made the folder of ``make_temporary_folder``.
_folder_of = 0


def main(descriptor: int, task_pid: int) -> NoReturn:
    """Serve the task until it is gone. Called in a fresh interpreter."""
    # The kernel's signal arrives even if another process holds the connection open.
    signal.signal(signal.SIGTERM, lambda *_: end())
    processes.die_with_parent(signal.SIGTERM, task_pid)
    make_temporary_folder()
    guard(socket.socket(fileno=descriptor), os.pidfd_open(task_pid), try_to_import_everything())


def guard(connection: socket.socket, task: int, failure: Exception | None) -> NoReturn:
    """Serve a task; ``task`` is its open pidfd. Workers raise ``failure``, the error of the imports."""
    signal.signal(signal.SIGTERM, lambda *_: end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    _Guardian(connection, task, failure).serve()


def try_to_import_everything() -> Exception | None:
    """Import what every worker needs, and return the error if that failed.

    The workers raise it, because they are connected to the driver and this process is not.
    """
    try:
        import_everything()
    except Exception as error:
        return error
    return None


def import_everything() -> None:
    """Import what every worker needs, so that a newcomer does not have to. DDP and optimizers pull in torch._dynamo."""
    with importing():
        import torch
        import torch._dynamo
        import torch.distributed
        import torch.nn.parallel.distributed
        import torch.utils.data  # noqa: F401

        import spark_elastic.data.elastic_dataloader
        import spark_elastic.worker.ddp.wrapper
        import spark_elastic.worker.elastic
        import spark_elastic.worker.process.main
        import spark_elastic.worker.state.torch_state  # noqa: F401

        preload()


class _Guardian:
    """Owns at most one worker at a time."""

    def __init__(self, connection: socket.socket, task: int, failure: Exception | None) -> None:
        self._connection = connection
        self._task = task
        self._failure = failure
        self._ticket: Ticket | None = None
        self._worker: int | None = None
        self._pid = 0
        self._pidfd = -1
        # The workers to start when the present one is gone, each with the descriptors for its output.
        self._pending: list[tuple[packets.Start, list[int]]] = []

    def serve(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._task, select.POLLIN)
        while True:
            if self._worker is None and self._pending:
                self._start(*self._pending.pop(0))
                poll.register(self._pidfd, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == self._pidfd:
                    poll.unregister(self._pidfd)
                    self._reap()
                elif descriptor == self._task or not self._obey():
                    end()

    def _obey(self) -> bool:
        """Carry out the task's next order. Return False if there is none because the task is gone."""
        order, descriptors = packets.receive_order(self._connection)
        match order:
            case None:
                return False
            case packets.Begin():
                self._ticket = order.ticket
            case packets.Start():
                self._pending.append((order, descriptors))
            case packets.Kill():
                self._kill(order.worker)
        return True

    def _kill(self, worker: int) -> None:
        if worker == self._worker:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        for entry in [entry for entry in self._pending if entry[0].worker == worker]:
            self._pending.remove(entry)
            for descriptor in entry[1]:
                os.close(descriptor)
            packets.send(self._connection, packets.Exited(worker, -signal.SIGKILL))

    def _start(self, order: packets.Start, output: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.end_with(partial(self._become_worker, order, output, parent))
        for descriptor in output:
            os.close(descriptor)
        self._worker, self._pid, self._pidfd = order.worker, pid, os.pidfd_open(pid)
        packets.send(self._connection, packets.Started(order.worker, pid), [self._pidfd])

    def _become_worker(self, order: packets.Start, output: list[int], parent: int) -> int:
        """In the child, drop what belongs to the guardian and run the worker. Return the worker's exit code."""
        processes.die_with_parent(signal.SIGKILL, parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        forget_handlers()
        os.dup2(output[0], 1)
        os.dup2(output[1], 2)
        for descriptor in output:
            os.close(descriptor)
        self._connection.close()
        os.close(self._task)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        assert self._ticket is not None
        if self._failure is None:
            return _run(self._ticket, order.worker, order.token)
        return _tell(self._ticket, order.worker, order.token, self._failure)

    def _reap(self) -> None:
        assert self._worker is not None
        _, status = os.waitpid(self._pid, 0)
        processes.kill_descendants()
        processes.reap_adopted()
        os.close(self._pidfd)
        packets.send(self._connection, packets.Exited(self._worker, os.waitstatus_to_exitcode(status)))
        self._worker, self._pid, self._pidfd = None, 0, -1


def _run(ticket: Ticket, worker: int, token: str) -> int:
    from spark_elastic.worker.process.main import run_worker

    return run_worker(ticket, worker, token)


def _tell(ticket: Ticket, worker: int, token: str, failure: Exception) -> int:
    """Act as a worker that raises the import error."""
    with ControlClient(ticket, worker, token) as control:
        control.payload()
        control.failed(failure)
    return 1


def make_temporary_folder() -> None:
    """Make the folder for sockets of multiprocessing, which children inherit, and which ``end`` removes in this process.

    Workers and their own children, such as those of a DataLoader, would make folders that stay when they are killed.
    """
    global _folder_of
    with suppress(OSError):  # nothing can be written anywhere
        multiprocessing.util.get_temp_dir()
        _folder_of = os.getpid()


def end() -> NoReturn:
    """End this process and everything below it. The signal handler calls this, too, so it must not need the main loop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.kill_descendants()
    if _folder_of == os.getpid():
        with suppress(OSError):
            shutil.rmtree(multiprocessing.util.get_temp_dir())
    os._exit(0)
