"""Stand-ins of cluster managers, driven by real Spark; see README.md here.

Tests marked ``long`` are not part of ``make test``, but of ``make test-clusters``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# What a stand-in or an application has started ends within this after both have been ended.
SETTLE_SECONDS = 15.0

# These JVMs live for a minute: a second compiler and a parallel collector cost them more than they bring on few cores.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
# In the environment of all that these tests start. A stand-in has to hand it on to what it starts.
MARK = "SPARK_ELASTIC_TEST_RUN"
os.environ[MARK] = uuid.uuid4().hex
TEMPORARY = Path(tempfile.mkdtemp(prefix="spark_elastic-clusters-"))
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)


def ours() -> list[psutil.Process]:
    """What these tests have started and has not ended, wherever it was re-parented to."""
    return [process for process in psutil.process_iter() if _is_ours(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no process may be there that was not there before."""
    before = set(ours())
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := set(ours()) - before:
        assert time.monotonic() < deadline, (
            f"left behind: {[(one.pid, one.cmdline()) for one in left if one.is_running()]}"
        )
        time.sleep(0.1)
