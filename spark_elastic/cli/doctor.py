"""spark-elastic doctor: finds what keeps jobs from running in a set-up, or harms them, and says what to do about it.

It looks at this machine and at the settings in spark-defaults.conf and --conf. With --master it also starts Spark, compares the
packages of the executors with those of the driver, and names hosts that compute much more slowly than the others. With --local it
looks only at what run(local=True) needs, which is neither Spark nor Java.
"""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import psutil

from spark_elastic._plain import plain
from spark_elastic.cli.run import is_connect_url, make_session, pairs
from spark_elastic.launchers.defaults import cores
from spark_elastic.launchers.gpus import find_gpus
from spark_elastic.launchers.java import Version, dotted, installed, judge_java, output_of
from spark_elastic.launchers.session import check_idle_timeout

# The packages that every worker needs.
_NEEDED = ("cloudpickle", "cryptography", "msgspec", "numpy", "psutil", "torch")

# Gloo opens this many descriptors for each other worker, and the rest of a worker at most this many in all. A limit that is too
# low for a job of FEW_WORKERS is worth a warning.
DESCRIPTORS_A_PEER = 4
OTHER_DESCRIPTORS = 500
FEW_WORKERS = 500

# How long each slot computes while its speed is measured. A CPU quota applies to periods of a tenth of a second.
PROBE_SECONDS = 0.5
# A host that is slower than this fraction of the others' median is named.
SLOW_HOST = 0.5


class Level(str, Enum):
    """How serious a finding is."""

    FINE = "fine"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check: what was found, and what to do if that is not fine."""

    level: Level
    topic: str
    what: str
    fix: str = ""


fine = partial(Diagnosis, Level.FINE)
warning = partial(Diagnosis, Level.WARNING)
fault = partial(Diagnosis, Level.FAULT)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="look for faults in the set-up", description=__doc__)
    parser.add_argument("--master", help="start Spark there and look at its executors, too")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a Spark setting")
    parser.add_argument("--local", action="store_true", help="look only at what run(local=True) needs")
    parser.add_argument("--driver-port", type=int, default=0, help="the port that run(driver_port=) is to use")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(call=examine)


def examine(options: argparse.Namespace) -> int:
    """Print the findings. Return 1 if one of them is a fault."""
    if options.local and (options.master or options.conf):
        raise ValueError(
            "--local examines what works without Spark, so it cannot be given together with --master or --conf"
        )
    findings = examine_local() if options.local else examine_spark(options)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            mark = {Level.FINE: "  ok     ", Level.WARNING: "? warning", Level.FAULT: "! FAULT  "}[finding.level]
            fix = f"\n            → {finding.fix}" if finding.fix else ""
            print(plain(f"{mark} {finding.topic}: {finding.what}{fix}"))
    return int(any(finding.level is Level.FAULT for finding in findings))


def examine_local() -> list[Diagnosis]:
    """Check what ``run(local=True)`` needs."""
    return [
        check_system(),
        check_descriptors("this machine", hard_descriptor_limit()),
        check_torch(),
        check_local(find_gpus(), cores()),
    ]


def examine_spark(options: argparse.Namespace) -> list[Diagnosis]:
    """Check what jobs on Spark need, and say what ``run(local=True)`` would train on."""
    if not 0 <= options.driver_port <= 65535:
        raise ValueError(f"--driver-port must be a port from 0 (any) to 65535, not {options.driver_port}")
    conf = {**spark_defaults(), **pairs(options.conf, "--conf")}
    master = options.master or conf.get("spark.master", "")
    spark = installed("pyspark")
    findings = [
        check_system(),
        check_descriptors("this machine", hard_descriptor_limit()),
        check_java(spark),
        *check_packages(spark),
        check_python(conf, master),
        *check_network(conf, master, options.driver_port),
        *check_gpus(conf, shutil.which("nvidia-smi") is not None),
        *check_settings(conf, master),
        check_local(find_gpus(), cores()),
    ]
    if options.master and not any(finding.level is Level.FAULT for finding in findings):
        findings += check_executors(options.master, conf)
    return findings


# ---------------------------------------------------------------- this machine


def check_system() -> Diagnosis:
    """Check the operating system."""
    what = f"{platform.system()}, Python {platform.python_version()}"
    if not sys.platform.startswith("linux"):
        return fault("system", what, "spark_elastic runs on Linux only")
    return fine("system", what)


def hard_descriptor_limit(_: int = 0) -> int:
    """Return how many files a process can have open once it has raised its own limit, as workers do."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def check_descriptors(where: str, limit: int) -> Diagnosis:
    """Check the limit of open files. A worker opens some for each other worker, and Python, torch and user code open more."""
    workers = max(limit - OTHER_DESCRIPTORS, 0) // DESCRIPTORS_A_PEER
    if limit == sys.maxsize:
        return fine("open files", f"{where}: no limit")
    what = f"{where}: {limit:,} for a process, which is enough for {workers:,} workers"
    if workers < FEW_WORKERS:
        return warning(
            "open files", what, "raise the hard limit of executors (ulimit -Hn, LimitNOFILE=, the container's)"
        )
    return fine("open files", what)


