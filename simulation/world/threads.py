"""Threads of simulated processes, as greenlets: blocking code runs unchanged, and yields only where it blocks.

Only the clock resumes a thread, never another thread, so everything between two waits is one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from spark_elastic.worker.job import current_job, enter_job

# The thread that is running; None while the clock runs.
_current: Thread | None = None


def current() -> Thread:
    assert _current is not None, "simulated code runs in a simulated thread"
    return _current


class Thread:
    """Has everything that our code uses of ``threading.Thread``."""

    def __init__(self, target: Callable[[], Any], name: str = "", daemon: bool = True, process: Any = None) -> None:
        self.process: Any = process or current().process
        self.is_over = False
        self._target = target
        self._greenlet: greenlet | None = None
        self._token: object | None = None

    def start(self) -> None:
        self.process.threads.append(self)
        self.process.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._greenlet = greenlet(self._run, parent=getcurrent())
        self._switch(self._greenlet.switch)

    def _run(self) -> None:
        try:
            self._target()
        except GreenletExit:
            pass
        except BaseException as error:
            self.process.unhandled(error)
        finally:
            self.is_over = True

    def _switch(self, switch: Callable[..., Any], *args: Any) -> None:
        global _current
        # A module-level variable says whose job this is; it belongs to one process at a time.
        enter_job(self.process.job)
        before, _current = _current, self
        try:
            switch(*args)
        finally:
            _current = before
            self.process.job = current_job()
            enter_job(None)

    def block(self) -> object:
        """Yield until ``wake`` is called with the token that ``prepare`` returned last."""
        if self.process.loop.is_dead:
            raise GreenletExit
        assert self._greenlet is not None
        self._greenlet.parent.switch()
        if self.process.loop.is_dead:
            raise GreenletExit
        return None

    def prepare(self) -> object:
        self._token = token = object()
        return token

    def wake(self, token: object) -> None:
        self.process.loop.call_soon(self._resume, token)

    def _resume(self, token: object) -> None:
        if token is self._token and not self.is_over and self._greenlet is not None:
            self._token = None
            self._switch(self._greenlet.switch)

    def end(self) -> None:
        """Unwind the thread of a dead process. Nothing can notice what it does meanwhile."""
        if self._greenlet is not None and self._greenlet and not self.is_over:
            for _ in range(20):
                self._switch(self._greenlet.throw, GreenletExit)
                if self.is_over:
                    break
        self.is_over = True

    def is_alive(self) -> bool:
        return not self.is_over

    def join(self, timeout: float | None = None) -> None:
        """Do nothing: threads that are joined here are done, or left behind."""


class Condition:
    """Has everything that our code uses of ``threading.Condition``; there is nothing to lock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Thread, object]] = []

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        thread = current()
        loop = thread.process.loop
        end = None if timeout is None else loop.time() + timeout
        while not predicate():
            if end is not None and loop.time() >= end:
                return False
            token = thread.prepare()
            self._waiting.append((thread, token))
            timer = None if end is None else loop.call_later(end - loop.time(), thread._resume, token)
            thread.block()
            if timer is not None:
                timer.cancel()
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread, token in waiting:
            thread.wake(token)


class Future:
    """Has everything that our code uses of ``concurrent.futures.Future``."""

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._condition = Condition()

    def done(self) -> bool:
        return self._done

    def set_result(self, value: Any) -> None:
        self._value, self._done = value, True
        self._condition.notify_all()

    def set_exception(self, error: BaseException) -> None:
        self._error, self._done = error, True
        self._condition.notify_all()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done:
            self._condition.wait_for(self.done, timeout)
        if self._error is not None:
            raise self._error
        return self._value


class Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


def sleep(seconds: float) -> None:
    thread = current()
    token = thread.prepare()
    thread.process.loop.call_later(seconds, thread._resume, token)
    thread.block()


def run_coroutine_threadsafe(coroutine: Any, loop: Any) -> Future:
    future = Future()

    def done(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            future.set_exception(asyncio.CancelledError())
        elif task.exception() is not None:
            future.set_exception(task.exception())  # type: ignore[arg-type]
        else:
            future.set_result(task.result())

    loop.create_task(coroutine).add_done_callback(done)
    return future


THREADING = SimpleNamespace(Thread=Thread, Condition=Condition, Event=Event)
