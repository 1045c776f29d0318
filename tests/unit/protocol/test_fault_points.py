"""Faults: how they are named in messages, and that they travel to workers as they were planned."""

from __future__ import annotations

import msgspec
import pytest

from spark_elastic.protocol.fault_points import CLUSTER_ACTIONS, ENDING_ACTIONS, Action, Fault, Point


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (Fault(0, Action.KILL, Point.COMMIT, rank=1, step=5), "kill(rank=1, step=5)"),
        (Fault(0, Action.HANG, Point.FORM, rank=0, generation=2), "hang(rank=0, generation=2, at='form')"),
        (Fault(3, Action.EXIT, Point.BOOT, times=2, code=7), "exit(at='boot')"),
        (Fault(0, Action.TAKE_AWAY, Point.COMMIT), "take_away()"),
    ],
)
def test_a_fault_is_named_as_it_is_written_in_a_test(fault: Fault, name: str) -> None:
    """A commit is where faults strike unless a test says otherwise."""
    assert str(fault) == name


def test_a_fault_travels_as_it_is() -> None:
    fault = Fault(2, Action.TAKE_AWAY, Point.COMMIT, rank=1, step=0, generation=3, times=4, code=5, grace=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fault), type=Fault) == fault


def test_a_fault_ends_a_process_or_changes_a_cluster_and_not_both() -> None:
    assert not set(ENDING_ACTIONS) & set(CLUSTER_ACTIONS)
