"""spark-elastic leave: has the workers of this machine, or container, leave their jobs at the next commit, and waits for that.

For what runs ahead of a machine's end: the preStop hook of an executor's pod, a handler of spot notices, maintenance. No step is
lost, and the jobs go on elsewhere. While it runs, and ten seconds longer, no worker is started here.
"""

from __future__ import annotations

import argparse
import time

from spark_elastic.task.leave import LeaveCommand

GRACE_SECONDS = 25.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("leave", help="have the workers of this machine leave their jobs", description=__doc__)
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for them (default {GRACE_SECONDS:g}); less than what ends the machine or the container waits",
    )
    parser.set_defaults(call=leave)


def leave(options: argparse.Namespace) -> int:
    """Ask, wait, and say how it went. Return 1 if a worker has not left in time."""
    if not options.grace > 0:
        raise ValueError(f"--grace must be a number of seconds above 0, not {options.grace:g}")
    began = time.monotonic()
    with LeaveCommand() as command:
        is_done = command.wait(options.grace)
    tasks = f"{command.asked} {'task' if command.asked == 1 else 'tasks'}"
    seconds = f"{time.monotonic() - began:.1f} s"
    if not command.asked:
        print("no task of a job runs here")
    elif is_done:
        print(f"{tasks} had their workers leave, in {seconds}")
    else:
        print(f"of {tasks} {command.asked - command.left} still had a worker after {seconds}")
    return 0 if is_done else 1
