"""HostManager: who is there, and how long a bad place cools down."""

from __future__ import annotations

import pytest

from spark_elastic.driver.hosts import (
    COOLDOWN_LIMIT_SECONDS,
    COOLDOWN_SECONDS,
    FAILURES_OF_A_BAD_HOST,
    Host,
    HostManager,
    Place,
)


@pytest.fixture
def hosts() -> HostManager:
    manager = HostManager()
    manager.add(Host(0, 0, "a", Place("a", 1)))
    manager.add(Host(1, 1, "b", Place("b", 1)))
    return manager


def test_hosts_are_startable_in_the_order_in_which_they_came(hosts: HostManager) -> None:
    assert [host.host for host in hosts.startable(0.0)] == [0, 1]


def test_a_host_with_a_worker_is_not_startable(hosts: HostManager) -> None:
    hosts.get(0).worker = 7
    assert [host.host for host in hosts.startable(0.0)] == [1]


def test_a_draining_host_is_not_startable(hosts: HostManager) -> None:
    hosts.get(0).draining = True
    assert [host.host for host in hosts.startable(0.0)] == [1]
    assert hosts.next_ready_at(0.0) is None


def test_the_first_failure_costs_nothing(hosts: HostManager) -> None:
    hosts.worker_failed(Place("a", 1), 10.0, 10.0)
    assert len(hosts.startable(10.0)) == 2


def test_each_further_failure_costs_twice_the_time_up_to_a_limit(hosts: HostManager) -> None:
    hosts.worker_failed(Place("a", 1), 0.0, 0.0)
    pauses = []
    for _ in range(9):
        hosts.worker_failed(Place("a", 1), 100.0, 100.0)
        pauses.append(hosts.ready_at(Place("a", 1)) - 100.0)
    assert pauses[:3] == [COOLDOWN_SECONDS, 2 * COOLDOWN_SECONDS, 4 * COOLDOWN_SECONDS]
    assert pauses[-1] == COOLDOWN_LIMIT_SECONDS


def test_a_cooling_host_returns_by_itself(hosts: HostManager) -> None:
    for _ in range(2):
        hosts.worker_failed(Place("a", 1), 10.0, 10.0)
    assert [host.host for host in hosts.startable(10.0)] == [1]
    assert hosts.next_ready_at(10.0) == 10.0 + COOLDOWN_SECONDS
    assert len(hosts.startable(10.0 + COOLDOWN_SECONDS)) == 2
    assert hosts.next_ready_at(10.0 + COOLDOWN_SECONDS) is None


def test_the_record_outlives_the_host(hosts: HostManager) -> None:
    for _ in range(2):
        hosts.worker_failed(Place("a", 1), 10.0, 10.0)
    hosts.remove(0)
    hosts.add(Host(5, 0, "a", Place("a", 1)))
    assert [host.host for host in hosts.startable(10.0)] == [1]


def test_a_place_looks_at_fault_after_some_failures_in_a_row(hosts: HostManager) -> None:
    verdicts = [hosts.worker_failed(Place("a", 1), 0.0, 0.0) for _ in range(FAILURES_OF_A_BAD_HOST)]
    assert verdicts == [False] * (FAILURES_OF_A_BAD_HOST - 1) + [True]


def test_one_incident_that_ends_all_workers_of_a_place_counts_once(hosts: HostManager) -> None:
    verdicts = [hosts.worker_failed(Place("a", 1), 0.0, 5.0 + moment) for moment in (0.0, 0.0, 0.1, 0.2)]
    assert not any(verdicts)
    assert hosts.ready_at(Place("a", 1)) == 0.0
    hosts.worker_failed(Place("a", 1), 5.0, 9.0)
    assert hosts.ready_at(Place("a", 1)) == 9.0 + COOLDOWN_SECONDS, "those that were started afterwards fail again"


def test_progress_clears_the_record(hosts: HostManager) -> None:
    for _ in range(5):
        hosts.worker_failed(Place("a", 1), 0.0, 0.0)
    hosts.worker_progressed(Place("a", 1))
    assert hosts.worker_failed(Place("a", 1), 0.0, 0.0) is False
    assert len(hosts.startable(0.0)) == 2


def test_the_limit_holds_after_any_number_of_failures(hosts: HostManager) -> None:
    for _ in range(1100):
        hosts.worker_failed(Place("a", 1), 0.0, 0.0)
    assert hosts.ready_at(Place("a", 1)) == COOLDOWN_LIMIT_SECONDS


def test_places_are_told_apart(hosts: HostManager) -> None:
    for _ in range(5):
        hosts.worker_failed(Place("a", 1), 0.0, 0.0)
    assert hosts.ready_at(Place("b", 1)) == 0.0
