"""Which commit a reported metric is about."""

from __future__ import annotations

import pytest

from spark_elastic.worker.state.scores import Scores


def test_without_a_step_since_the_last_commit_it_is_about_that_commit() -> None:
    scores = Scores()
    assert scores.committed(7) is None
    assert scores.reported(0.5, 7)
    assert scores.committed(8) is None


def test_after_a_step_it_is_about_the_next_commit() -> None:
    scores = Scores()
    scores.committed(7)
    assert not scores.reported(0.5, 9)
    assert scores.committed(9) == 0.5
    assert scores.committed(9) is None


def test_the_newest_report_before_a_commit_counts() -> None:
    scores = Scores()
    scores.reported(0.5, 1)
    scores.reported(0.4, 1)
    assert scores.committed(1) == 0.4


def test_weights_that_nobody_has_committed_have_no_score(caplog: pytest.LogCaptureFixture) -> None:
    scores = Scores()
    scores.reported(0.5, 1)
    assert scores.committed(2) is None
    assert "Call state.commit() before the next step" in caplog.text