def check_local(gpus: Sequence[str], cores: int) -> Diagnosis:
    """Say what ``run(local=True)`` would train on."""
    places = f"{len(gpus)} GPUs" if gpus else f"{cores} cores"
    return fine("run(local=True)", f"trains on the {places} of this machine, without Spark or Java")


def check_torch() -> Diagnosis:
    """Check the version of torch."""
    return _package("torch", (2, 8), (3,), "pip install 'torch>=2.8'")


def check_java(spark: Version | None) -> Diagnosis:
    """Check whether the installed Spark supports the Java that pyspark starts."""
    what, fix = judge_java(spark)
    return fault("Java", what, fix) if fix else fine("Java", what)


def check_packages(spark: Version | None) -> list[Diagnosis]:
    """Check the versions of packages against each other."""
    found = [
        _package("pyspark", (3, 5), (5,), "pip install 'spark-elastic[spark]', or use the cluster's with PYTHONPATH")
    ]
    found += [check_torch()]
    arrow_least = (14, 0, 1) if spark is None or spark < (4, 1) else (15,) if spark < (4, 2) else (18,)
    petastorm = installed("petastorm")
    arrow_most = (15,) if petastorm else (999,)
    fix = f"pip install 'pyarrow>={dotted(arrow_least)}" + (",<15'" if petastorm else "'")
    if petastorm and arrow_least >= arrow_most:
        fix = "petastorm needs pyarrow<15, and this Spark a later one: pip install 'pyspark<4.1' 'pyarrow<15'"
    found.append(_package("pyarrow", arrow_least, arrow_most, fix))
    if petastorm:
        found += _check_petastorm(petastorm)
    return found


def _check_petastorm(version: Version) -> list[Diagnosis]:
    name = f"petastorm {dotted(version)}"
    fix = "pip install petastorm==0.12.1 'pyarrow>=14.0.1,<15' 'numpy<2' 'pandas<3' 'pyspark<4.1'"
    if version >= (0, 13):
        what = f"{name} loses rows in its thread pool, and needs an older setuptools than torch does"
        return [fault("petastorm", what, fix)]
    numpy, pandas = installed("numpy"), installed("pandas")
    for other, found, most in (("numpy", numpy, (2,)), ("pandas", pandas, (3,))):
        if found and found >= most:
            return [fault("petastorm", f"{name} does not work with {other} {dotted(found)}", fix)]
    return [fine("petastorm", name)]


