"""How the shares of a global batch follow the speeds of ranks."""

from __future__ import annotations

import random

import pytest
from data_worlds import THOROUGH
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.data.balance import (
    LEAST_GAIN,
    MOST,
    MOST_MEASUREMENTS,
    Balancer,
    apportion,
    balanced,
    estimate_overhead,
    even,
)
from spark_elastic.data.plan import BatchPlan, make_step

speeds = st.lists(st.floats(0.05, 20), min_size=1, max_size=9)


def settled(units: int, speeds: list[float], overhead: float = 0.0, least: int = 2) -> tuple[int, ...]:
    """Return the shares at which ranks of these speeds arrive, from even ones."""
    shares = even(units, len(speeds))
    for _ in range(50):
        seconds = [overhead + share / speed for share, speed in zip(shares, speeds, strict=True)]
        changed = balanced(shares, seconds, least)
        if changed == shares:
            return shares
        shares = changed
    raise AssertionError(f"the shares of {units} units at speeds {speeds} never settle")


def slowest(shares: tuple[int, ...], speeds: list[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def test_a_rank_at_a_third_of_the_others_speed_settles_at_a_third_of_their_rows() -> None:
    shares = settled(1024, [3.0, 3.0, 3.0, 1.0])
    assert sum(shares) == 1024
    assert shares[3] == pytest.approx(1024 / 10, rel=0.1)
    assert max(shares[:3]) - min(shares[:3]) <= 1


def test_one_change_goes_most_of_the_way() -> None:
    assert balanced((256,) * 4, [1.0, 1.0, 1.0, 3.0]) == (295, 295, 294, 140)


def test_equal_ranks_and_small_differences_change_nothing() -> None:
    assert balanced((256,) * 4, [1.0] * 4) == (256,) * 4
    assert balanced((256,) * 4, [1.0, 1.02, 0.99, 1.04]) == (256,) * 4


def test_nothing_changes_before_all_ranks_have_been_measured() -> None:
    assert balanced((8, 8), [1.0, 0.0]) == (8, 8)


def test_a_batch_of_one_row_a_rank_leaves_no_room() -> None:
    assert balanced((1, 1, 1), [1.0, 1.0, 9.0]) == (1, 1, 1)
    assert balanced((1, 0, 1), [1.0, 1.0, 9.0]) == (1, 0, 1)


def test_a_rank_that_has_become_fast_again_gets_its_rows_back() -> None:
    shares = settled(100, [3.0, 1.0])
    assert shares[1] < 30
    for _ in range(3):
        shares = balanced(shares, [share / 1.0 for share in shares])
    assert abs(shares[0] - shares[1]) <= 5


def test_what_is_not_in_proportion_to_rows_does_not_drain_a_slow_rank_for_nothing() -> None:
    shares, balancer, changes = (64, 64, 64, 64), Balancer(), 0
    for _ in range(64):
        # The slow one needs half a second for any step, a row more or less changes little.
        seconds = [0.1 + 0.004 * share for share in shares[:3]] + [0.5 + 0.0001 * shares[3]]
        after = balancer.decide(shares, seconds)
        changes += after != shares
        shares = after
    assert changes <= 6
    assert sum(shares) == 256


def test_equal_ranks_whose_times_differ_by_chance_are_left_alone_more_and_more() -> None:
    chance, shares, balancer, changes = random.Random(0), (64, 64, 64, 64), Balancer(), 0
    for _ in range(1000):
        after = balancer.decide(shares, [share * chance.uniform(0.8, 1.0) for share in shares])
        changes += after != shares
        shares = after
    assert changes < 50


def with_overhead(shares: tuple[int, ...], speeds: list[float], overhead: float) -> list[float]:
    return [(overhead + share) / speed for share, speed in zip(shares, speeds, strict=True)]


def test_a_slow_rank_is_relieved_of_what_its_overhead_takes_within_a_few_decisions() -> None:
    """A fast rank's optimizer, commit and calls take it as long as 300 rows, those of the slow rank take three times as long."""
    speeds, shares, balancer = [3.0, 3.0, 3.0, 1.0], even(2048, 4), Balancer()
    for _ in range(6):
        shares = balancer.decide(shares, with_overhead(shares, speeds, 300))
    assert max(with_overhead(shares, speeds, 300)) <= 1.06 * (2048 + 4 * 300) / sum(speeds)
    assert shares[3] < 0.5 * 2048 / 10, "its time for a row alone would leave it 204 rows"


@THOROUGH
@given(speeds=speeds, overhead=st.floats(0, 1000), units=st.integers(20, 2000))
def test_shares_with_an_overhead_are_never_worse_than_even_ones(
    speeds: list[float], overhead: float, units: int
) -> None:
    shares, balancer = even(units, len(speeds)), Balancer()
    first = max(with_overhead(shares, speeds, overhead))
    for _ in range(20):
        shares = balancer.decide(shares, with_overhead(shares, speeds, overhead))
        assert sum(shares) == units
        assert max(with_overhead(shares, speeds, overhead)) <= first


def test_the_overhead_is_what_explains_how_a_ranks_time_has_changed() -> None:
    for now in (20, 180):
        before, after = with_overhead((100, 100), [1, 2], 40), with_overhead((100, now), [1, 2], 40)
        assert estimate_overhead((100, 100), before, (100, now), after) == pytest.approx(40)
    assert estimate_overhead((100, 100), [1, 1], (100, 85), [1, 0.9]) is None, "such a small change tells nothing"
    assert estimate_overhead((100, 100), [1, 1], (150, 50), [1.5, 0.1]) == 0, "as it can not be negative"
    assert estimate_overhead((100, 100), [1, 1], (150, 50), [1, 1]) == 400, "what no share changes is all overhead"


def test_a_small_gain_has_to_be_seen_more_often_than_a_large_one() -> None:
    balancer = Balancer()
    decided = [balancer.decide((50, 50), [1.0, 1.15]) for _ in range(MOST_MEASUREMENTS)]
    assert decided[0] == (50, 50)
    assert sum(decided[-1]) == 100
    assert decided[-1][1] < 50
    assert Balancer().decide((50, 50), [1.0, 1.5]) != (50, 50)


def test_a_rank_that_has_become_much_slower_is_relieved_at_once_whatever_was_measured_before() -> None:
    balancer = Balancer()
    for _ in range(20):
        assert balancer.decide((50, 50), [1.0, 1.0]) == (50, 50)
    assert balancer.decide((50, 50), [1.0, 3.0]) == balanced((50, 50), [1.0, 3.0])


@THOROUGH
@given(units=st.integers(1, 2000), speeds=speeds, overhead=st.floats(0, 100), least=st.sampled_from([1, 2]))
def test_shares_settle_within_their_limits(units: int, speeds: list[float], overhead: float, least: int) -> None:
    shares = settled(units, speeds, overhead, least)
    assert sum(shares) == units
    assert min(shares) >= min(least, units // len(speeds))
    assert max(shares) <= max(MOST * units / len(speeds), -(-units // len(speeds)))


@THOROUGH
@given(speeds=speeds)
def test_settled_steps_are_as_fast_as_the_sum_of_speeds_allows_where_the_limits_leave_room(speeds: list[float]) -> None:
    units, size = 10_000, len(speeds)
    shares = settled(units, speeds)
    if max(speeds) / sum(speeds) < MOST / size and min(speeds) / sum(speeds) > 2 / units:
        assert slowest(shares, speeds) <= units / sum(speeds) / (1 - LEAST_GAIN) ** 2 + 1 / min(speeds)
    assert slowest(shares, speeds) <= slowest(even(units, size), speeds)


@THOROUGH
@given(
    shares=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    rows=st.integers(1, 400),
)
def test_a_step_of_any_number_of_rows_is_divided_whole(shares: list[int], rows: int) -> None:
    batch, size = sum(shares), len(shares)
    assert apportion(batch, shares) == tuple(shares)
    step = make_step(BatchPlan(None, batch), 0, rows, size, tuple(shares))
    assert sum(step.rank_rows) == rows
    if rows >= batch:
        assert all(mine >= share for mine, share in zip(step.rank_rows, shares, strict=True))


def test_a_tail_that_would_leave_a_rank_a_single_row_is_shared_out_evenly() -> None:
    plan = BatchPlan(None, 100)
    assert make_step(plan, 0, 40, 2, (80, 20)).rank_rows == (32, 8)
    assert make_step(plan, 0, 16, 3, (78, 20, 2)).rank_rows == (5, 5, 6)
