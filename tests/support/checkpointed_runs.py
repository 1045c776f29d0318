"""Runs with checkpoints, in one process."""

from __future__ import annotations

from typing import Any

from worker_stage import Stage

from spark_elastic.checkpoint.writer import CheckpointWriter
from spark_elastic.driver.driver_place import CheckpointWish


def new_run(stage: Stage, url: str, state: Any, *, storage_options: Any = None, **others: Any) -> Any:
    """A run of its own, with the next attempt, whose every commit is written."""
    if stage.checkpoints is not None:
        stage.checkpoints._pool.shutdown()
    stage.control.commit, stage.control.generation = None, 0
    plan = CheckpointWish(url, 0.0, storage_options).claim()
    stage.checkpoints = CheckpointWriter(plan, stage.control.report, int)
    stage.begin(state, **others)
    return state


def commit(stage: Stage, state: Any) -> None:
    state.commit()
    stage.checkpoints.wait(lambda: False)
