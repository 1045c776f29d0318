"""What a task sees of its executor: the thread that Spark's executor waits on when it is to leave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spark_elastic.task.decommission import executor_leaves, is_leaving

SECONDS = 30.0  # only a failing test waits for so long

# Stands for an executor: at a line on its standard input it starts the thread, and says so when the thread has its name.
EXECUTOR = """
import sys, threading, time
def wait():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("wait-for-blocks-to-migrate")
    print("leaves", flush=True)
    time.sleep(1000)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("runs", flush=True)
sys.stdin.readline()
threading.Thread(target=wait, daemon=True).start()
sys.stdin.readline()
"""


@pytest.fixture
def executor() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", EXECUTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert _said(process) == "runs"
        yield process
        process.kill()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _decommission(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_an_executor_that_is_told_to_leave_is_seen_by_tasks_that_run_and_by_those_that_start_later(
    executor: subprocess.Popen[str],
) -> None:
    assert not is_leaving(executor.pid)

    async def scene() -> None:
        running = asyncio.ensure_future(executor_leaves(executor.pid, 0.01))
        await asyncio.wait({running}, timeout=0.05)
        assert not running.done()
        _decommission(executor)
        assert _said(executor) == "leaves"
        await asyncio.wait_for(running, SECONDS)
        await asyncio.wait_for(executor_leaves(executor.pid, SECONDS), SECONDS / 2)

    asyncio.run(scene())


def test_an_executor_that_has_ended_does_not_leave(executor: subprocess.Popen[str]) -> None:
    executor.kill()
    executor.wait()
    assert not is_leaving(executor.pid)
