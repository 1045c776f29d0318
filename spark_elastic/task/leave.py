"""How ``spark-elastic leave`` meets the tasks of its machine, or container: their workers leave, and the tasks then wait.

The command listens as long as it runs. Tasks look for it now and then, because nothing tells a task that its container is about
to end: Kubernetes sends SIGTERM only to the executor's JVM, which ends at once. A task that finds the command keeps the
connection, and sends a byte when its worker has left. Then the task holds its slot until ``HOLD_SECONDS`` after the command's
end, because Spark would start the slot's task again in the same place.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# A new socket causes no event elsewhere, so tasks look for it at this interval.
LOOK_SECONDS = 0.5
# The command waits this long for tasks to find it: several looks, because a busy machine may delay one.
FIND_SECONDS = 2.0
# Whatever ends the container does so right after the command. If nothing does, the slot is Spark's again.
HOLD_SECONDS = 10.0

_LEFT = b"."
# The kernel's description of the process at the other end of a socket: pid, uid and gid.
_CREDENTIALS = struct.Struct("3i")


async def asked_to_leave(pause: float = LOOK_SECONDS) -> socket.socket:
    """Wait until the command runs on this machine, for this user. Return a connection to it."""
    while (found := _call()) is None:
        await asyncio.sleep(pause)
    return found


async def hold(command: socket.socket, seconds: float = HOLD_SECONDS) -> None:
    """Tell the command that the worker has left. Return ``seconds`` after the command has ended."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(command, _LEFT)
        await loop.sock_recv(command, 1)  # only the end comes
    except OSError:
        pass  # it has ended already
    await asyncio.sleep(seconds)


class LeaveCommand:
    """The command's side. It asks tasks from ``__enter__`` to ``__exit__``. Raises ``OSError`` if another command runs here."""

    _listener: socket.socket

    def __init__(self) -> None:
        self._tasks: set[socket.socket] = set()
        self._left: set[socket.socket] = set()

    @property
    def asked(self) -> int:
        """How many tasks have been asked."""
        return len(self._tasks)

    @property
    def left(self) -> int:
        """How many of these have no worker any more."""
        return len(self._left)

    def __enter__(self) -> LeaveCommand:
        running = _call()
        if running is not None:
            running.close()
            raise FileExistsError("another spark-elastic leave runs here")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _meeting_place() as path:
            try:
                if os.path.lexists(path):
                    os.unlink(path)  # left by a command that was killed
                self._listener.bind(path)
            except OSError as error:
                self._listener.close()
                raise PermissionError(_refused(path, error)) from error
            os.chmod(path, 0o600)
        self._listener.listen(socket.SOMAXCONN)
        return self

    def __exit__(self, *raised: object) -> None:
        for end in (self._listener, *self._tasks):
            end.close()
        with _meeting_place() as path, suppress(FileNotFoundError):
            os.unlink(path)

    def wait(self, seconds: float) -> bool:
        """Wait until tasks have found the command and none has a worker any more. Return False if one has after ``seconds``."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            if passed >= min(FIND_SECONDS, seconds / 2) and self.left == self.asked:
                return True
            ready, _, _ = select.select([self._listener, *self._tasks - self._left], [], [], LOOK_SECONDS / 5)
            self._left.update(task for task in ready if task in self._tasks)  # a byte, or the end of the task
            if self._listener in ready:
                task, _ = self._listener.accept()
                if _uid_behind(task) == os.getuid():
                    self._tasks.add(task)
                else:
                    task.close()
        return self.left == self.asked


def _call() -> socket.socket | None:
    """Connect to the command, if this user runs one here."""
    caller = None
    try:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.setblocking(False)
        with _meeting_place() as path:
            caller.connect(path)
        if _uid_behind(caller) == os.getuid():
            return caller
    except OSError:
        pass  # no command runs here, or this process has no descriptor left at the moment
    if caller is not None:
        caller.close()
    return None


@contextmanager
def _meeting_place() -> Iterator[str]:
    """Yield the path of the socket. It leads through the open folder, because a socket's path has at most 107 bytes."""
    folder = os.open(tempfile.gettempdir(), os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/spark_elastic-leave-{os.getuid()}"
    finally:
        os.close(folder)


def _refused(path: str, error: OSError) -> str:
    """Say why the socket cannot be made: other users of the machine may have made something of its name."""
    place = os.path.join(tempfile.gettempdir(), os.path.basename(path))
    try:
        owner = f"; what is there belongs to the user with the number {os.lstat(path).st_uid}: have it removed"
    except OSError:
        owner = ""
    return f"the socket {place}, by which tasks find this command, cannot be made: {error.strerror}{owner}"


def _uid_behind(end: socket.socket) -> int:
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
