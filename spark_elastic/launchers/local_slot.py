"""What the process of a slot on this machine does after ``slot_parent`` has forked it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from spark_elastic.launchers.slot_parent import Order
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE, TASK_VARIABLE
from spark_elastic.task import processes
from spark_elastic.task.facts import gather_facts, worker_environment
from spark_elastic.task.service import REAL_RUNTIME, TaskPlace, ancestors_gone, run_task
from spark_elastic.task.supervisor import WorkerSupervisor
from spark_elastic.task.warm import StartedParent, WarmParent
from spark_elastic.worker.process import warm_parent


def run_slot(order: Order, parent: int) -> None:
    """Serve as a host until the driver is gone, or says that the job is over."""
    processes.die_with_parent(signal.SIGKILL, parent)
    # This process is executor and task in one. The job's only process above it is the one from which it was forked.
    runtime = replace(
        REAL_RUNTIME,
        facts=partial(gather_facts, executor_pid=os.getpid()),
        orphaned=partial(ancestors_gone, 1),
        supervisor=partial(WorkerSupervisor, start=partial(fork_warm_parent, order.place)),
    )
    run_task(order.ticket, order.place, runtime)


class ForkedParent:
    """A warm parent that was forked from this process."""

    is_child = True

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended. Return False if it has not ended within this time."""
        descriptor = os.pidfd_open(self.pid)
        try:
            has_ended = bool(select.select([descriptor], [], [], seconds)[0])
        finally:
            os.close(descriptor)
        if has_ended:
            os.waitpid(self.pid, 0)
        return has_ended

    def kill(self) -> None:
        """Send the process SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def fork_warm_parent(place: TaskPlace, environment: Mapping[str, str]) -> WarmParent:
    """Fork the warm parent from this process, which has imported everything that a worker needs.

    If the user sets variables in ``env``, start a fresh interpreter instead: some variables are read only when a process starts.
    """
    usual = worker_environment(os.environ, {}, place.gpus, place.cpus, sys.path)
    me = str(os.getpid())  # executor and task in one
    if {**usual, EXECUTOR_VARIABLE: me, TASK_VARIABLE: me} != environment:
        return StartedParent(environment)
    task = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = os.fork()
        if pid == 0:
            processes.end_with(partial(_become_warm_parent, theirs.fileno(), environment, task))
    return ForkedParent(pid, ours)


def _become_warm_parent(descriptor: int, environment: Mapping[str, str], task: int) -> int:
    os.setsid()
    os.environ.update(environment)
    processes.close_descriptors({0, 1, 2, descriptor})
    warm_parent.main(descriptor, task)
