"""Why Spark gave up a slot: the most telling line of what Spark says, and whether another try may help."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from spark_elastic.launchers.spark_task import SlotConfigurationError
from spark_elastic.protocol.ticket import Ticket

# For the log, with the slot, the reason and the pause in seconds.
GAVE_UP = "Spark gave up slot %d (%s); it is submitted again in %.1f s"

# The names of exceptions in Java and Scala begin like this.
_OF_JAVA = ("java.", "org.", "scala.")


def find_reason(story: Sequence[str]) -> str:
    """Return the most telling line of a failure and its causes: the last Python exception, if there is one."""
    lines = [line.strip() for text in story for line in text.splitlines()]
    python = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line) and not line.startswith(_OF_JAVA)]
    # An error of gRPC begins with a line that says only what it is.
    remote = re.findall(r'^\s*details = "(.+)"$', "\n".join(story), re.MULTILINE)
    return (python or remote or [first_line(text) for text in story])[-1][:500]


def first_line(said: str) -> str:
    """Return the first line of an error. An error of py4j begins with one that says only which call has failed."""
    return re.sub(r"^An error occurred while calling \S+(\n: | Trace:\n)", "", said.strip()).split("\n")[0]


def find_hopeless(reason: str, python: str = "the Python") -> str:
    """Say why another try cannot help if all executors are alike; empty if it may.

    python: the Python that executors were told to run, if known.
    """
    if versions := re.search(
        r"Python in worker has different version:? (\S+) than that in driver:? ([\d.]+\d)", reason
    ):
        theirs, mine = versions.groups()
        return (
            f"executors run Python {theirs}, the driver {mine}: functions cannot travel between them. Set PYSPARK_PYTHON "
            "(spark.pyspark.python) to the same minor version everywhere"
        )
    if re.search(r"No module named '(spark_elastic|torch|msgspec|cryptography|psutil|cloudpickle)", reason):
        return (
            f"executors cannot run spark_elastic: {python} there says {reason}. Before the session is made, set PYSPARK_PYTHON "
            f"(spark.pyspark.python) to a Python that has spark_elastic and its packages, as {sys.executable} has here. Or "
            "install there what is missing, or ship it (--py-files, --archives; in Spark Connect spark.addArtifacts)"
        )
    if sizes := re.search(r"Serialized task \S+ was (\d+) bytes, which exceeds max allowed: \S+ \((\d+)", reason):
        size, limit = (int(found) / 2**20 for found in sizes.groups())
        return (
            f"the function and its arguments are too large for Spark: one of the tasks that carry them has {size:.0f} MiB, and "
            f"spark.rpc.message.maxSize allows {limit:.0f} MiB. Write large data to storage and give its URL, or raise that "
            "setting before the session is made"
        )
    return reason if SlotConfigurationError.__name__ in reason else ""


def never_registered(ticket: Ticket) -> str:
    """Return the likely reason if a slot's task ended without an error and the driver has never heard from it."""
    addresses = ", ".join(f"{host}:{port}" for host, port in ticket.addresses)
    return f"its task ended without registering at the driver; can executors reach it at {addresses}"
