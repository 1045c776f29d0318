"""Waits for the reductions of a backward pass in Python, where a lost rank is told from other errors.

Torch's reducer waits for them in C++, at the end of the pass, and raises a library's error as ``RuntimeError``. What is queued
here runs at the end of the pass, too, and before that: the reducer is queued when the last gradient is there, this is when the
pass reaches the first output of a wrapped model.
"""

from __future__ import annotations

from functools import partial

import torch

from spark_elastic.worker.ddp.comm_hook import CommHook
from spark_elastic.worker.world import World, translated_errors


def wait_in_backward(world: World) -> None:
    """Have the present backward pass raise ``WorkerLostError`` if a rank is lost before its reductions have succeeded.

    Does nothing where the host runs ahead of its device: such a pass waits for nothing.
    """
    if not world.group.runs_ahead and world.group.begin_pass(torch._C._current_graph_task_id()):
        torch.autograd.Variable._execution_engine.queue_callback(partial(_wait, world))


def _wait(world: World) -> None:
    with translated_errors(world):
        for work in world.group.end_pass():
            work.wait()
        CommHook.wait_for_last()
