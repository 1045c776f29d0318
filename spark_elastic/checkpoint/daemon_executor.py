"""DaemonExecutor: calls on one daemon thread, which nobody waits for when the process ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DaemonExecutor:
    """Runs calls one after the other. One that never returns does not keep the process, as it would in a thread pool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``function`` after all calls before. The future holds the result or the exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[R] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True) -> None:
        """End the thread after all calls so far, and wait for its end if ``wait`` is True. No call may follow."""
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            future, call = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
