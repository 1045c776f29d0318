"""Runs scripts that know nothing of this package, each as a child process of its worker, restarted whenever the world changes.

A script finds the environment that torchrun provides: ``init_process_group()`` reads its rank and a meeting point from there.
The script continues from its own checkpoints. The worker of rank 0 serves the store at which scripts meet.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import psutil
from torch.distributed import TCPStore

from spark_elastic.errors import HostsUpdatedInterrupt, ScriptFailedError, SparkElasticError, WorkerLostError
from spark_elastic.protocol.messages import WHOLE_JOB
from spark_elastic.task import processes
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.files_here import describe_scattered, files_since
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.sockets import interface_of
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.torchrun import rank_variables
from spark_elastic.worker.world import World

logger = logging.getLogger("spark_elastic")

# Seconds that a script has to end by itself after SIGTERM.
TERM_SECONDS = 5.0
# A script may fail because a peer was lost, which the driver is about to report. If no report comes within this many seconds,
# the failure counts as the script's own.
BLAME_SECONDS = 3.0
BEAT_SECONDS = 1.0
# How often a script is started again after failures, unless --max-restarts says otherwise.
MAX_RESTARTS = 3
BACKOFF_LIMIT_SECONDS = 30.0
# Signals that end a script by themselves. Others may follow from another rank's failure, as SIGABRT does with NCCL.
_SUDDEN = frozenset((signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
# How many bytes of a script's error file are read.
ERROR_BYTES = 64 * 1024

_MAIN = f"{processes.OWN_PATH_ONLY}import pickle; pickle.load(open(int(sys.argv[1]), 'rb'))()"


@dataclass(frozen=True)
class RestartOnChange:
    """Called in a worker; ``call`` is a pickled callable without arguments, run in a fresh interpreter per generation.

    max_restarts: how often failures may restart the script; changes of the world do not count. folder: the script's working
    directory, on machines that have it. named: the script's arguments; files at arguments that are paths are compared between
    machines.
    """

    call: bytes
    max_restarts: int = MAX_RESTARTS
    folder: str = ""
    named: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Run the script as a process in each generation, until it succeeds on all ranks."""

        @elastic
        def supervise(state: ObjectState) -> None:
            job = current_job()
            if job is None or job.world is None:
                raise SparkElasticError("RestartOnChange works inside a job only; outside, start the script itself")
            _supervise(job, job.world, self)

        supervise(ObjectState())


def _supervise(job: Job, world: World, plan: RestartOnChange) -> None:
    """Run the script once in this world. Returns when the script has succeeded; raises when it fails or the world changes."""
    control = job.control

    def is_over() -> bool:
        return control.is_aborted(world.generation) or control.is_interrupted

    with ExitStack() as stack:
        record = _Record(control)
        _compare_files(world, plan, record.began())
        meeting = stack.enter_context(_meeting_point(world, job.address))
        failures = record.failures_before(world.generation)
        if not _wait(control, is_over, backoff_seconds(failures)):
            told = environment(world, meeting, control.run_id, plan.max_restarts)
            told = {**interfaces(meeting), **os.environ, **told}
            process, error_file = stack.enter_context(_running(plan.call, told))
            threading.Thread(target=_tell_end, args=(process, control), daemon=True).start()
            job.reporter.committed(0, None)
            _wait(control, lambda: is_over() or process.poll() is not None)
            job.reporter.worked()
            if process.returncode == 0:
                return
            if process.returncode is not None:
                _find_fault(world, plan, record, process.returncode, error_file, is_over)
    if control.is_aborted(world.generation):
        raise WorkerLostError(control.abort_reason)
    raise HostsUpdatedInterrupt


