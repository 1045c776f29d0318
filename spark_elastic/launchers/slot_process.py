"""The driver's side of the processes on this machine: the process from which slots are forked, and those of the slots."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec

from spark_elastic.launchers import slot_parent
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task.facts import worker_environment
from spark_elastic.task.process_setting import ProcessSetting
from spark_elastic.task.processes import OWN_PATH_ONLY, ExitSign
from spark_elastic.task.service import TaskPlace

READ_BYTES = 64 * 1024
# How much of a process's last output is given as the reason for its end.
TAIL_BYTES = 8 * 1024
TAIL_LINES = 20
# Changes with each test that pytest runs, and does not concern these processes.
_IGNORED = "PYTEST_CURRENT_TEST"


class SlotParent:
    """A process from which slots are forked: a fresh interpreter, because the driver has threads, with workers' environment."""

    def __init__(self, cpus: int) -> None:
        self._setting = _setting(cpus)
        self._lock = threading.Lock()
        self._story = ""
        self._is_ready = False
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = os.memfd_create("spark_elastic-slot_parent")
        try:
            with theirs:
                code = (
                    f"{OWN_PATH_ONLY}from {slot_parent.__name__} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
                )
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env=self._setting.environment,
                    start_new_session=True,
                )
        except OSError:
            self._orders.close()
            os.close(self._output)
            raise
        self._sign = ExitSign(self._process.pid)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fits(self, cpus: int) -> bool:
        """Whether the process is alive, not stopped, and no different from one that would be started now."""
        try:
            return not self.has_ended and not self._sign.is_stopped() and self._setting == _setting(cpus)
        except OSError:
            return False  # the working directory was deleted

    def fork(self, ticket: Ticket, place: TaskPlace) -> SlotProcess:
        """Have a slot forked as soon as this process is ready. Raises ``OSError``."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            order = msgspec.json.encode(slot_parent.Order(ticket, place))
            try:
                socket.send_fds(self._orders, [order], [writing, theirs.fileno()])
            except BrokenPipeError:
                pass  # the process has just ended, and the slot's connection with it, as the caller sees
        except OSError:
            mine.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        return SlotProcess(self, mine, reading)

    @property
    def may_have_forked(self) -> bool:
        """False while the process still does its imports. True if that is not known any more, because it was retired."""
        if self._orders.fileno() < 0:
            return True
        if not self._is_ready:
            with suppress(OSError):  # nothing has come, or the process has ended
                self._is_ready = self._orders.recv(READ_BYTES, socket.MSG_DONTWAIT) == slot_parent.READY
        return self._is_ready

    def retire(self) -> None:
        """Have the process fork no more, and end when no slot is left."""
        self._orders.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Send the process SIGKILL, which also ends everything that it has forked."""
        self._process.kill()

    def end(self) -> None:
        """End the process with everything that it has forked, and wait for its end."""
        self.kill()
        self.story()
        self._orders.close()

    def story(self) -> str:
        """Wait until the process has ended, and say how."""
        with self._lock:
            if not self._story:
                code, output = self._process.wait(), os.pread(self._output, os.fstat(self._output).st_size, 0)
                self._story = _story("the process that slots are forked from", code, output)
                os.close(self._output)
                self._sign.close()
        return self._story


class SlotProcess:
    """The process of a slot, which may not have been forked yet."""

    def __init__(self, parent: SlotParent, connection: socket.socket, output: int) -> None:
        self._parent = parent
        # Becomes readable when the process has ended.
        self.connection = connection
        self.output = output
        os.set_blocking(output, False)
        self._tail = b""

    def read(self) -> bool:
        """Read what the process has written. Return whether there may be more."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return bool(data)

    def kill(self) -> None:
        """Have the process killed. Its warm parent notices, and ends with everything below it. Harmless when done twice."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the process has ended

    @property
    def may_exist(self) -> bool:
        """Whether the process may have been forked already."""
        return self._parent.may_have_forked

    def withdraw(self) -> None:
        """Take back the order for a process that does not exist yet."""
        self.connection.close()
        os.close(self.output)

    def kill_parent(self) -> None:
        """Kill the process from which this one was forked, and with it all slots that were forked there."""
        self._parent.kill()

    def close(self) -> str:
        """Close the driver's descriptors of an ended process, and return how it ended."""
        with self.connection:
            try:
                code = self.connection.recv(READ_BYTES)
            except ConnectionResetError:
                code = b""
        self.read()
        os.close(self.output)
        return _story("its process", int(code), self._tail) if code else self._parent.story()


def _setting(cpus: int) -> ProcessSetting:
    """Return what a process started now would inherit from this one."""
    environment = {name: value for name, value in os.environ.items() if name != _IGNORED}
    return ProcessSetting.of_a_child(worker_environment(environment, {}, (), cpus, sys.path))


def _story(who: str, code: int, output: bytes) -> str:
    lines = output[-TAIL_BYTES:].decode("utf-8", "replace").strip().splitlines()[-TAIL_LINES:]
    return "\n".join([f"{who} ended with {'signal' if code < 0 else 'exit code'} {abs(code)}", *lines])
