"""spark-elastic run script.py --min-np 2 --max-np 8 -- arguments: runs a script, or module:function, in every worker.

The script calls @elastic functions itself. One that was written for torchrun runs as it is with --restart-on-change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import cloudpickle

from spark_elastic.cli.script import find_target

# Settings of ``spark_elastic.run`` that are passed on when given.
_SETTINGS = {
    "min_np": int,
    "max_np": int,
    "num_proc": int,
    "start_timeout": float,
    "elastic_timeout": float,
    "hang_timeout": float,
    "reset_limit": int,
    "backend": str,
    "network_interface": str,
    "driver_port": int,
    "checkpoint": str,
    "checkpoint_interval": float,
    "host_discovery_script": str,
    "event_log": str,
}


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("run", help="run a script on Spark executors", description=__doc__)
    parser.add_argument("target", help="a script, or module:function; its own arguments follow after --")
    for name, kind in _SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    parser.add_argument("--master", help="Spark's; default a local-cluster of as many executors as there are cores")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark's")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the workers")
    parser.add_argument(
        "--restart-on-change",
        action="store_true",
        help="start the script anew whenever workers come or go, as torchrun",
    )
    parser.add_argument(
        "--elastic",
        action=argparse.BooleanOptionalAction,
        help="--no-elastic: one world of --num-proc workers around the whole script, which a loss runs again",
    )
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help="default: where there is a terminal")
    parser.add_argument("--json", action="store_true", help="say at the end how it went, as JSON on standard output")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run it; errors of the job are raised."""
    import spark_elastic
    from spark_elastic.restart import RestartOnChange

    call: Any = find_target(options.target, options.arguments)
    if options.restart_on_change:
        call = RestartOnChange(cloudpickle.dumps(call))
    settings = {name: getattr(options, name) for name in (*_SETTINGS, "elastic") if getattr(options, name) is not None}
    begun = time.monotonic()
    session = make_session(options.master, pairs(options.conf, "--conf"))
    try:
        results = spark_elastic.run(
            call, spark=session, env=pairs(options.env, "--env"), progress=options.progress, **settings
        )
    finally:
        if session is not None:
            session.stop()
    if options.json:
        print(json.dumps({"workers": len(results), "seconds": round(time.monotonic() - begun, 3)}))
    return 0


def make_session(master: str | None, conf: dict[str, str]) -> Any:
    """Start Spark; None where nothing was asked for, so that ``spark_elastic.run`` finds or makes its own."""
    if master is None and not conf:
        return None
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("spark_elastic").config("spark.ui.showConsoleProgress", "false")
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", conf.get("spark.pyspark.python", sys.executable))
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def pairs(given: list[str], option: str) -> dict[str, str]:
    """Take ``NAME=VALUE`` arguments apart."""
    for each in given:
        if "=" not in each:
            raise ValueError(f"{option} must be NAME=VALUE, not {each!r}")
    return dict(each.split("=", 1) for each in given)
