"""timeline: which run is drawn, where to, and what is said of it; tests/unit/timeline has what the page shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
import story

from spark_elastic.cli import main


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of two runs, in the working directory: the later one is named "efgh"."""
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps(event) + "\n" for event in story.killed())
    path = tmp_path / "events.jsonl"
    path.write_text(text + text.replace("abcd", "efgh"))
    return path


def test_without_a_name_the_page_is_written_here_and_the_command_says_so(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(log)]) == 0
    assert capsys.readouterr().out == "timeline.html written\n"
    assert "efgh" in (log.parent / "timeline.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["out.html", "out.png"])
def test_timeline_writes_what_the_name_says(name: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = log.parent / name
    assert main(["timeline", str(log), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(output)
    assert output.read_bytes()[:4] == (b"\x89PNG" if name.endswith("png") else b"<!DO")


def test_paths_that_the_shell_leaves_alone_may_begin_with_a_tilde(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(log.parent))
    monkeypatch.chdir("/")
    assert main(["timeline", f"~/{log.name}", "--output=~/page.html"]) == 0
    assert (log.parent / "page.html").is_file()


def test_of_several_runs_the_one_that_is_named_is_drawn(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(log), "--run", "abcd", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["output"], facts["run_id"]) == ("timeline.html", "abcd")
    page = (log.parent / "timeline.html").read_text(encoding="utf-8")
    assert "abcd" in page
    assert "efgh" not in page


def test_lines_that_could_not_be_read_are_told_of_beside_the_page(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.open("a") as file:
        file.write("half of a li\n{}\n")
    number = 2 * len(story.killed()) + 1
    assert main(["timeline", str(log)]) == 0
    written, told = capsys.readouterr().out.splitlines()
    assert written == "timeline.html written"
    assert told.startswith(f"2 lines of the log could not be read; the first: line {number}: not an event")


def test_a_page_that_is_served_tells_its_address_as_json_and_opens_no_browser_unasked(log: Path) -> None:
    browser = log.parent / "browser"
    browser.write_text(f"#!/bin/sh\ntouch {log.parent}/opened\n")
    browser.chmod(0o755)
    command = [sys.executable, "-m", "spark_elastic.cli", "timeline", str(log), "--serve", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": str(browser)}
    ) as serving:
        try:
            assert serving.stdout is not None
            address = json.loads(serving.stdout.readline())["address"]
            with urllib.request.urlopen(address) as answer:
                assert "efgh" in answer.read().decode()
        finally:
            serving.terminate()
        assert serving.stdout.read() == ""
        assert serving.wait() == 0
    assert not (log.parent / "opened").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_and_ends_when_it_is_told_to(
    number: signal.Signals, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_and_end(address: str) -> None:
        opened.append(address)
        os.kill(os.getpid(), number)

    def end_nobody(number: int, frame: object) -> None:
        raise AssertionError("the command has left SIGTERM to what would have ended this process")

    opened: list[str] = []
    usual = signal.signal(signal.SIGTERM, end_nobody)
    # Pyspark leaves a handler of its own behind.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(webbrowser, "open", look_and_end)
    try:
        assert main(["timeline", str(log), "--serve", "--open"]) == 0
        assert capsys.readouterr().out == f"{opened[0]}\nCtrl-C ends this command.\n"
        assert signal.getsignal(signal.SIGTERM) is end_nobody
    finally:
        signal.signal(signal.SIGTERM, usual)
        signal.signal(signal.SIGINT, interrupt)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_in_one_sentence(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    make(log)
    assert main(["timeline", str(log), "--serve"]) == 2
    assert capsys.readouterr().err == (
        f"spark-elastic: {log} is not a regular file: --serve follows one, or waits until there is one\n"
    )


def test_a_port_in_use_is_one_sentence(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["timeline", str(log), "--serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"spark-elastic: port {port} is in use: give --port another, or leave it out for a free one\n"
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--serve", "--port", "70000"], "--port must be a port, or 0 for a free one, not 70000"),
        (["--serve", "-o", "x.html"], "--serve writes no file"),
        (["--port", "80"], "--port and --open are for --serve"),
        (["--open"], "--port and --open are for --serve"),
        (["-o", "x.pdf"], "--output must end in .html or .png"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], complaint: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(log), *options]) == 2
    assert complaint in capsys.readouterr().err
