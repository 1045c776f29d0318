"""What the process of a slot on this machine does, once ``slot_parent`` has forked it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from spark_elastic.launchers.slot_parent import Order
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE
from spark_elastic.task import processes
from spark_elastic.task.facts import gather_facts, worker_environment
from spark_elastic.task.service import REAL_RUNTIME, TaskPlace, ancestors_gone, run_task
from spark_elastic.task.supervisor import WorkerSupervisor, start_warm_parent


def run_slot(order: Order, parent: int) -> None:
    """Be a host until the driver is gone, or says that the job is over."""
    processes.die_with_parent(signal.SIGKILL, parent)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # other slots are forked with the same random state
    # This process is executor and task in one, and the only process of the job above it is the one that it was forked from.
    runtime = replace(
        REAL_RUNTIME,
        facts=partial(gather_facts, executor_pid=os.getpid()),
        orphaned=partial(ancestors_gone, 1),
        supervisor=partial(WorkerSupervisor, start=partial(fork_warm_parent, order.place)),
    )
    run_task(order.ticket, order.place, runtime)


@dataclass(frozen=True)
class ForkedProcess:
    """A child, with what the supervisor needs of ``subprocess.Popen``."""

    pid: int

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Send the process SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def fork_warm_parent(
    place: TaskPlace, descriptor: int, environment: Mapping[str, str]
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Fork the warm parent from this process, which has imported all that a worker needs.

    If the user gives variables in ``env``, start a fresh interpreter instead: some variables are read only when a process starts.
    """
    usual = worker_environment(os.environ, {}, place.gpus, place.cpus, sys.path)
    if {**usual, EXECUTOR_VARIABLE: str(os.getpid())} != environment:
        return start_warm_parent(descriptor, environment)
    task = os.getpid()
    pid = os.fork()
    if pid == 0:
        processes.end_with(partial(_become_warm_parent, descriptor, environment, task))
    return ForkedProcess(pid)


def _become_warm_parent(descriptor: int, environment: Mapping[str, str], task: int) -> int:
    from spark_elastic.worker import warm_parent

    os.setsid()
    os.environ.update(environment)
    processes.close_descriptors({0, 1, 2, descriptor})
    warm_parent.main(descriptor, task)
    return 1  # not reached: the warm parent ends its own process
