"""Linux process matters: dying with a parent, adopting orphans, seeing a death early, and killing whole trees."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4

KILL_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int, parent: int) -> None:
    """Have the kernel send us ``signal_number`` when the thread that started us ends. Call it first thing in a child."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)  # the process ended before it was looked at


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of descendants whose own parent dies, so that none escapes ``kill_descendants``; or stop it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def close_descriptors(keep: Collection[int]) -> None:
    """Close all descriptors but these. For a forked child that never returns to what its parent had open."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                pass  # the one by which the others were listed


def end_with(run: Callable[[], int]) -> NoReturn:
    """In a forked child: run, and end with the exit code that it returns, or 1 where it raises.

    Never returns into what its parent was about, nor does what that would do at its end.
    """
    code = 1
    try:
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class ExitSign:
    """Tells whether the kernel has begun to take a process down.

    It frees memory before it closes sockets and tells a pidfd: for a process of 4 GiB that takes over a second, this is
    visible at once. A look at the open file of one thread takes 4 microseconds; opening the whole process's, 15.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            self._file = -1

    def is_seen(self) -> bool:
        """Whether it is exiting, or gone."""
        try:
            fields = os.pread(self._file, 512, 0).rpartition(b")")[2].split(None, 7)
        except OSError:
            return True
        return bool(int(fields[6]) & _PF_EXITING)

    def is_stopped(self) -> bool:
        """Whether the process is held, by SIGSTOP or a debugger, and cannot do anything."""
        try:
            return os.pread(self._file, 512, 0).rpartition(b")")[2].split(None, 1)[0] in (b"T", b"t")
        except OSError:
            return False  # the process is gone, and others notice that

    def close(self) -> None:
        """Close the descriptor."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def kill_descendants(spare: Collection[psutil.Process] = ()) -> None:
    """SIGKILL every descendant of this process and wait for their end; orphans are to be adopted first.

    Children in ``spare``, and what is below them, are left alone. Gives up after ``KILL_SECONDS`` on what does not end: the
    kernel holds it, in a broken file system for example.
    """
    me = psutil.Process()
    end = time.monotonic() + KILL_SECONDS
    # A child that has ended by itself counts, until it has been reaped: its own children may have come to us since we looked.
    while time.monotonic() < end and (children := [child for child in me.children() if child not in spare]):
        descendants = [process for child in children for process in _tree(child)]
        for process in descendants:
            _kill(process)
        psutil.wait_procs(descendants, timeout=1)


def reap_adopted() -> None:
    """Take note of the end of children that have ended, adopted ones among them."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
