"""Calls on one daemon thread."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from spark_elastic.checkpoint.daemon_executor import DaemonExecutor


def test_calls_are_made_in_order_on_one_thread_and_their_futures_hold_what_came_of_them() -> None:
    executor, begins = DaemonExecutor("calls"), threading.Event()
    order: list[int] = []
    executor.submit(begins.wait)
    futures = [executor.submit(order.append, number) for number in range(3)]
    failing = executor.submit(divmod, 1, 0)
    assert not futures[0].done()
    begins.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    executor.shutdown()
    assert order == [0, 1, 2]
    assert "calls" not in {thread.name for thread in threading.enumerate()}


def test_a_process_ends_although_a_call_never_returns() -> None:
    code = (
        "import threading\nfrom spark_elastic.checkpoint.daemon_executor import DaemonExecutor\n"
        "executor = DaemonExecutor('calls')\nexecutor.submit(threading.Event().wait)\nexecutor.shutdown(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