def _find_fault(
    world: World, plan: RestartOnChange, record: _Record, code: int, error_file: int, is_over: Callable[[], bool]
) -> None:
    """Raise if the script itself has failed. Returns if the world is over for another reason.

    When one script fails, all fail, and the first failure is the cause, unless a worker was lost, which the driver would soon
    report. The rank that first says that its script has ended reports the failure, on behalf of whichever rank failed first.
    """
    control, mine = record.control, str(world.rank).encode()
    record.tell(world, read_failure(world.rank, code, error_file))
    reply = control.store("set_default", ("script/failed",), (mine,), generation=world.generation)
    if _wait(control, is_over, BLAME_SECONDS if reply.values == (mine,) else None):
        return
    first = record.first_failure(world)
    failures = record.add_failure(world.generation)
    if failures > plan.max_restarts:
        more = "" if first.traceback else "; its output says more"
        raise ScriptFailedError(
            f"{first.story}. That was failure {failures} of max_restarts={plan.max_restarts} + 1{more}", first.traceback
        )
    if first.traceback:
        logger.warning("%s\n%s", first.story, first.traceback.rstrip())
    raise WorkerLostError(f"{first.story}; restart {failures} of {plan.max_restarts}")


class Failure(msgspec.Struct, frozen=True):
    """How and when a script failed on a rank.

    at: the time, in nanoseconds, of its error, or at which its end was noticed if it reported no error. is_sudden: whether a
    signal has ended it that is no consequence of another rank's failure.
    """

    at: int
    story: str
    traceback: str
    is_sudden: bool = False


class _Record:
    """The job's record of its scripts: when the first one began, how often they failed, and in which world they last did."""

    def __init__(self, control: ControlClient) -> None:
        self.control = control

    def began(self) -> float:
        now = str(time.time()).encode()
        return float(self.control.store("set_default", ("script/began",), (now,), generation=WHOLE_JOB).values[0])

    def tell(self, world: World, failure: Failure) -> None:
        key = f"script/failed/{world.rank}"
        self.control.store("set", (key,), (msgspec.msgpack.encode(failure),), generation=world.generation)

    def first_failure(self, world: World) -> Failure:
        keys = [(f"script/failed/{rank}",) for rank in range(world.size)]
        told = [key for key in keys if self.control.store("check", key, generation=world.generation).amount]
        found = [self.control.store("get", key, generation=world.generation).values[0] for key in told]
        return first_of([msgspec.msgpack.decode(each, type=Failure) for each in found])

    def add_failure(self, generation: int) -> int:
        self.control.store("set", ("script/failed-in",), (str(generation).encode(),), generation=WHOLE_JOB)
        return self.control.store("add", ("script/failures",), amount=1, generation=WHOLE_JOB).amount

    def failures_before(self, generation: int) -> int:
        """Return the number of failures if one of them ended the previous world, else 0."""
        if not self.control.store("check", ("script/failed-in",), generation=WHOLE_JOB).amount:
            return 0
        last = int(self.control.store("get", ("script/failed-in",), generation=WHOLE_JOB).values[0])
        if last < generation - 1:
            return 0
        return self.control.store("add", ("script/failures",), amount=0, generation=WHOLE_JOB).amount


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from. An end by a signal is noticed late, even after its peers' errors."""
    return min(failures, key=lambda failure: (not failure.is_sudden, failure.at))


def backoff_seconds(failures: int) -> float:
    """Return how long to wait before a restart, because a script that failed is likely to fail again at once."""
    return min(2.0 ** (failures - 1), BACKOFF_LIMIT_SECONDS) if failures else 0.0


def describe_end(code: int) -> str:
    """Say how a script has ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _wait(
    control: ControlClient,
    condition: Callable[[], bool],
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait for a condition, with heartbeats, so that this worker does not seem to hang. Return whether the condition holds."""
    deadline = None if seconds is None else now() + seconds
    while True:
        left = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - now())
        if control.wait(condition, max(left, 0.0)):
            return True
        if deadline is not None and now() >= deadline:
            return False
        control.beat()


# ---------------------------------------------------------------- where scripts meet


@dataclass(frozen=True)
class Meeting:
    """The address at which scripts find their store, and that of this machine on the same network."""

    host: str
    port: int
    own: str


