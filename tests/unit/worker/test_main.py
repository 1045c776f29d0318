"""A worker's process before it runs user code."""

from __future__ import annotations

import subprocess
import sys

RAISE_THE_LIMIT = """
import resource
from spark_elastic.worker.runtime import _allow_all_descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
_allow_all_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_worker_may_open_as_many_files_as_its_host_allows() -> None:
    run = subprocess.run([sys.executable, "-c", RAISE_THE_LIMIT], capture_output=True, text=True, timeout=120)
    assert run.stdout == "(200, 200)\n", run.stderr[-2000:]
