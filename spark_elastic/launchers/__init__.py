"""Launchers: who gives a job the slots that its tasks run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_elastic.launchers.base import Launcher
from spark_elastic.launchers.connect import ConnectLauncher
from spark_elastic.launchers.local import LocalLauncher
from spark_elastic.launchers.spark import SparkLauncher

# By name; each takes what the user has given to ``run`` as ``spark`` (a session of Spark Connect: ``connect``) or ``local``.
LAUNCHERS: Mapping[str, Callable[[Any], Launcher]] = {
    "spark": SparkLauncher,
    "connect": ConnectLauncher,
    "local": LocalLauncher,
}
