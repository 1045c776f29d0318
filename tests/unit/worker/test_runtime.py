"""What turns a process into a worker."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
from spark_elastic.worker.runtime import prepare_process

prepare_process()
ours = logging.getLogger("spark_elastic")
ours.warning("one")
ours.info("not shown")
logging.basicConfig(level=logging.INFO, format="MINE %(message)s")
logging.info("two")
ours.warning("three")
"""


def test_logging_is_for_user_code_to_configure_and_until_then_our_warnings_say_whose_they_are() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["spark_elastic: one", "MINE two", "MINE three"]
