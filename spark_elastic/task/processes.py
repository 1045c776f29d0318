"""Processes on Linux: dying with a parent, adopting orphans, noticing a death early, and killing whole trees."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4

KILL_SECONDS = 10.0
TIDY_SECONDS = 4.0
# How many seconds a process waits for a request to fork before it ends, because it holds the memory of all its imports.
IDLE_SECONDS = 600.0

# Begins the code of a fresh interpreter (``python -c``), which looks for modules in the working directory first. The import path
# comes from the process that starts it, in PYTHONPATH, and has the working directory only where that process has it.
OWN_PATH_ONLY = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "

# In the command lines of processes that clean up after others: Python's resource tracker, torch's manager of shared memory.
_TIDY = ("multiprocessing.resource_tracker", "torch_shm_manager")

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int, parent: int) -> None:
    """Have the kernel send ``signal_number`` to this process when its parent thread ends. A child has to call this first."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)  # the parent had ended before the call


def adopt_orphans(adopt: bool = True) -> None:
    """Become, or cease to become, the parent of orphaned descendants, so that none escapes ``kill_descendants``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def close_descriptors(keep: Collection[int]) -> None:
    """Close all descriptors except these. For a forked child that does not use what its parent had open."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                pass  # this descriptor was used to list the others


def end_with(run: Callable[[], int]) -> NoReturn:
    """In a forked child, call ``run`` and end the process with the exit code that it returns, or 1 if it raises.

    The child never returns to the parent's code, and does not run the parent's exit handlers.
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


def flush_open_files() -> None:
    """Write what the files of this process have buffered, as Python does at its end.

    Files whose classes are written in Python, such as compressed ones or those of an object store, are closed: their last bytes
    come only then. An error of one file does not keep the others.
    """
    files = [each for each in gc.get_objects() if issubclass(type(each), _FILE)]
    for file in files:  # text comes first: it may go into one of the others
        if isinstance(file, io.TextIOBase):
            _quietly(file.flush)
    _close_outer_first([file for file in files if type(file).__module__ != "_io" and _is_written(file)])
    for file in files:
        if isinstance(file, io.BufferedIOBase):
            _quietly(file.flush)


# What all classes of files have in common. Unlike ``io.IOBase``, it asks no class whether it counts as a file.
_FILE: type = io.IOBase.__mro__[1]


def _is_written(file: io.IOBase) -> bool:
    if isinstance(file, (io.TextIOBase, io.RawIOBase)):
        return False
    with suppress(Exception):
        return not file.closed and file.writable()
    return False


def _close_outer_first(files: list[io.IOBase]) -> None:
    """Close files, those first that write into others of them: when one is closed, its last bytes go there."""
    while files:
        inner = {id(value) for file in files for value in getattr(file, "__dict__", {}).values()}
        outer = [file for file in files if id(file) not in inner] or files
        for file in outer:
            _quietly(file.close)
        files = [file for file in files if not any(file is each for each in outer)]


def _quietly(call: Callable[[], object]) -> None:
    """Call what may raise, as for a file that is closed already or that nobody reads any more."""
    with suppress(Exception):
        call()


class ExitSign:
    """Shows whether the kernel has begun to end a process.

    The kernel frees memory before it closes sockets and signals a pidfd, which takes over a second for a process of 4 GiB; the
    flag that is read here is set at once. Reading the open file of one thread takes 4 microseconds; opening that of the whole
    process takes 15.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            self._file = -1

    def is_seen(self) -> bool:
        """Whether the process is exiting or gone."""
        try:
            fields = os.pread(self._file, 512, 0).rpartition(b")")[2].split(None, 7)
        except OSError:
            return True
        return bool(int(fields[6]) & _PF_EXITING)

    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or a debugger, and cannot do anything."""
        try:
            return os.pread(self._file, 512, 0).rpartition(b")")[2].split(None, 1)[0] in (b"T", b"t")
        except OSError:
            return False  # the process is gone, which is noticed elsewhere

    def close(self) -> None:
        """Close the descriptor."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def usage_of(pid: int) -> tuple[float, int] | None:
    """Return the CPU seconds that a process has used on all cores, and its resident bytes; None if it is gone."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss
    except psutil.Error:
        return None


def signal_open(pidfd: int, signal_number: int) -> None:
    """Send a signal to the process of an open pidfd, if it has not ended."""
    try:
        signal.pidfd_send_signal(pidfd, signal_number)
    except ProcessLookupError:
        pass


def kill_descendants(spare: Collection[psutil.Process] = ()) -> None:
    """Send SIGKILL to every descendant of this process and wait until all have ended. Call ``adopt_orphans`` first.

    Children in ``spare`` and their descendants are left alone. Python's resource trackers and torch's managers of shared memory,
    which remove what processes that were killed have left there, and then end by themselves (torch's after two seconds), are
    given ``TIDY_SECONDS`` for that. After
    ``KILL_SECONDS`` this gives up on processes that do not end because the kernel holds them, for example in a broken file
    system.
    """
    me, began = psutil.Process(), time.monotonic()
    end = began + KILL_SECONDS
    # A child that has ended by itself counts until it is reaped: this process may have adopted its children meanwhile.
    while time.monotonic() < end and (children := [child for child in me.children() if child not in spare]):
        descendants = [process for child in children for process in _tree(child)]
        for process in descendants:
            if time.monotonic() >= began + TIDY_SECONDS or not _tidies_up(process):
                _kill(process)
        psutil.wait_procs(descendants, timeout=1)


def reap_adopted() -> None:
    """Reap all children that have ended, adopted ones included."""
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


def _tidies_up(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline() for name in _TIDY)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
