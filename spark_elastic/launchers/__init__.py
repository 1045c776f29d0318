"""Launchers, which give a job the slots in which its tasks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spark_elastic.launchers.base import Launcher
from spark_elastic.launchers.connect import ConnectLauncher
from spark_elastic.launchers.local import LocalLauncher
from spark_elastic.launchers.spark import SparkLauncher

# The launchers by name. Each takes the user's ``spark`` argument of ``run`` (``connect`` is for sessions of Spark Connect) or
# the ``local`` argument. Those of Spark also take the resources of a task.
LAUNCHERS: Mapping[str, Callable[..., Launcher]] = {
    "spark": SparkLauncher,
    "connect": ConnectLauncher,
    "local": LocalLauncher,
}
