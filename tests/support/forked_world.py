"""Worlds of a few ranks in processes of this machine: real process groups of Gloo, without a job around them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.watched_group import Watch

# Its processes are forked from one that has imported torch and runs no threads.
_context = multiprocessing.get_context("forkserver")
# Held to the end of a process: a hook's last callback may still hold its group, and Gloo cannot be dropped on its own thread.
_groups: list[Any] = []
_context.set_forkserver_preload(["torch", "torch._dynamo", "spark_elastic.worker.ddp.wrapper", "spark_elastic.data"])


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of a module, with a folder and a rank ahead of ``args``, in ``size`` processes; return what each returns.

    Raises what a rank raises, or ``ChildProcessError`` where one dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_call, args=(theirs, function, Path(folder), rank, *args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        answers: dict[Connection, Any] = {}
        try:
            while len(answers) < size:
                for pipe in connection.wait([pipe for pipe in pipes if pipe not in answers]):
                    answers[pipe] = _receive(pipe)  # type: ignore[arg-type, index]
                    if isinstance(answers[pipe], BaseException):  # type: ignore[index]
                        raise answers[pipe]  # type: ignore[index]
        finally:
            for process in processes:
                if len(answers) < size:
                    process.kill()  # it may wait for one that has failed
                process.join()
    return [answers[pipe] for pipe in pipes]


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return ChildProcessError("a rank died")


def _call(pipe: Connection, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(function(*args))
    except BaseException as error:
        traceback.print_exc()  # an exception leaves its traceback behind where it is sent on
        pipe.send(error)


@contextmanager
def world(
    folder: Path, rank: int, size: int, models: Sequence[DistributedDataParallel], generation: int = 1
) -> Iterator[Any]:
    """A generation of this process: torch's default group, and models in it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{generation}", rank=rank, world_size=size)
    watch = Watch(in_order=False)  # which sees no collective of this group
    formed: Any = SimpleNamespace(
        process=os.getpid(),
        rank=rank,
        size=size,
        generation=generation,
        backend="gloo",
        is_broken=lambda: False,
        lost=lambda error: WorkerLostError(str(error)),
        compares=lambda change: None,
        froze=lambda model: None,
        group=SimpleNamespace(runs_ahead=False, begin_pass=watch.begin_pass, end_pass=watch.end_pass),
    )
    _groups.append(dist.group.WORLD)
    try:
        for model in models:
            model.attach(formed)
        if models:
            models[0].compare(models)
        yield formed
    finally:
        for model in models:
            model.detach()
        dist.destroy_process_group()
