"""The command as a whole."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spark_elastic
from spark_elastic.cli import COMMANDS, main
from spark_elastic.driver.event_log import EventLog, LogFile
from spark_elastic.protocol.records import JobFailed, JobStarted


def test_a_command_does_not_wait_for_imports_that_another_one_needs() -> None:
    code = "import sys, spark_elastic.cli; print({'torch', 'pyarrow', 'pyspark', 'pandas', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    commands = argparse.ArgumentParser(prog="spark-elastic").add_subparsers()
    for module in COMMANDS:
        module.add_to(commands)
    return dict(commands.choices)


@pytest.mark.parametrize("name", parsers())
def test_every_argument_of_a_command_says_what_it_is(name: str) -> None:
    parser = parsers()[name]
    assert [action.dest for action in parser._actions if not action.help] == []
    assert parser.format_help(), "and argparse can write it, also where it has a percent sign"


def test_the_options_of_run_tell_the_defaults_of_the_function() -> None:
    told = {action.dest: action.help or "" for action in parsers()["run"]._actions}
    for name, parameter in inspect.signature(spark_elastic.run).parameters.items():
        default = parameter.default
        if name in told and default is not None and not isinstance(default, bool) and name != "env":
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert told[name].endswith(f"(default {shown})"), name


def test_a_command_whose_reader_has_seen_enough_ends_without_a_word(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "spark_elastic.cli", "doctor", "--local"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_an_output_cannot_show_is_escaped(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with EventLog(LogFile(log)) as events:
        events.record(JobStarted("a", 1, 1, 1, None, "app"))
        events.record(JobFailed("ValueError", "grün"))
    done = subprocess.run(
        [sys.executable, "-m", "spark_elastic.cli", "summary", str(log)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "gr\\xfcn" in done.stdout


def test_a_command_without_an_output_does_its_work() -> None:
    """A job that had succeeded was reported as failed."""
    command = f"{sys.executable} -m spark_elastic.cli doctor --local >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", [OSError, subprocess.SubprocessError])
def test_secrets_of_a_url_that_a_library_repeats_are_not_printed(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(options: argparse.Namespace) -> int:
        raise kind("403, url='http://h/z?sig=S3CRET'")

    monkeypatch.setattr("spark_elastic.cli.inspect.inspect", refuse)
    assert main(["inspect", "zip://x::http://me:S3CRET@h/z?sig=S3CRET"]) == 2
    assert "403, url='http://h/z?sig=…'" in capsys.readouterr().err


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def call(options: argparse.Namespace) -> int:
        raise BrokenPipeError("the cluster has closed the connection")

    monkeypatch.setattr("spark_elastic.cli.doctor.examine", call)
    assert main(["doctor"]) == 2
    assert "the cluster has closed the connection" in capfd.readouterr().err
