"""WatchedWorker: tells the driver that a worker's process lives and what it uses, and notices its end as early as possible."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from spark_elastic.protocol.connection import Connection
from spark_elastic.protocol.messages import WorkerDying, WorkerSampled, WorkerSeen
from spark_elastic.task import processes

# How often the process table is checked for a dying worker, because the pidfd reports its end only once its memory is freed.
# Each check takes 0.15 ms, mostly for waking up, in all less than a hundredth of a core.
GLANCE_SECONDS = 0.02
# How often the driver is told that the worker's process exists.
ALIVE_SECONDS = 1.0
# How often the driver is told what the worker uses and prints. This is for people: seldom, and no more than fits on a screen.
SAMPLE_SECONDS = 5.0
SAMPLED_LINES = 10
SAMPLED_CHARACTERS = 200


class WatchedWorker:
    """Watches one worker from its start to the first sign of its end, or until ``close``. Owns ``pidfd``; used on the event loop.

    ``last_lines`` are the last that the worker has printed, which others add to. ``on_dying`` is called once, at the first sign.
    """

    def __init__(
        self,
        worker: int,
        pid: int,
        pidfd: int,
        driver: Connection,
        last_lines: Sequence[str],
        on_dying: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._pid = pid
        self._pidfd = pidfd
        self._driver = driver
        self._last_lines = last_lines
        self._on_dying = on_dying
        self._loop = asyncio.get_running_loop()
        self._exit_sign = processes.ExitSign(pid)
        self._alive_due = self._sample_due = self._loop.time() + ALIVE_SECONDS
        # The lines of the last sample.
        self._sampled: tuple[str, ...] = ()
        self._loop.add_reader(pidfd, self._dying)
        self._glance = self._loop.call_soon(self._look)

    def close(self) -> None:
        """Watch no longer."""
        self._glance.cancel()
        self._loop.remove_reader(self._pidfd)
        self._exit_sign.close()
        os.close(self._pidfd)

    def _look(self) -> None:
        if self._exit_sign.is_seen():
            self._dying()
            return
        now = self._loop.time()
        if now >= self._alive_due and not self._exit_sign.is_stopped():
            self._alive_due = now + ALIVE_SECONDS
            self._driver.send(WorkerSeen(self._worker))
        if now >= self._sample_due:
            self._sample_due = now + SAMPLE_SECONDS
            self._sample()
        self._glance = self._loop.call_later(GLANCE_SECONDS, self._look)

    def _sample(self) -> None:
        usage, lines = processes.usage_of(self._pid), tuple(self._last_lines)[-SAMPLED_LINES:]
        if usage is not None:
            news = () if lines == self._sampled else tuple(line[:SAMPLED_CHARACTERS] for line in lines)
            self._driver.send(WorkerSampled(self._worker, *usage, news))
            self._sampled = lines

    def _dying(self) -> None:
        self._driver.send(WorkerDying(self._worker))
        self._on_dying()
