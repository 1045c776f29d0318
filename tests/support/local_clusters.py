"""What tests take of a local cluster: its free seats, and the process that it has left for the next run."""

from __future__ import annotations

from spark_elastic.launchers.kept import KeptParent
from spark_elastic.launchers.local_cluster import LocalCluster


def numbers(cluster: LocalCluster, count: int) -> list[int]:
    """The seats that are free, which are taken then."""
    return [seat.number for _ in range(count) if (seat := cluster.acquire()) is not None]


def take(kept: KeptParent, cpus: int = 1) -> int:
    """Take a process as the next run does, which ends it when it is over; return its number."""
    parent = kept.take(cpus)
    parent.end()
    return parent.pid