def check_python(conf: Mapping[str, str], master: str) -> Diagnosis:
    """Check the Python that executors are configured to use, as far as this machine can run it."""
    name = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if not name and (not master or master.startswith("local")):
        return fine("Python", f"executors on this machine run what the driver runs, {sys.executable}")
    mine = platform.python_version()
    fix = f"set PYSPARK_PYTHON (or spark.pyspark.python) to {sys.executable}, or to a Python of the same version on executors"
    path = shutil.which(name or "python3")
    if path is None:
        return warning(
            "Python",
            f"executors run {name or 'python3'}, which is not on this machine and was not examined",
            "give --master to examine it on the executors",
        )
    program = (
        "import importlib.util as u, platform; print(platform.python_version(), "
        f"*[m for m in {(*_NEEDED, 'spark_elastic')!r} if u.find_spec(m) is None])"
    )
    said = output_of([path, "-c", program])
    what = f"executors run {path}" + ("" if name else " (PYSPARK_PYTHON is not set)")
    if not re.match(r"\d+\.\d+", said):
        return fault("Python", f"{what}, which cannot be run here: {said[:200]!r}", fix)
    version, *missing = said.split()
    what = f"{what}, Python {version}"
    if version.split(".")[:2] != mine.split(".")[:2]:
        return fault("Python", f"{what}; the driver runs {mine}: functions cannot travel between them", fix)
    if missing:
        return fault("Python", f"{what}, which lacks {', '.join(missing)}", f"install it there, or {fix}")
    return fine("Python", what)


def check_network(conf: Mapping[str, str], master: str, port: int) -> list[Diagnosis]:
    """Check whether the driver can listen, and whether executors on other machines could reach it."""
    found = []
    address = conf.get("spark.driver.bindAddress", "")
    where = f"{address or 'any address'}, port {port or 'any'}"
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
        found.append(fine("port", f"the driver can listen on {where}"))
    except OSError as error:
        fix = "choose another driver_port, or set spark.driver.bindAddress to an address of this machine"
        found.append(fault("port", f"the driver cannot listen on {where}: {error}", fix))
    given = conf.get("spark.driver.host") or os.environ.get("SPARK_LOCAL_HOSTNAME") or os.environ.get("SPARK_LOCAL_IP")
    host = given or socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        fix = "add it to DNS or /etc/hosts, or set spark.driver.host to an address that executors reach"
        return [*found, fault("host name", f"{host} does not resolve: {error}", fix)]
    what = f"{host} is {', '.join(addresses)}"
    if not master.startswith("local") and all(each.startswith("127.") or each == "::1" for each in addresses):
        others = _other_addresses()
        if given is None and others:
            return [
                *found,
                fine("host name", f"{what}; Spark takes another address of this machine: {', '.join(others)}"),
            ]
        fix = "set spark.driver.host to an address that executors reach (Debian's /etc/hosts gives 127.0.1.1)"
        return [*found, warning("host name", f"{what}: executors on other machines would connect to themselves", fix)]
    return [*found, fine("host name", what)]


