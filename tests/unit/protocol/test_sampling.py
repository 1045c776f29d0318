"""How long samples of a worker are apart in the log."""

from __future__ import annotations

from spark_elastic.protocol.sampling import pause

HOUR = 3600.0


def test_the_pause_between_samples_follows_the_workers_or_their_age_whichever_makes_it_longer() -> None:
    assert [pause(1000, HOUR), pause(4, HOUR), pause(1000, 10 * HOUR)] == [250, 36, 360]


def test_few_young_workers_are_recorded_as_often_as_they_give_samples() -> None:
    """Every five seconds, of up to twenty workers that are up to eight minutes old."""
    assert pause(20, 480.0) <= 5.0
    assert pause(21, 480.0) > 5.0
    assert pause(20, 520.0) > 5.0
