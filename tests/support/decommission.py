"""An executor of a job is decommissioned by a signal, and leaves with its worker. For any kind of session."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import psutil
import training
from standalone import executor_of

import spark_elastic


def train_through_a_decommission(spark: Any, folder: Path, **settings: Any) -> None:
    """Decommission the executor of the newest worker, train until it has left, and check that this costs no step."""
    left = folder / "left"
    executors: dict[int, psutil.Process] = {}
    events: list[dict[str, Any]] = []

    def decommission(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "worker_started":
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have left already, with its executor
                executors[event["worker"]] = executor_of(event["pid"])
        elif event["event"] == "world_formed" and event["generation"] == 1:
            executors[max(executors)].send_signal(signal.SIGPWR)
        elif event["event"] == "world_formed":
            left.touch()

    results = spark_elastic.run(
        training.count_steps, args=(training.MANY_STEPS, 0.05), kwargs={"until": str(left)}, spark=spark,
        min_np=1, num_proc=2, max_np=2, on_event=decommission, **settings,
    )  # fmt: skip
    steps = int(results[0]["counter"])
    assert [result["history"] for result in results] == [list(range(1, steps + 1))] * len(results)
    kinds = [event["event"] for event in events]
    assert kinds.count("host_draining") == 1
    assert "world_broken" not in kinds
    assert [event["size"] for event in events if event["event"] == "world_formed"][:2] == [2, 1]