@contextmanager
def _meeting_point(world: World, address: str) -> Iterator[Meeting]:
    """Serve the store of the scripts' process group from rank 0: on loopback if all are on one machine.

    The socket is bound before its address is published, so no other process can take the port in between.
    """
    addresses = set(world.store.gather("script/address", address.encode(), world.size))
    own = choose_host(address, is_one_machine=len(addresses) == 1 and world.me.local_size == world.size)
    store = None
    if world.rank == 0:
        server = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET, backlog=1024)
        port = server.getsockname()[1]
        store = TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        world.store.set("script/master", f"{own} {port}")
    host, number = world.store.get("script/master").decode().split()
    try:
        yield Meeting(host, int(number), own)
    finally:
        del store


def choose_host(address: str, *, is_one_machine: bool) -> str:
    """Return the address at which rank 0 serves the store: loopback if all scripts run on one machine."""
    if not is_one_machine:
        return address
    return "::1" if ":" in address else "127.0.0.1"


def environment(world: World, meeting: Meeting, run_id: str, max_restarts: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for its workers."""
    return {
        **rank_variables(world),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(world.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }


def interfaces(meeting: Meeting) -> dict[str, str]:
    """Return variables that make the script's Gloo and NCCL use the job's network; torch would look up the host's name."""
    name = interface_of(meeting.own)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def _compare_files(world: World, plan: RestartOnChange, since: float) -> None:
    """Warn, ahead of a second start, of files that only some machines have."""
    if world.generation == 1 or world.size == 1:
        return
    place = f"{socket.gethostname()} (rank {world.rank})"
    mine = json.dumps([place, files_since(plan.folder, plan.named, since)]).encode()
    found = dict(json.loads(entry) for entry in world.store.gather("script/files", mine, world.size))
    problem = describe_scattered(found)
    if problem and world.rank == 0:
        logger.warning("%s", problem)


# ---------------------------------------------------------------- the process


@contextmanager
def _running(call: bytes, environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the call in a process; yield the process and the file for its error. Nothing of the process is left afterwards.

    The process reads the call from memory and writes its error to memory, so no file is left, either.
    """
    spare = psutil.Process().children()
    processes.adopt_orphans()
    descriptor, error_file = os.memfd_create("spark_elastic-script"), os.memfd_create("spark_elastic-error")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(call)
        os.lseek(descriptor, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env={**environment, "TORCHELASTIC_ERROR_FILE": f"/proc/{os.getpid()}/fd/{error_file}"},
        )
        try:
            yield process, error_file
        finally:
            _end(process, spare)
            processes.adopt_orphans(False)
    finally:
        os.close(descriptor)
        os.close(error_file)


def read_failure(rank: int, code: int, error_file: int) -> Failure:
    """Return how a script failed. Signals from torch while the interpreter exits after an error, such as abort, do not count."""
    message, traceback = read_error(error_file)
    if message:
        return Failure(os.fstat(error_file).st_mtime_ns, f"the script failed on rank {rank}: {message}", traceback)
    return Failure(time.time_ns(), f"the script {describe_end(code)} on rank {rank}", traceback, -code in _SUDDEN)


def read_error(descriptor: int) -> tuple[str, str]:
    """Read the message and traceback that torch's ``@record`` has written; both are empty if there is no error."""
    try:
        told = json.loads(os.pread(descriptor, ERROR_BYTES, 0))["message"]
        if isinstance(told, str):
            return told, ""
        return str(told["message"]), str(told.get("extraInfo", {}).get("py_callstack", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""


def _tell_end(process: subprocess.Popen[bytes], control: ControlClient) -> None:
    process.wait()
    control.notify()


def _end(process: subprocess.Popen[bytes], spare: list[psutil.Process]) -> None:
    """Ask the script to end, then kill it and every process that it has started."""
    process.terminate()
    try:
        process.wait(TERM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    processes.kill_descendants(spare)
