"""Launchers: who gives a job the slots that its tasks run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spark_elastic.launchers.base import Launcher
from spark_elastic.launchers.connect import ConnectLauncher
from spark_elastic.launchers.local import LocalLauncher
from spark_elastic.launchers.spark import SparkLauncher

# By name; each takes what the user has given to ``run`` as ``spark`` (a session of Spark Connect: ``connect``) or ``local``, and
# those of Spark what the user wants tasks to be given.
LAUNCHERS: Mapping[str, Callable[..., Launcher]] = {
    "spark": SparkLauncher,
    "connect": ConnectLauncher,
    "local": LocalLauncher,
}
