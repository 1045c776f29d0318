"""spark-elastic run script.py --min-np 2 --max-np 8 -- arguments: runs a script, or module:function, in every worker.

The script itself calls its @elastic function. A script that was written for torchrun runs unchanged with --restart-on-change.
With --local the workers are processes of this machine, without Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

from spark_elastic.cli.script import find_target
from spark_elastic.launchers.java import starting_spark
from spark_elastic.launchers.session import is_connect
from spark_elastic.launchers.session_watch import find_end
from spark_elastic.worker.backends import BACKENDS

# The arguments of ``spark_elastic.run`` that are also options of this command: the type of each, and its help.
_SETTINGS: dict[str, tuple[type, str]] = {
    "min_np": (
        int,
        "the number of workers below which training waits (default: the lower limit of dynamic allocation; without that, "
        "--num-proc or else --max-np)",
    ),
    "max_np": (
        int,
        "the number of slots to request from Spark, and so the largest number of workers (default: the upper limit of dynamic "
        "allocation; without that, the cores that the cluster has now, divided by spark.task.cpus; with --local, what this "
        "machine has)",
    ),
    "num_proc": (int, "the number of workers to wait for before the first generation (default: that of --min-np)"),
    "start_timeout": (float, "how many seconds the job may take to get its first hosts (default 600)"),
    "elastic_timeout": (
        float,
        "how many seconds the job may take to get back to --min-np workers after a loss (default 600)",
    ),
    "hang_timeout": (
        float,
        "how many seconds a worker may spend in code without a collective or a state.heartbeat() while others wait for it, "
        "before it is replaced (default 300)",
    ),
    "reset_limit": (int, "how many resets failures may cause before the job fails (default: no limit)"),
    "replace_slow": (
        float,
        "a fraction, such as 0.1: a worker that computes rows at less than this fraction of the others' median speed leaves at "
        "the next commit (default: no worker leaves for being slow)",
    ),
    "backend": (str, f"{' or '.join(BACKENDS)} (default: nccl if every worker has a GPU of its own, else gloo)"),
    "network_interface": (
        str,
        "the interface that workers use among themselves (default: the one that reaches the driver)",
    ),
    "driver": (
        str,
        "where the driver of the job runs: client is this process, which the executors have to reach; cluster is a slot of the "
        "cluster (default client)",
    ),
    "driver_port": (int, "the port that the driver listens on (default: any free port)"),
    "checkpoint": (
        str,
        "a directory or URL, shared by all machines, to which commits are also written, and from whose newest complete "
        "checkpoint a later run resumes (default: none is written)",
    ),
    "checkpoint_interval": (float, "how many seconds pass between two writes to --checkpoint (default 60)"),
    "checkpoint_keep": (int, "how many of the newest undamaged checkpoints are kept (default 2)"),
    "checkpoint_best": (
        str,
        "the name of a metric that rank 0 gives to state.report: as many checkpoints with its best values are kept as newest; "
        "NAME:max or NAME:min says which values are better (default: only the newest are kept)",
    ),
    "host_discovery_script": (
        str,
        "an executable that prints the machines that may be used, one HOST or HOST:SLOTS per line, and runs every second "
        "(default: all machines may be used)",
    ),
    "event_log": (str, "a file to which events are appended as JSON lines (default: no file is written)"),
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a script on Spark executors, or on this machine",
        description=__doc__,
        allow_abbrev=False,  # a script's --epochs or --check must not be taken as an abbreviated option of this command
    )
    parser.add_argument("target", help="a script, or module:function")
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="argument",
        help="the target's own arguments; put those that begin with a dash after --",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, run as by python -m")
    for name, (kind, told) in _SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=told)
    parser.add_argument(
        "--local",
        action="store_true",
        help="train without Spark, in processes of this machine: one for each GPU, or for each core if there is no GPU",
    )
    parser.add_argument(
        "--master",
        help="the URL of Spark's master, or that of a Spark Connect server (sc://…); by default a local-cluster with one "
        "executor for each core",
    )
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a Spark setting")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable for the workers"
    )
    parser.add_argument(
        "--restart-on-change",
        action="store_true",
        help="start the script again whenever workers arrive or leave, like torchrun",
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        metavar="INT",
        help="with --restart-on-change, as in torchrun: how often failures of the script may restart it (default 3)",
    )
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="INT",
        help="as in torchrun: with --nnodes it gives the number of workers, which Spark, or --local, places",
    )
    parser.add_argument("--nnodes", metavar="MIN[:MAX]", help="as in torchrun (default 1)")
    parser.add_argument(
        "--elastic",
        action=argparse.BooleanOptionalAction,
        help="--no-elastic forms one world of --num-proc workers before the script starts, and runs all of it again after a loss",
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="whether to show progress; default only on a terminal"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome at the end, as JSON on standard output")
    parser.set_defaults(call=run, advice="; the target's own options come after --")


def run(options: argparse.Namespace) -> int:
    """Run the target as a job. Raises the job's errors."""
    with ending_at_ctrl_c():
        import spark_elastic
        from spark_elastic.worker.scripts import MAX_RESTARTS, RestartOnChange

    if options.local and (options.master is not None or options.conf):
        raise ValueError("--local trains without Spark, so it cannot be given together with --master or --conf")
    target = find_target(options.target, [*options.words, *options.arguments], is_module=options.module)
    call: Callable[[], object] = target
    restarts = options.max_restarts
    if restarts is not None and not options.restart_on_change:
        raise ValueError("--max-restarts needs --restart-on-change, which starts the script again")
    if restarts is not None and restarts < 0:
        raise ValueError(f"--max-restarts must be a whole number from 0 on, not {restarts}")
    if options.restart_on_change and (options.checkpoint is not None or options.checkpoint_best is not None):
        raise ValueError(
            "--checkpoint and --checkpoint-best keep what a State has committed, and a script that is started with "
            "--restart-on-change has none: it continues from its own checkpoints"
        )
    for name, value in torchrun_sizes(options.nproc_per_node, options.nnodes).items():
        if getattr(options, name) is not None:
            raise ValueError(f"give either --{name.replace('_', '-')} or torchrun's --nnodes and --nproc-per-node")
        setattr(options, name, value)
    if options.restart_on_change:
        call = RestartOnChange(
            cloudpickle.dumps(target), MAX_RESTARTS if restarts is None else restarts, target.folder, target.arguments
        )
    settings = {name: getattr(options, name) for name in (*_SETTINGS, "elastic") if getattr(options, name) is not None}
    begun = time.monotonic()
    session = make_session(options.master, pairs(options.conf, "--conf"))
    try:
        results = spark_elastic.run(
            call,
            spark=session,
            local=options.local,
            env=pairs(options.env, "--env"),
            progress=options.progress,
            **settings,
        )
    finally:
        if session is not None:
            end_session(session)
    if options.json:
        print(json.dumps({"workers": len(results), "seconds": round(time.monotonic() - begun, 3)}))
    return 0


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end this process at once, as long as nothing has been started: imports of torch swallow an exception."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the signal is ignored, as by nohup, or somebody else's
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def torchrun_sizes(nproc_per_node: str | None, nnodes: str | None) -> dict[str, int]:
    """Turn torchrun's options into sizes of the job; an empty dict if none is given. Raises ``ValueError``."""
    if nproc_per_node is None and nnodes is None:
        return {}
    each, (low, _, high) = nproc_per_node or "1", (nnodes or "1").partition(":")
    if not each.isdecimal() or int(each) < 1:
        raise ValueError(
            f"--nproc-per-node must be a number of workers, not {each!r}: which slots a machine has is Spark's to say "
            "(spark.executor.cores, spark.task.cpus, GPUs); with --local, leave it out for one worker a GPU or core"
        )
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"--nnodes must be a number or MIN:MAX, not {nnodes!r}")
    return {"min_np": int(low) * int(each), "max_np": int(high or low) * int(each)}


