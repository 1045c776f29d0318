"""Which Java Spark would start, and the error of a session that fails to start for lack of a supported Java."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from spark_elastic.errors import SparkElasticError

ASK_SECONDS = 60.0

Version = tuple[int, ...]


def judge_java(spark: Version | None) -> tuple[str, str]:
    """Return which Java this Spark would start, and what to do about it; empty if Spark supports it."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    wanted = "17 or 21" if spark is None or spark >= (4,) else "8, 11 or 17"
    fix = (
        "install Java 17 (Debian: apt-get install openjdk-17-jre-headless) and let JAVA_HOME point to it; run(local=True) needs "
        "no Java (doctor --local)"
    )
    if java is None or not os.path.exists(java):
        return f"{java or 'java'} does not exist", fix
    said = output_of([java, "-version"])
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None:
        return f"{java} does not say its version: {said[:200]!r}", fix
    what = f"{java} is Java {found[1]}"
    least, most = (17, 99) if spark is None or spark >= (4,) else (8, 17)
    if not least <= int(found[1]) <= most:
        name = f"Spark {dotted(spark)}" if spark else "Spark 4"
        return f"{what}, {name} needs {wanted}", fix
    return what, ""


@contextmanager
def starting_spark() -> Iterator[None]:
    """Raise ``SparkElasticError`` if Spark does not start here and Java may be why: py4j only says that its gateway exited."""
    try:
        yield
    except Exception as error:
        what, fix = judge_java(installed("pyspark"))
        if not fix:
            raise
        raise SparkElasticError(f"Spark does not start: {what}; {fix}") from error


def installed(name: str) -> Version | None:
    """Return the numeric part of a package's version; None if the package is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(name).partition("+")[0])[:3]))
    except importlib.metadata.PackageNotFoundError:
        return None


def dotted(version: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def output_of(command: list[str]) -> str:
    """Return the output of a short command, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr
