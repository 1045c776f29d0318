"""Which machines may be used: what a script prints, and who leaves or comes back by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_script import Script, running

from spark_elastic.driver import commands as do
from spark_elastic.driver import discovery
from spark_elastic.driver import events as ev
from spark_elastic.driver.discovery import HostDiscovery, parse_hosts
from spark_elastic.driver.hosts import Host, Place
from spark_elastic.driver.listing import HostListing
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


def test_a_script_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="not an executable file"):
        HostDiscovery(tmp_path / "hosts", lambda slots: None).__enter__()


def test_machines_that_were_never_listed_are_left_alone() -> None:
    listing = HostListing()
    listing.update({"a": None})
    assert listing.plan([Host(0, 0, "b", Place("b", 0)), Host(1, 1, "a", Place("a", 0))]) == ([], [])


def test_a_machine_is_known_by_its_name_its_short_name_or_its_address() -> None:
    hosts = [Host(0, 0, "a.net", "p"), Host(1, 1, "b", "p", address="10.0.0.1"), Host(2, 2, "c.net", "p")]
    listing = HostListing()
    listing.update({"a": None, "10.0.0.1": None, "c.net": None})
    listing.update({})
    assert listing.plan(hosts) == (hosts, [])


def list_hosts(script: Script, **slots: int | None) -> None:
    script.send(ev.HostsListed(slots))


def leave(script: Script) -> None:
    """The running world is interrupted, and goes on without those that drain."""
    before = script.generation
    script.obey_interrupt()
    assert script.generation == before + 1
    script.acknowledge()
    script.end_those_told()


def test_three_two_one_by_discovery_and_back() -> None:
    script = running("a", "a", "a")
    list_hosts(script, a=3)
    assert script.told[-1] == do.FormWorld(1, script.worlds[-1].members, 0)
    list_hosts(script, a=2)
    leave(script)
    assert script.ranks == [0, 1]
    list_hosts(script, a=1)
    leave(script)
    assert script.ranks == [0]
    list_hosts(script, a=3)
    newcomers = [worker for worker in script.processes if worker not in script.ranks]
    script.boot(*newcomers)
    script.pass_time(1.0)
    script.obey_interrupt(0)
    assert len(script.ranks) == 3
    assert script.ranks[0] == 0
    assert script.job.setbacks.resets == 0


def test_a_host_that_is_no_longer_listed_leaves_without_a_rollback_and_idles() -> None:
    script = running("a", "b")
    list_hosts(script, a=None, b=None)
    told = script.since(lambda: list_hosts(script, a=None))
    assert told.names() == ["InterruptWorld"]
    leave(script)
    assert script.ranks == [0]
    assert script.since(lambda: script.pass_time(5.0)).commands == []


def test_a_host_that_spark_takes_away_is_released_when_its_worker_has_left() -> None:
    script = running("a", "b")
    script.drain(1)
    told = script.since(lambda: leave(script))
    assert told.of(do.ReleaseTask) == [do.ReleaseTask(1)]
    assert script.since(lambda: script.pass_time(5.0)).of(do.ReleaseTask) == []


def test_a_machine_that_comes_back_unlisted_gets_no_worker() -> None:
    script = running("a", "b")
    list_hosts(script, a=None, b=None)
    list_hosts(script, a=None)
    leave(script)
    script.lose_host(1)
    assert script.worker_on(script.register("b")) is None
