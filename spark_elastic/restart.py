"""Runs scripts that know nothing of us: a process of its own in each worker, started anew whenever the world changes.

What torchrun does for its workers: ranks and a meeting point are in the environment, ``init_process_group()`` finds them, and
the script goes on from its own checkpoints.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from spark_elastic.context import DEVICE_VARIABLE, Job, current_job
from spark_elastic.control import ControlClient
from spark_elastic.elastic_loop import elastic
from spark_elastic.errors import HostsUpdatedInterrupt, SparkElasticError, WorkerLostError
from spark_elastic.state import ObjectState
from spark_elastic.task import processes
from spark_elastic.world import World

# A script has so long to end by itself after SIGTERM.
TERM_SECONDS = 5.0
# A script that fails may have lost a peer that the driver is about to name: it takes so long to be called its own fault.
BLAME_SECONDS = 3.0
BEAT_SECONDS = 1.0

_MAIN = "import pickle, sys; pickle.load(open(int(sys.argv[1]), 'rb'))()"


@dataclass(frozen=True)
class RestartOnChange:
    """Called in a worker; ``call`` is a pickled callable without arguments, run in a fresh interpreter per generation."""

    call: bytes

    def __call__(self) -> None:
        @elastic
        def supervise(state: ObjectState) -> None:
            job = current_job()
            if job is None or job.world is None:
                raise SparkElasticError("RestartOnChange works inside a job only; outside, start the script itself")
            _supervise(job, job.world, self.call)

        supervise(ObjectState())


def _supervise(job: Job, world: World, call: bytes) -> None:
    """Run the script once in this world. Returns when it has ended well; raises when it has not, or the world changes."""
    control = job.control
    if world.rank == 0:
        world.store.set("script/master", f"{control.address} {_free_port(control.address)}")
    address, port = world.store.get("script/master").decode().split()
    with _running(call, {**os.environ, **environment(world, address, port)}) as process:
        threading.Thread(target=_tell_end, args=(process, control), daemon=True).start()
        job.reporter.committed(0, None)

        def is_over() -> bool:
            return control.is_aborted(world.generation) or control.is_interrupted

        _wait(control, lambda: is_over() or process.poll() is not None)
        if process.returncode:
            # All fail when one does. The first to say so is to blame, unless a worker was lost, which the driver tells soon.
            mine = str(world.rank).encode()
            reply = control.store("set_default", ("script/failed",), (mine,), generation=world.generation)
            _wait(control, is_over, BLAME_SECONDS if reply.values == (mine,) else None)
        if process.returncode == 0:
            return
        if control.is_aborted(world.generation):
            raise WorkerLostError(control.abort_reason)
        if control.is_interrupted:
            raise HostsUpdatedInterrupt("workers arrive or leave")
        raise SparkElasticError(f"the script ended with exit code {process.returncode}; its output says more")


def _wait(control: ControlClient, condition: Callable[[], bool], seconds: float | None = None) -> None:
    """Wait for a condition, and have nobody think that this worker hangs."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not control.wait(condition, BEAT_SECONDS) and (deadline is None or time.monotonic() < deadline):
        control.beat()


def environment(world: World, address: str, port: str) -> dict[str, str]:
    """What torchrun tells its workers. A worker that has a GPU sees only that one, so it is the first of its node's."""
    me = world.me
    local_rank, local_size = (0, 1) if DEVICE_VARIABLE in os.environ else (me.local_rank, me.local_size)
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(me.cross_rank),
        "GROUP_WORLD_SIZE": str(me.cross_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "spark_elastic",
        "TORCHELASTIC_RESTART_COUNT": str(world.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def _running(call: bytes, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the call; afterwards nothing of it is left. Its code comes from memory, so no file is, either."""
    spare = psutil.Process().children()
    processes.adopt_orphans()
    descriptor = os.memfd_create("spark_elastic-script")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(call)
        os.lseek(descriptor, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
        )
    finally:
        os.close(descriptor)
    try:
        yield process
    finally:
        _end(process, spare)
        processes.adopt_orphans(False)


def _tell_end(process: subprocess.Popen[bytes], control: ControlClient) -> None:
    process.wait()
    control.notify()


def _end(process: subprocess.Popen[bytes], spare: list[psutil.Process]) -> None:
    """Ask the script to end, then kill it and all that it has left behind."""
    process.terminate()
    try:
        process.wait(TERM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    processes.kill_descendants(spare)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return int(server.getsockname()[1])
