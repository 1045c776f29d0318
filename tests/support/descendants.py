"""Tells what tests have started, and where their temporary files go. Importing this marks the process that runs the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import psutil

# In the environment of all that these tests start: every descendant inherits it, wherever it is re-parented to.
MARK = "SPARK_ELASTIC_TEST_RUN"
os.environ[MARK] = uuid.uuid4().hex
# Temporary files of these tests, of their executors and workers, so that those left behind are told from other people's.
TEMPORARY = Path(tempfile.mkdtemp(prefix="spark_elastic-tests-"))
os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
# These JVMs live for minutes: a second compiler and a parallel collector cost them more than they bring on few cores.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def descendants() -> list[psutil.Process]:
    """What has been started from this process, on this machine, and lives."""
    return [process for process in psutil.process_iter() if _is_ours(process)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        if process.pid == os.getpid() or process.environ().get(MARK) != os.environ[MARK]:
            return False
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
