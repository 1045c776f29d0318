"""Simulated time: one queue of future events, and an event loop for each process, as asyncio expects it.

The callbacks of a stopped process (SIGSTOP, a paused machine) are parked until it continues; those of a dead one are dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.world.threads import run_coroutine_threadsafe


class Handle:
    """A future event, with the interface that asyncio expects of a handle."""

    __slots__ = ("args", "call", "is_cancelled", "loop")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], loop: ProcessLoop | None) -> None:
        self.call = call
        self.args = args
        self.loop = loop
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address, so that whatever is done in the order of a set can be replayed."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: Any, number: int) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._number


class Clock:
    """Runs what is due, in order of time, then of request. ``events`` counts what has been run."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events = 0
        self._ready: deque[Handle] = deque()
        self._later: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()

    def soon(self, call: Callable[..., Any], *args: Any, loop: ProcessLoop | None = None) -> Handle:
        handle = Handle(call, args, loop)
        self._ready.append(handle)
        return handle

    def after(self, seconds: float, call: Callable[..., Any], *args: Any, loop: ProcessLoop | None = None) -> Handle:
        handle = Handle(call, args, loop)
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), handle))
        return handle

    def run(self, is_done: Callable[[], bool], until: float, limit: int) -> None:
        """Run until ``is_done``, or nothing is left, or the time is ``until``, or ``limit`` events have been run."""
        ready, later = self._ready, self._later
        try:
            while self.events < limit:
                if ready:
                    handle = ready.popleft()
                elif later and later[0][0] <= until and not is_done():
                    when, _, handle = heapq.heappop(later)
                    self.now = when
                else:
                    return
                if handle.is_cancelled:
                    continue
                loop = handle.loop
                if loop is not None:
                    if loop.is_dead:
                        continue
                    if loop.is_stopped:
                        loop.parked.append(handle)
                        continue
                    events._set_running_loop(loop)  # type: ignore[arg-type]
                self.events += 1
                handle.call(*handle.args)
        finally:
            events._set_running_loop(None)


class ProcessLoop:
    """The event loop of one simulated process."""

    def __init__(self, clock: Clock, process: Any) -> None:
        self.process = process
        self.is_stopped = False
        self.is_dead = False
        self.parked: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._clock = clock

    # ------------------------------------------------------------------ for the simulation

    def go_on(self) -> None:
        """Run what was due while the process was stopped."""
        self.is_stopped = False
        parked, self.parked = self.parked, []
        for handle in parked:
            if not handle.is_cancelled:
                self._clock._ready.append(handle)

    def end(self) -> None:
        """End the loop and close its coroutines. Nothing else can notice, because their connections are gone."""
        self.is_dead = True
        self.parked.clear()
        for task in self.tasks:
            coroutine: Any = task.get_coro()
            for _ in range(20):  # a coroutine with a ``finally`` that awaits does not end at the first attempt
                try:
                    coroutine.close()
                    break
                except (RuntimeError, ValueError):
                    continue
        self.tasks.clear()

    # ------------------------------------------------------------------ for asyncio

    def call_soon(self, call: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        handle = Handle(call, args, self)
        self._clock._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        return self._clock.after(max(0.0, delay), call, *args, loop=self)

    def call_at(self, when: float, call: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        return self.call_later(when - self._clock.now, call, *args)

    def time(self) -> float:
        return self._clock.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:
        task = Task(coroutine, self, next(self._clock._numbers))
        if len(self.tasks) > 16:
            self.tasks = [other for other in self.tasks if not other.done()]
        self.tasks.append(task)
        return task

    def run_until_complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Block the calling simulated thread until the coroutine is done."""
        return run_coroutine_threadsafe(coroutine, self).result()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.is_dead

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Take an exception that was never retrieved. asyncio calls this."""
        self.process.unhandled(context.get("exception") or RuntimeError(context["message"]))
