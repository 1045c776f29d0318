"""Which faults have struck in a run, and what the caller of a run is told of the others."""

from __future__ import annotations

import warnings

import pytest

from spark_elastic.driver.fault_plan import Strikes
from spark_elastic.protocol.records import Entry, EventsDropped, FaultInjected, Record
from spark_elastic.testing import hang, inject, kill


def warnings_after(*records: Record) -> list[str]:
    """Have a run with two faults, the first of which is to strike twice, make these records."""
    with inject(kill(rank=0, step=20, times=2), hang(rank=1)), warnings.catch_warnings(record=True) as caught:
        strikes = Strikes()
        for record in records:
            strikes.see(Entry(0.0, record))
        strikes.warn_of_missing()
    return [str(warning.message) for warning in caught]


TWICE, ONCE = (FaultInjected(worker=0, rank=0, fault=number) for number in (1, 2))


def test_nothing_is_said_of_faults_that_have_struck_as_often_as_they_were_to() -> None:
    assert not warnings_after(TWICE, ONCE, TWICE)


def test_a_fault_that_has_struck_less_often_or_never_is_named() -> None:
    (never,) = warnings_after(TWICE, TWICE)
    assert never.startswith("injected, but never struck: hang(rank=1).")
    (less,) = warnings_after(TWICE, ONCE)
    assert less.startswith("injected to strike 2 times, but struck 1: kill(rank=0, step=20).")


@pytest.mark.parametrize("struck", [(), (TWICE,)])
def test_where_events_were_dropped_nobody_knows(struck: tuple[Record, ...]) -> None:
    assert not warnings_after(*struck, EventsDropped(3))
    assert not warnings_after(EventsDropped(3), *struck)
