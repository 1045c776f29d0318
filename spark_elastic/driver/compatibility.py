"""Decides which hosts can take part in a job, by what their tasks report: functions are pickled here and run there."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from spark_elastic.protocol.messages import HostFacts


def why_refuse(facts: HostFacts, others: Iterable[HostFacts] = ()) -> str:
    """Say why a host cannot run what the driver pickles, or not together with others; an empty string if it can.

    others: the hosts before it, if the job begins on them. A job that has begun goes on, without this refusal.
    """
    mine = platform.python_version()
    if _minor_version(facts.python) != _minor_version(mine):
        return (
            f"a task on {facts.name} runs Python {facts.python}, the driver {mine}: functions cannot travel between them. Set "
            "PYSPARK_PYTHON (spark.pyspark.python) to the same minor version everywhere"
        )
    if not facts.torch:
        return f"a task on {facts.name} has no torch: install it on all executors"
    for other in others:
        if _minor_version(other.torch) != _minor_version(facts.torch):
            return (
                f"a task on {facts.name} has torch {facts.torch}, one on {other.name} {other.torch}: workers of one job need "
                "the same minor version everywhere"
            )
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


def _minor_version(version: str) -> list[str]:
    """Return what two versions have in common that differ in their patch release or build alone: ``2.13.0+cpu`` is 2.13."""
    return version.partition("+")[0].split(".")[:2]
