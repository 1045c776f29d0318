"""A missing or too old Java: whoever starts Spark says what ``spark-elastic doctor`` says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers import java
from spark_elastic.launchers.java import starting_spark

# In a process of its own, in which no session of another test is active.
STARTERS = """
import sys

import spark_elastic
from spark_elastic.cli import main
from spark_elastic.estimator import TorchEstimator

def load():
    TorchEstimator.load("nowhere")

for start in (lambda: spark_elastic.run(print), load):
    try:
        start()
    except spark_elastic.SparkElasticError as error:
        print(error, file=sys.stderr)
sys.exit(main(["run", "--master", "local[1]", "script.py"]))
"""


def fake_java(folder: Path, version: str) -> Path:
    folder.mkdir()
    path = folder / "java"
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit 1\n")
    path.chmod(0o755)
    return path


def test_run_the_command_and_load_tell_of_a_java_that_spark_does_not_support(tmp_path: Path) -> None:
    path = fake_java(tmp_path / "bin", "1.7.0_80")
    (tmp_path / "script.py").touch()
    environment = {**os.environ, "JAVA_HOME": str(tmp_path)}
    environment.pop("SPARK_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", STARTERS], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    sentences = [line for line in done.stderr.splitlines() if "Spark does not start: " in line]
    assert done.returncode == 2
    assert len(sentences) == 3
    assert sentences[2].startswith(f"spark-elastic: Spark does not start: {path} is Java 7, Spark ")
    assert all("needs " in line and "; install Java 17 (Debian" in line for line in sentences)


def test_a_missing_java_is_told_beside_the_error_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    cause = RuntimeError("JAVA_GATEWAY_EXITED")
    with pytest.raises(SparkElasticError, match=r"/nowhere/bin/java does not exist; install Java 17") as raised:  # noqa: SIM117
        with starting_spark():
            raise cause
    assert raised.value.__cause__ is cause


def test_with_a_java_that_spark_supports_its_own_error_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "bin", "17.0.9")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(java, "installed", lambda name: (4, 3, 0))
    with pytest.raises(RuntimeError, match=r"^the port is taken$"), starting_spark():
        raise RuntimeError("the port is taken")
