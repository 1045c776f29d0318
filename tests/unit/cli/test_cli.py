"""The command as a whole."""

from __future__ import annotations

import subprocess
import sys


def test_a_command_does_not_wait_for_imports_that_another_one_needs() -> None:
    code = "import sys, spark_elastic.cli; print({'torch', 'pyarrow', 'pyspark', 'pandas', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
