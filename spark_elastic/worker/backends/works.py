"""Works: what a rank waits for in Gloo, so that no rank waits forever for an operation that Gloo has lost.

When a connection ends, Gloo fails the operations that it has recorded as pending there. Once an operation has begun to be
written or read, it is no longer recorded. If a peer dies at that moment, the operation neither completes nor fails, and its
waiter hangs until the group's timeout; neither torch nor Gloo has a call that ends this. Therefore nobody waits inside Gloo. A
collective is waited for by its future, which can be completed from here; a transfer, which has no future, on a thread that can
be left behind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.data.stopwatch import note_waited, note_waiting

_LOST = "the operation was lost when a connection of the group ended"
# Torch's value for no timeout.
_NONE = timedelta(0)
# The timeout of a wait that is known to have expired, so that torch raises its own error.
_AT_ONCE = timedelta(milliseconds=1)


class _Lost:
    """The value of a lost collective's future. Any attempt to use it raises: DDP pickles it, hooks index it."""

    def _fail(self, *arguments: object) -> Any:
        raise RuntimeError(_LOST)

    __reduce_ex__ = __getitem__ = __iter__ = __len__ = _fail


def as_it_is(error: RuntimeError) -> None:
    """Raise nothing in place of the library's own error."""


class Guarded(dist.Work):
    """Answers torch's calls as Gloo's own work does, unless the operation is lost."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work
        self._is_lost = False
        # Raises that a rank was lost in place of an error of the library, if one was. A variable here that held such an error
        # would be in a cycle with it, and keep the work and with it Gloo's ports.
        self.translate: Callable[[RuntimeError], None] = as_it_is

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Wait as the library's own work does."""
        note_waiting()
        try:
            return self._wait_for(timeout)
        except RuntimeError as error:
            self.translate(error)
            raise
        finally:
            note_waited()

    def _wait_for(self, timeout: timedelta) -> bool:
        raise NotImplementedError

    def lose(self) -> None:
        """Make the work fail. Gloo must be done with it."""
        self._is_lost = True

    def is_success(self) -> bool:
        return not self._is_lost and self._work.is_success()

    def exception(self) -> object:
        return RuntimeError(_LOST) if self._is_lost else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._unless_lost().result()

    def source_rank(self) -> int:
        return self._unless_lost().source_rank()

    def _source_rank(self) -> int:
        return self._unless_lost()._source_rank()

    def synchronize(self) -> None:
        self._unless_lost().synchronize()

    def _unless_lost(self) -> dist.Work:
        if self._is_lost:
            raise RuntimeError(_LOST)
        return self._work


class _Collective(Guarded):
    """A collective, which is waited for by its future."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(work)
        self._future = work.get_future()

    def _wait_for(self, timeout: timedelta) -> bool:
        if timeout:
            ended = threading.Event()
            self._future.add_done_callback(lambda _: ended.set())
            if not ended.wait(timeout.total_seconds()):
                return self._work.wait(_AT_ONCE)
        if isinstance(self._future.wait(), _Lost):
            raise RuntimeError(_LOST)
        # This returns at once, and makes the current stream wait for what the work has begun on a GPU.
        return self._work.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        done: bool = self._future.done()
        return done

    def is_in_callbacks(self) -> bool:
        """Whether a Gloo thread is running the future's callbacks. Torch completes a work only after these."""
        return self.is_completed() and not self._is_lost and not self._work.is_completed()

    def lose(self) -> None:
        """Make the work fail. The process ends if Gloo tries to complete the future as well."""
        super().lose()
        try:
            self._future.set_result(_Lost())
        except RuntimeError:  # the future has just completed
            self._is_lost = False


class _Transfer(Guarded):
    """A transfer, which is waited for on a thread of its own."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(work)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def _wait_for(self, timeout: timedelta) -> bool:
        with self._lock:
            if self._thread is None and not self._is_lost:
                self._thread = threading.Thread(
                    target=self._wait, args=(timeout,), name="spark_elastic-transfer", daemon=True
                )
                self._thread.start()
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout: timedelta) -> None:
        try:
            self._work.wait(timeout)
        except BaseException as error:
            self._error = error
        self._is_over.set()

    def is_completed(self) -> bool:
        return self._is_over.is_set() or self._work.is_completed()

    def lose(self) -> None:
        super().lose()
        self._error = RuntimeError(_LOST)
        self._is_over.set()


class Works:
    """The works of one rank's Gloo groups that are not complete. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collectives: list[_Collective] = []
        # Weak, because a transfer without references has no waiter. DDP, however, keeps only the future of a collective.
        self._transfers: weakref.WeakSet[_Transfer] = weakref.WeakSet()

    def guard(self, work: dist.Work) -> dist.Work:
        """Return a work to be waited for in place of Gloo's."""
        try:
            collective = _Collective(work)
        except RuntimeError:  # it has no future
            transfer = _Transfer(work)
            with self._lock:
                self._transfers.add(transfer)
            return transfer
        with self._lock:
            self._collectives = [*self._unfinished(), collective]
        return collective

    def are_complete(self) -> bool:
        """Whether nothing is pending."""
        with self._lock:
            self._collectives = self._unfinished()
            return all(work.is_completed() for work in (*self._collectives, *self._transfers))

    def are_in_callbacks(self) -> bool:
        """Whether a Gloo thread is running callbacks, so that it may sleep although works remain to be run."""
        with self._lock:
            return any(work.is_in_callbacks() for work in self._collectives)

    def lose(self) -> int:
        """Make all pending works fail, because Gloo will not complete them any more. Return their number."""
        with self._lock:
            lost = [work for work in (*self._collectives, *self._transfers) if not work.is_completed()]
            self._collectives = []
        for work in lost:
            work.lose()
        return len(lost)

    def _unfinished(self) -> list[_Collective]:
        return [work for work in self._collectives if not work.is_completed() or work.is_in_callbacks()]
