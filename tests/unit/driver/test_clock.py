"""The machine's clock, which stands still while the driver is paused."""

from __future__ import annotations

import math

import pytest

from spark_elastic.driver.clock import PAUSE_SECONDS, TICK_SECONDS, MachineClock


def test_a_pause_of_the_driver_counts_as_one_tick() -> None:
    clock = MachineClock(10.0)
    assert clock.advance(10.0 + PAUSE_SECONDS) is None
    assert clock.advance(113.0) == 100.0
    assert clock.now == 13.0 + TICK_SECONDS
    assert clock.to_driver_time(15.0) == 114.0
    assert clock.from_driver_time(114.0) == 15.0


@pytest.mark.parametrize("pause", [3.1, 17.3, 100.1, 98765.4321])
def test_what_is_to_come_is_after_the_last_event_whatever_rounding_makes_of_it(pause: float) -> None:
    clock = MachineClock(1.1)
    for seconds in (0.3, pause, 0.7):
        clock.advance(clock.driver_time + seconds)
        time = clock.now
        for _ in range(10):
            time = math.nextafter(time, math.inf)
            assert clock.to_driver_time(time) > clock.driver_time
    assert clock.to_driver_time(clock.now) == pytest.approx(clock.driver_time)
