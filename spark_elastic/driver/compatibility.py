"""Decides which hosts can take part in a job, by what their tasks report: functions are pickled here and run there."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from spark_elastic.protocol.messages import HostFacts


def why_refuse(facts: HostFacts) -> str:
    """Say why a host cannot run what the driver pickles; an empty string if it can."""
    mine = platform.python_version()
    if facts.python.split(".")[:2] != mine.split(".")[:2]:
        return (
            f"a task on {facts.name} runs Python {facts.python}, the driver {mine}: functions cannot travel between them. Set "
            "PYSPARK_PYTHON (spark.pyspark.python) to the same minor version everywhere"
        )
    if not facts.torch:
        return f"a task on {facts.name} has no torch: install it on all executors"
    return ""


def why_warn(facts: HostFacts, others: Iterable[HostFacts]) -> str:
    """Say what differs between a host and the hosts before it; an empty string if nothing does."""
    versions = {other.torch for other in others} - {facts.torch}
    if not versions:
        return ""
    return (
        f"a task on {facts.name} has torch {facts.torch}, others have {', '.join(sorted(versions))}; install the same "
        "everywhere"
    )