def _other_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine by which others may reach it."""
    entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    addresses = [ipaddress.ip_address(entry.address) for entry in entries if entry.family == socket.AF_INET]
    return sorted(str(each) for each in addresses if not each.is_loopback and not each.is_link_local)


# ---------------------------------------------------------------- settings


def check_gpus(conf: Mapping[str, str], present: bool) -> list[Diagnosis]:
    """Check how many GPUs a worker gets."""
    amount = conf.get("spark.task.resource.gpu.amount")
    if amount is None:
        if present:
            fix = "set spark.task.resource.gpu.amount=1 and spark.executor.resource.gpu.amount, with a discovery script"
            return [warning("GPU", "this machine has GPUs, but tasks ask for none: workers train on CPUs", fix)]
        return []
    fix = "set spark.task.resource.gpu.amount=1"
    if float(amount) > 1:
        return [fault("GPU", f"tasks ask for {amount} GPUs, a worker uses one", f"{fix} and run more workers")]
    if float(amount) < 1:
        what = f"tasks ask for {amount} GPUs: several workers share one, and communicate over gloo instead of nccl"
        return [warning("GPU", what, fix)]
    return [fine("GPU", "one for each task")]


def check_settings(conf: Mapping[str, str], master: str) -> list[Diagnosis]:
    """Look for Spark settings that keep lost workers from being replaced, or that end workers."""
    excluding = [
        f"{name}{which}.enabled"
        for name in ("spark.excludeOnFailure", "spark.blacklist")
        for which in ("", ".application", ".taskAndStage")
        if _is_on(conf, f"{name}{which}.enabled")
    ]
    unbounded = _is_on(conf, "spark.dynamicAllocation.enabled") and "spark.dynamicAllocation.maxExecutors" not in conf
    cores, cpus = (float(conf.get(name, "1")) for name in ("spark.executor.cores", "spark.task.cpus"))
    by_default = not any(name.startswith("spark.executor.memoryOverhead") for name in conf)
    found = []
    if excluding:
        what = (
            f"{', '.join(excluding)} is on: for an hour Spark uses no executor again on which a few workers have died"
        )
        found.append(
            fault("settings", what, "unset it: spark_elastic itself waits before it uses such an executor again")
        )
    if _is_on(conf, "spark.speculation"):
        what = "spark.speculation is on: workers run for long, so Spark starts duplicates of their tasks, which idle in slots"
        found.append(warning("settings", what, "unset spark.speculation"))
    if conf.get("spark.executor.pyspark.memory"):
        what = "spark.executor.pyspark.memory limits the address space of workers, of which torch reserves far more than it uses"
        found.append(warning("settings", what, "unset it and raise spark.executor.memoryOverhead"))
    try:
        check_idle_timeout(conf, "spark.python.worker")
    except ValueError as error:
        what, _, how = str(error).rpartition(": ")
        found.append(fault("settings", what, how))
    if unbounded:
        what = "dynamic allocation has no upper limit, so run() cannot tell how many workers there may be"
        found.append(warning("settings", what, "set spark.dynamicAllocation.maxExecutors, or give max_np"))
    if "spark.executor.cores" in conf and cores < cpus:
        what = f"spark.task.cpus={cpus:g} is more than spark.executor.cores={cores:g}: no task ever starts"
        found.append(fault("settings", what, "raise spark.executor.cores"))
    if master.startswith(("yarn", "k8s")) and by_default:
        what = "workers use spark.executor.memoryOverhead, by default a tenth of the executor's memory; beyond it they are killed"
        found.append(warning("settings", what, "set spark.executor.memoryOverhead to what a worker needs, say 4g"))
    return found or [fine("settings", "none of them does harm")]


# ---------------------------------------------------------------- executors


def check_executors(master: str, conf: dict[str, str]) -> list[Diagnosis]:
    """Start Spark and have a task in each slot look at its executor."""
    if is_connect_url(master):
        what = "executors of Spark Connect are not looked at: doctor needs a session that starts tasks by itself"
        return [warning("executors", what, "run doctor beside the server, with the server's own master")]
    try:
        session = make_session(master, conf)
    except Exception as error:
        return [fault("Spark", f"it does not start with master {master}: {_line(error)}", "see Spark's log above")]
    try:
        context = session.sparkContext
        tasks = max(context.defaultParallelism, 1)
        facts = context.parallelize(range(tasks), tasks).map(_facts).collect()
        limits = context.parallelize(range(tasks), tasks).map(hard_descriptor_limit).collect()
        found = [*compare(facts, _facts(0)), check_descriptors("executors", min(limits))]
        # Where numpy is missing, nothing can be measured.
        if not any(finding.level is Level.FAULT for finding in found):
            found += compare_speeds(context.parallelize(range(tasks), tasks).map(measure_speed).collect())
    except Exception as error:
        fix = "executors need spark_elastic and its packages, and the Python version of the driver"
        return [fault("executors", _line(error), fix)]
    finally:
        session.stop()
    return found


def compare(executors: Iterable[Mapping[str, str]], driver: Mapping[str, str]) -> list[Diagnosis]:
    """Compare the versions on executors with those on the driver."""
    found = []
    for facts in {each["host"]: each for each in executors}.values():
        for name, mine in driver.items():
            theirs = facts.get(name, "")
            if name != "host" and theirs != mine:
                level = Level.FAULT if not theirs or name == "spark-elastic" else Level.WARNING
                what = f"{facts['host']} has {name} {theirs or 'not at all'}, the driver {mine}"
                found.append(Diagnosis(level, "executors", what, f"install {name} {mine} there"))
    return found or [fine("executors", "they have the same packages as the driver")]


def measure_speed(_: int = 0, seconds: float = PROBE_SECONDS) -> tuple[str, float]:
    """Return this host's name, and how many small matrix products per second one process computes here."""
    import numpy as np

    matrix = np.ones((128, 128), np.float32)
    matrix @ matrix  # the first product starts the threads of the library
    count, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        np.dot(matrix, matrix)
        count += 1
    return socket.gethostname(), count / passed


