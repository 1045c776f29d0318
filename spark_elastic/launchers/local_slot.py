"""The process of a slot on this machine: ``python -m spark_elastic.launchers.local_slot``, with its order on standard input."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial

import msgspec

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import processes
from spark_elastic.task.facts import gather_facts
from spark_elastic.task.service import REAL_RUNTIME, TaskPlace, TaskRestartError, ancestors_gone, run_task


class Order(msgspec.Struct, frozen=True):
    """What a slot's process is to do, and the pid of the driver that has started it."""

    ticket: Ticket
    place: TaskPlace
    driver: int


def main() -> None:
    """Be a host until the driver says that the job is over, or is gone."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    processes.die_with_parent(signal.SIGKILL, order.driver)
    # This process is executor and task in one, and only the driver stands above it.
    runtime = replace(
        REAL_RUNTIME,
        facts=partial(gather_facts, executor_pid=os.getpid()),
        orphaned=partial(ancestors_gone, 1),
    )
    try:
        run_task(order.ticket, order.place, runtime)
    except TaskRestartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
