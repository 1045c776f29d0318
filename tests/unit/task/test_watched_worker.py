"""What the driver hears of a worker's process: that it lives, what it uses, and that it ends, as early as can be seen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from spark_elastic.protocol.messages import WorkerDying, WorkerSampled, WorkerSeen
from spark_elastic.task import watched_worker
from spark_elastic.task.watched_worker import SAMPLED_CHARACTERS, SAMPLED_LINES, WatchedWorker

SECONDS = 30.0


class Driver:
    """Hears what is said."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.send = self.heard.put_nowait

    async def next(self, kind: type[Any]) -> Any:
        while not isinstance(message := await asyncio.wait_for(self.heard.get(), SECONDS), kind):
            pass
        return message


Scene = Callable[[WatchedWorker, "subprocess.Popen[bytes]", Driver, asyncio.Event], Awaitable[None]]


def watch(scene: Scene, lines: Any = ()) -> None:
    """Play a scene with a process that only waits, and is watched as worker 7."""

    async def play() -> None:
        driver, dying = Driver(), asyncio.Event()
        process = subprocess.Popen(["sleep", "1000"])
        watched = WatchedWorker(7, process.pid, os.pidfd_open(process.pid), driver, lines, dying.set)  # type: ignore[arg-type]
        try:
            await scene(watched, process, driver, dying)
        finally:
            watched.close()
            process.kill()
            process.wait()

    asyncio.run(asyncio.wait_for(play(), SECONDS))


@pytest.fixture(autouse=True)
def reports_follow_each_other_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_worker, "ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(watched_worker, "SAMPLE_SECONDS", 0.01)


def test_a_worker_that_lives_is_told_of_again_and_again_and_its_end_at_once() -> None:
    async def scene(watched: WatchedWorker, process: Any, driver: Driver, dying: asyncio.Event) -> None:
        assert [await driver.next(WorkerSeen) for _ in range(3)] == [WorkerSeen(7)] * 3
        assert not dying.is_set()
        process.kill()
        assert await driver.next(WorkerDying) == WorkerDying(7)
        assert dying.is_set()

    watch(scene)


def test_a_worker_that_is_stopped_is_not_told_to_live_and_what_it_uses_is_told_all_the_same() -> None:
    async def scene(watched: WatchedWorker, process: Any, driver: Driver, dying: asyncio.Event) -> None:
        await driver.next(WorkerSeen)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        while not driver.heard.empty():
            driver.heard.get_nowait()
        for _ in range(3):
            message = await asyncio.wait_for(driver.heard.get(), SECONDS)
            assert isinstance(message, WorkerSampled)
        process.send_signal(signal.SIGCONT)
        await driver.next(WorkerSeen)

    watch(scene)


def test_a_sample_has_the_last_lines_once_and_no_more_than_fits_on_a_screen() -> None:
    lines = deque([f"line {number}" for number in range(2 * SAMPLED_LINES)] + ["x" * 10 * SAMPLED_CHARACTERS])

    async def scene(watched: WatchedWorker, process: Any, driver: Driver, dying: asyncio.Event) -> None:
        first = await driver.next(WorkerSampled)
        assert len(first.last_lines) == SAMPLED_LINES
        assert first.last_lines[-2:] == (f"line {2 * SAMPLED_LINES - 1}", "x" * SAMPLED_CHARACTERS)
        assert first.memory > 0
        assert (await driver.next(WorkerSampled)).last_lines == (), "they have been told"
        lines.append("news")
        while not (later := await driver.next(WorkerSampled)).last_lines:
            pass
        assert later.last_lines[-1] == "news"

    watch(scene, lines)


def test_once_closed_it_watches_no_longer_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def scene(watched: WatchedWorker, process: Any, driver: Driver, dying: asyncio.Event) -> None:
        await driver.next(WorkerSeen)

    watch(scene)
    assert len(os.listdir("/proc/self/fd")) <= before  # those of an earlier test may be collected here
