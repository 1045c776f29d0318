"""Worlds that come to nothing: how many in a row end a job, and what makes the count begin again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spark_elastic.driver.setbacks import (
    LOST_STARTS_LIMIT,
    LOST_WORLDS_LIMIT,
    NEWCOMERS_LIMIT,
    STUCK_WORLDS_LIMIT,
    UNFORMED_LIMIT,
    Setbacks,
)
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import ResetLimitExceededError, StateLostError, TrainingFailedError


def setbacks(**settings: Any) -> Setbacks:
    return Setbacks(JobSettings(min_np=1, num_proc=1, max_np=1, **settings))


def test_worlds_in_a_row_that_do_not_form_end_the_job_and_one_that_does_begins_the_count_again() -> None:
    job = setbacks()
    assert [job.forming(()) for _ in range(UNFORMED_LIMIT)] == [None] * UNFORMED_LIMIT
    job.formed()
    assert [job.forming(()) for _ in range(UNFORMED_LIMIT)] == [None] * UNFORMED_LIMIT
    assert isinstance(job.forming(()), TrainingFailedError)


@pytest.mark.parametrize("limit", [0, 2])
def test_more_resets_than_the_limit_end_the_job(limit: int) -> None:
    job = setbacks(reset_limit=limit)
    for _ in range(limit):
        job.broke()
    assert job.over_limit("a loss", ()) is None
    job.broke()
    assert isinstance(job.over_limit("a loss", ()), ResetLimitExceededError)
    assert job.resets == limit + 1


def test_newcomers_that_fail_count_only_where_nothing_else_happens_any_more() -> None:
    job = setbacks(reset_limit=0)
    for _ in range(3):
        job.progressed()
        for _ in range(NEWCOMERS_LIMIT):
            job.broke(by_newcomers=True)
        assert job.over_limit("a newcomer", ()) is None
    job.broke(by_newcomers=True)
    assert isinstance(job.over_limit("a newcomer", ()), ResetLimitExceededError)
    assert job.resets == 3 * NEWCOMERS_LIMIT + 1


@pytest.mark.parametrize(("has_silent", "limit"), [(False, STUCK_WORLDS_LIMIT), (True, UNFORMED_LIMIT)])
def test_stuck_worlds_in_a_row_end_the_job_later_where_connections_are_silent(has_silent: bool, limit: int) -> None:
    job = setbacks()
    job.got_stuck("all wait", has_silent, True, ())
    job.progressed()
    for number in range(1, limit):
        assert job.got_stuck("all wait", has_silent, True, ()) is None
        assert job.is_stuck_again == (number > 1)
    assert isinstance(job.got_stuck("all wait", has_silent, True, ()), TrainingFailedError)


def test_a_lost_state_ends_a_job_without_checkpoints_at_once_and_others_after_a_few() -> None:
    lost = setbacks().lost_state("all were lost", ())
    assert isinstance(lost, StateLostError)
    assert "see checkpoint=; with a ShardedState run the job again" in str(lost)
    job = setbacks(durable=True)
    assert [job.lost_state("all were lost", ()) for _ in range(LOST_WORLDS_LIMIT)] == [None] * LOST_WORLDS_LIMIT
    assert isinstance(job.lost_state("all were lost", ()), StateLostError)
    job.progressed()
    assert job.lost_state("all were lost", ()) is None


def lost_start(job: Setbacks, now: float, started_at: float, others_since: float) -> Any:
    return job.lost_start(now, started_at, others_since, "its process died", (), runs_again=False)


def lost_starts(job: Setbacks, first: int, last: int, every: float, **others: float) -> list[Any]:
    """Lose workers that live for so many seconds, one after the other."""
    at = {"others_since": math.inf, **others}
    return [lost_start(job, (start + 1) * every, start * every, at["others_since"]) for start in range(first, last)]


def test_starts_that_are_lost_again_and_again_end_a_job_only_after_its_start_timeout() -> None:
    job = setbacks(start_timeout=600)
    assert lost_starts(job, 0, 60, every=10) == [None] * 60
    (error,) = lost_starts(job, 60, 61, every=10)
    assert isinstance(error, TrainingFailedError)
    assert "lost 61 times in a row" in str(error)
    few = setbacks(start_timeout=600)
    assert lost_starts(few, 0, LOST_STARTS_LIMIT - 1, every=590) == [None] * (LOST_STARTS_LIMIT - 1)
    assert lost_starts(few, LOST_STARTS_LIMIT - 1, LOST_STARTS_LIMIT, every=590) != [None]


def test_a_worker_that_lives_as_long_as_a_start_may_take_begins_the_count_again() -> None:
    job = setbacks(start_timeout=100)
    assert lost_starts(job, 0, 9, every=10) == [None] * 9
    assert lost_start(job, 190, 90, math.inf) is None
    assert lost_starts(job, 19, 29, every=10) == [None] * 10
    assert lost_starts(setbacks(start_timeout=100), 10, 40, every=10, others_since=0) == [None] * 30


def test_workers_that_one_incident_ends_are_one_lost_start() -> None:
    job = setbacks(start_timeout=100)
    assert [lost_start(job, 50 + at / 1000, 0, 49) for at in range(500)] == [None] * 500
    assert lost_start(job, 150.5, 60, 140) is None
