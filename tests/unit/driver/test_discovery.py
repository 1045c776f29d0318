"""Which machines a script names, and what is wrong with a script that names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.driver import discovery
from spark_elastic.driver.discovery import HostDiscovery, parse_hosts
from spark_elastic.errors import DiscoveryError


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a\nb:2\n\n  c  \n", {"a": None, "b": 2, "c": None}),
        (
            "10.0.0.1:3\nfe80::1\n[fe80::2]:4\n[fe80::3]",
            {"10.0.0.1": 3, "fe80::1": None, "fe80::2": 4, "fe80::3": None},
        ),
        ("a:0", {"a": 0}),
        ("", {}),
    ],
)
def test_a_list_of_hosts_is_read(text: str, slots: dict[str, int | None]) -> None:
    assert parse_hosts(text) == slots


@pytest.mark.parametrize("text", ["a b", "a:two", ":3", "a:-1"])
def test_what_is_no_list_of_hosts_is_refused_by_its_line(text: str) -> None:
    with pytest.raises(DiscoveryError, match="not '"):
        parse_hosts(f"good\n{text}\n")


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("body", "message"), [("echo oops >&2; exit 3", "failed with code 3: oops"), ("echo a b", "not 'a b'")]
)
def test_a_first_run_that_fails_is_an_error(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        HostDiscovery(script(tmp_path / "hosts", body), lambda slots: None).__enter__()


@pytest.mark.parametrize("body", ["sleep 60", r"printf '\377'"], ids=["too slow", "no text"])
def test_a_run_that_failed_is_not_ended_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Its number may be another process's by then."""
    monkeypatch.setattr(discovery, "SCRIPT_SECONDS", 0.2)
    hosts = HostDiscovery(script(tmp_path / "hosts", body), lambda slots: None)
    with pytest.raises((DiscoveryError, UnicodeDecodeError)):
        hosts._ask()
    assert hosts._process is None


def test_a_script_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "hosts", "echo a:2")
    monkeypatch.setenv("HOME", str(tmp_path))
    listed: list[object] = []
    with HostDiscovery("~/hosts", listed.append):
        assert listed == [{"a": 2}]


def test_a_script_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="not an executable file"):
        HostDiscovery(tmp_path / "hosts", lambda slots: None).__enter__()
