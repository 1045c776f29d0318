"""Pace: which commits have an exchange."""

from __future__ import annotations

import pytest

from spark_elastic.worker.state.pace import FIRST, Pace


def exchanges(seconds: float, count: int, steps_left: int = 0) -> list[int]:
    """The commits after the first ones that have an exchange, of ``count`` commits that are ``seconds`` apart."""
    now = 0.0
    pace = Pace(lambda: now)
    found, wish = [], None
    for number in range(1, FIRST + count + 1):
        now += seconds
        if wish is not None:
            pace.agree(wish)
            wish = None
        pace.count()
        if pace.is_due():
            found.append(number - FIRST)
            wish = pace.begin(max(0, steps_left - number) if steps_left else 0)
    assert found[:FIRST] == list(range(1 - FIRST, 1))
    return found[FIRST:]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, [1, 9, 17]),
        (0.004, [1, 9, 17]),
        (0.03, [1, 4, 7, 10, 13, 16, 19]),
        (0.06, list(range(1, 21))),
        (10.0, list(range(1, 21))),
    ],
)
def test_exchanges_are_a_few_short_steps_apart_and_never_one_long_step(seconds: float, expected: list[int]) -> None:
    assert exchanges(seconds, 20) == expected


def test_the_end_of_an_epoch_has_one() -> None:
    assert exchanges(0.001, 20, steps_left=FIRST + 12) == [1, 9, 12, 20]


def test_the_next_one_is_counted_from_the_last_however_late_it_is_read() -> None:
    pace = Pace(lambda: 0.0)
    pace.count()
    assert pace.is_due()
    pace.begin(0)
    pace.agree(3)
    due = []
    for _ in range(3):
        pace.count()
        due.append(pace.is_due())
    assert due == [False, False, True]
