"""spark-elastic leave: has the workers of this machine, or container, leave their jobs at the next commit, and waits for that.

For what runs ahead of a machine's end: the preStop hook of an executor's pod, a handler of spot notices, maintenance. No step is
lost, and the jobs go on elsewhere; of a job that has workers nowhere else one stays, which holds the state. While it runs, and
ten seconds longer, no worker is started here. It reaches tasks of the same user with the same folder for temporary files
(TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import math
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
    parser.add_argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how much longer no worker is started here once they have left: as long as the machine may live on (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(call=leave)


def leave(options: argparse.Namespace) -> int:
    """Ask workers to leave, wait, and print the outcome. Return 1 if one has not left in time."""
    if not options.grace > 0:
        raise ValueError(f"--grace must be a number of seconds above 0, not {options.grace:g}")
    if not 0 <= options.hold < math.inf:
        raise ValueError(f"--hold must be a number of seconds from 0 on, not {options.hold:g}")
    began = time.monotonic()
    with LeaveCommand() as command:
        is_done = command.wait(options.grace)
        took = time.monotonic() - began
        time.sleep(options.hold)
    if options.json:
        print(json.dumps({"tasks": command.asked, "left": command.left, "seconds": round(took, 3)}))
        return 0 if is_done else 1
    seconds = f"{took:.1f} s"
    tasks = f"{command.asked} {'task' if command.asked == 1 else 'tasks'}"
    if not command.asked:
        print("no task of a job runs here")
    elif is_done:
        print(f"{tasks} had {'its worker' if command.asked == 1 else 'their workers'} leave, in {seconds}")
    else:
        print(f"of {tasks} {command.asked - command.left} still had a worker after {seconds}")
    return 0 if is_done else 1