def is_connect_url(master: str) -> bool:
    """Whether this is the URL of a Spark Connect server."""
    return master.startswith("sc://")


def make_session(master: str | None, conf: dict[str, str]) -> Any:
    """Start Spark. Return None without a master and settings: ``spark_elastic.run`` then finds or makes a session."""
    if master is None and not conf:
        return None
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if master is not None and is_connect_url(master):
        builder = builder.remote(master)
    else:
        builder = builder.appName("spark_elastic").config("spark.ui.showConsoleProgress", "false")
        if master is not None:
            builder = builder.master(master)
            if master.startswith("local"):
                os.environ.setdefault("PYSPARK_PYTHON", conf.get("spark.pyspark.python", sys.executable))
    for name, value in conf.items():
        builder = builder.config(name, value)
    with starting_spark():
        return builder.getOrCreate()


def end_session(session: Any) -> None:
    """Stop Spark. A server that is gone is not tried again and again: by default, pyspark does so for minutes."""
    # Before Spark 4, nothing is asked of the server.
    if is_connect(session) and hasattr(session.client, "set_retry_policies") and find_end(session):
        session.client.set_retry_policies([])
    session.stop()


def pairs(given: list[str], option: str) -> dict[str, str]:
    """Return a dict of arguments of the form ``NAME=VALUE``. Raises ``ValueError``."""
    for each in given:
        if "=" not in each:
            raise ValueError(f"{option} must be NAME=VALUE, not {each!r}")
    return dict(each.split("=", 1) for each in given)
