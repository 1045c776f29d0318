"""The command as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spark_elastic
from spark_elastic.cli import main


def test_a_command_does_not_wait_for_imports_that_another_one_needs() -> None:
    code = "import sys, spark_elastic.cli; print({'torch', 'pyarrow', 'pyspark', 'pandas', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"spark-elastic {spark_elastic.__version__}\n"
