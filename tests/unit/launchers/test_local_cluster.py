"""The seats of a cluster on this machine: who gets which, what is taken away and given back, and what becomes of its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_clusters import numbers, take

from spark_elastic.launchers.kept import KeptParent
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.launchers.slot_process import SlotParent
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket


def test_a_cluster_has_so_many_seats_and_no_more() -> None:
    cluster = LocalCluster(2)
    assert numbers(cluster, 3) == [0, 1]


def test_a_seat_is_free_again_when_nothing_runs_there() -> None:
    cluster = LocalCluster(2)
    first, _ = cluster.acquire(), cluster.acquire()
    assert first is not None
    cluster.release(first)
    assert numbers(cluster, 2) == [0]


def test_taken_seats_go_first_from_the_highest_on_and_their_slots_have_to_leave() -> None:
    cluster = LocalCluster(3)
    taken = [cluster.acquire(), cluster.acquire()]
    cluster.take_away(1)
    assert [seat is not None and seat.leave_by is not None for seat in taken] == [False, True]
    assert cluster.slots == 2
    cluster.take_away(2)
    assert cluster.slots == 0
    assert numbers(cluster, 1) == []


def test_a_seat_that_was_taken_away_is_not_free_when_it_is_left_until_it_is_given_back() -> None:
    cluster = LocalCluster(1)
    seat = cluster.acquire()
    assert seat is not None
    cluster.take_away()
    cluster.release(seat)
    assert numbers(cluster, 1) == []
    cluster.give_back()
    assert numbers(cluster, 1) == [0]


def test_a_seat_that_is_given_back_before_it_was_left_is_free_when_it_is() -> None:
    cluster = LocalCluster(1)
    seat = cluster.acquire()
    assert seat is not None
    cluster.take_away()
    cluster.give_back()
    assert numbers(cluster, 1) == []
    cluster.release(seat)
    assert numbers(cluster, 1) == [0]


def test_more_than_there_is_cannot_be_taken_or_given_back() -> None:
    cluster = LocalCluster(1)
    with pytest.raises(ValueError, match=r"^2 slots cannot be taken away: there are 1"):
        cluster.take_away(2)
    with pytest.raises(ValueError, match=r"^1 slot cannot be given back: none were taken away"):
        cluster.give_back()
    for grace in (-1, "x", float("nan"), True):
        with pytest.raises(ValueError, match=r"^grace must be a number of seconds from 0 on, not"):
            cluster.take_away(grace=grace)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slots must be a whole number from 1 on, not 0"):
        LocalCluster(0)


def test_who_watches_is_told_of_each_change_and_of_none_later() -> None:
    cluster = LocalCluster(2)
    told: list[int] = []

    def look() -> None:
        told.append(cluster.slots)

    cluster.watch(look)
    cluster.take_away()
    cluster.give_back()
    seat = cluster.acquire()
    assert seat is not None
    cluster.vacate(seat, 30.0)
    cluster.release(seat)
    assert told == [1, 2, 1, 1]
    cluster.unwatch(look)
    cluster.give_back()
    assert (cluster.slots, told) == (2, [1, 2, 1, 1])


def test_a_slot_that_leaves_is_not_given_more_time_by_being_asked_again() -> None:
    cluster = LocalCluster(1)
    seat = cluster.acquire()
    assert seat is not None
    cluster.vacate(seat, 5.0)
    first = seat.leave_by
    cluster.vacate(seat, 500.0)
    assert seat.leave_by == first


def test_a_closed_cluster_starts_no_slot() -> None:
    cluster = LocalCluster(1)
    seat = cluster.acquire()
    assert seat is not None
    cluster.close()
    with pytest.raises(OSError, match="the local cluster was closed"):
        cluster.start(Ticket("1", (), Credentials(b"", b"")), seat, 0, 0)
    assert cluster.pids == set()


def closed_cluster(kept: KeptParent) -> tuple[LocalCluster, SlotParent]:
    """A cluster that is about to be closed, and the process that its slots were forked from."""
    cluster = LocalCluster(1, kept=kept)
    cluster._replace_parent()
    return cluster, cluster._parents[0]


def test_a_cluster_of_one_run_leaves_its_process_though_the_working_directory_is_gone(kept: KeptParent) -> None:
    cluster, parent = closed_cluster(kept)
    Path.cwd().rmdir()
    cluster.close()
    assert not parent.has_ended
    with pytest.raises(FileNotFoundError):
        kept.take(1)
    assert parent.has_ended


def test_a_cluster_in_which_a_slot_may_still_run_ends_it(kept: KeptParent) -> None:
    cluster, parent = closed_cluster(kept)
    cluster.acquire()
    cluster.close()
    assert parent.has_ended
    assert take(kept) != parent.pid


def test_a_cluster_of_the_users_own_ends_it() -> None:
    cluster = LocalCluster(1)
    cluster._replace_parent()
    [parent] = cluster._parents
    cluster.close()
    assert parent.has_ended
