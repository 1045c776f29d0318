"""Faults that the driver carries out: their worker waits for its end where it has no time to leave."""

from __future__ import annotations

import threading

import pytest

from spark_elastic.protocol.fault_points import Point
from spark_elastic.testing import give_back, take_away
from spark_elastic.worker.faults import Injector


class Waits(Exception):
    """Where a worker would wait for ever."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        raise Waits

    monkeypatch.setattr(threading.Event, "wait", wait)


def test_a_worker_whose_slot_is_taken_away_at_once_makes_no_further_step() -> None:
    with pytest.raises(Waits):
        Injector((take_away(step=3, grace=0),), lambda number: True)(Point.COMMIT, 0, 3, 1)


@pytest.mark.parametrize("fault", [take_away(step=3), give_back(step=3)], ids=["with grace", "given back"])
def test_one_that_has_time_goes_on(fault: object) -> None:
    claimed: list[int] = []
    Injector((fault,), lambda number: not claimed.append(number))(Point.COMMIT, 0, 3, 1)  # type: ignore[arg-type,func-returns-value]
    assert claimed == [0]