def compare_speeds(measured: Iterable[tuple[str, float]]) -> list[Diagnosis]:
    """Name the hosts that compute much more slowly than the others. ``measured`` holds the host and speed of each slot."""
    slots = defaultdict(list)
    for host, speed in measured:
        slots[host].append(speed)
    speeds = {host: statistics.median(each) for host, each in slots.items()}
    if len(speeds) == 1:
        return [fine("speed", f"all executors are on {next(iter(speeds))}, so there is nothing to compare")]
    found = []
    for host, speed in speeds.items():
        usual = statistics.median(other for name, other in speeds.items() if name != host)
        if speed < SLOW_HOST * usual:
            what = (
                f"{host} takes {usual / speed:.1f} times as long as the median of the other hosts for the same products"
            )
            fix = (
                "see what else runs there, and whether its CPUs are throttled: each step of training is as slow as the slowest "
                'worker. balance="auto" on the loader gives that worker fewer rows, and run(replace_slow=) replaces it'
            )
            found.append(warning("speed", what, fix))
    return found or [fine("speed", f"of {len(speeds)} hosts none takes twice as long as the others")]


def _facts(_: int) -> dict[str, str]:
    names = (*_NEEDED, "spark-elastic")
    versions = {name: dotted(installed(name) or ()) for name in names}
    return {"host": socket.gethostname(), "Python": platform.python_version(), **versions}


# ---------------------------------------------------------------- small things


def spark_defaults() -> dict[str, str]:
    """Return the settings of the spark-defaults.conf that Spark would read."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (home and os.path.join(home, "conf"))
    path = Path(folder or ".", "spark-defaults.conf")
    if not folder or not path.is_file():
        return {}
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    entries = (re.split(r"\s*=\s*|\s+", line, maxsplit=1) for line in lines if line and not line.startswith("#"))
    return {entry[0]: entry[1] for entry in entries if len(entry) == 2}


def _package(name: str, least: Version, below: Version, fix: str) -> Diagnosis:
    version = installed(name)
    if version is None:
        return fault(name, "is not installed", fix)
    if not least <= version < below:
        what = f"{dotted(version)}, but {dotted(least)} or later" + (
            f" and below {dotted(below)}" if below < (999,) else ""
        )
        return fault(name, f"{what} is needed here", fix)
    return fine(name, dotted(version))


def _is_on(conf: Mapping[str, str], name: str) -> bool:
    return conf.get(name, "").lower() == "true"


def _line(error: BaseException) -> str:
    """Return what tells most about an error: the innermost cause, if its text has the stack of a JVM or of Python."""
    lines = [line.strip().removeprefix(": ").removeprefix("Caused by: ") for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("at ", "..."))]
    telling = [line for line in said if re.match(r"[\w.$]+(Error|Exception)\b|\[?\w+MISMATCH", line)]
    return (telling[-1] if telling else said[0] if said else type(error).__name__)[:300]
