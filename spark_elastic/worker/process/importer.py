"""The importer: a process of an executor that has imported torch, and forks the warm parents of all slots there.

So an executor imports torch once, and holds its memory once. The process runs no thread and does not touch CUDA, so forking is
safe. It sees nothing of a job: a warm parent reads the ticket of its job itself, after it was forked. So the importer can serve
one job after the other. It ends with the executor, or when it has not been needed for a long time; ``task/importer.py`` starts
and finds it.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from functools import partial

import psutil

from spark_elastic.task import packets, processes
from spark_elastic.task.importer import is_peer_mine, peer_pid
from spark_elastic.worker.process import warm_parent
from spark_elastic.worker.process.imports import import_noted


def main(listening: int, *above: int) -> None:
    """Serve until an ancestor process is gone; ``above`` are open descriptors of them. Called in a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    warm_parent.make_temporary_folder()
    failure = warm_parent.try_to_import_everything()
    importer = _Importer(socket.socket(fileno=listening), above, failure)
    if failure is not None:
        importer.retire()  # a process that is started later may manage the import
    importer.serve()
    warm_parent.end()


class _Importer:
    def __init__(self, listening: socket.socket, above: tuple[int, ...], failure: Exception | None) -> None:
        self._listening = listening
        self._listening.setblocking(False)
        self._above = above
        self._failure = failure
        self._is_retired = False
        # The pids of warm parents by their open descriptors.
        self._parents: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        for descriptor in above:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until an ancestor process is gone, or nobody needs this process any more."""
        while True:
            if self._is_retired and not self._is_needed:
                return
            if not self._is_needed:
                import_noted()
            ready = self._selector.select(None if self._is_needed else processes.IDLE_SECONDS)
            if not ready:
                self.retire()
            for key, _ in ready:
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._take_request(key.fileobj)
                elif key.fileobj in self._above:
                    return
                else:
                    self._reap(key.fd)

    def retire(self) -> None:
        """Give up the name, so that another importer can take it, and serve only the tasks that are already connected."""
        if not self._is_retired:
            self._is_retired = True
            self._listening.shutdown(socket.SHUT_RD)  # nobody can connect any more
            while self._accept():
                pass
            self._selector.unregister(self._listening)
            self._listening.close()

    @property
    def _is_needed(self) -> bool:
        """Whether a task is being served, or has connected without having sent its request yet."""
        return len(self._selector.get_map()) > len(self._above) + (not self._is_retired)

    def _accept(self) -> bool:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINVAL):
                raise
            return False  # the task has given up, or after ``retire`` there is none
        if is_peer_mine(connection):
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()
        return True

    def _take_request(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with connection:
            match packets.receive_request(connection):
                case packets.Fork(variables):
                    self._fork(connection, variables)
                case packets.End() if not self._parents:
                    _send_with_pidfd(connection, packets.Ending())
                    self.retire()

    def _fork(self, connection: socket.socket, variables: dict[str, str]) -> None:
        try:
            task = os.pidfd_open(peer_pid(connection))
        except ProcessLookupError:
            return
        pid = os.fork()
        if pid == 0:
            processes.end_with(partial(self._become_warm_parent, connection, task, variables))
        os.close(task)
        pidfd = os.pidfd_open(pid)
        self._parents[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _become_warm_parent(self, connection: socket.socket, task: int, variables: dict[str, str]) -> int:
        os.setsid()
        os.environ.update(variables)
        processes.close_descriptors({0, 1, 2, connection.fileno(), task})
        _send_with_pidfd(connection, packets.Forked(os.getpid()))
        warm_parent.guard(connection, task, self._failure)

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.waitpid(self._parents.pop(pidfd), 0)
        os.close(pidfd)
        # A warm parent that was killed has left its descendants to this process.
        processes.kill_descendants([psutil.Process(pid) for pid in self._parents.values()])


def _send_with_pidfd(connection: socket.socket, answer: packets.Answer) -> None:
    pidfd = os.pidfd_open(os.getpid())
    packets.send(connection, answer, [pidfd])
    os.close(pidfd)
