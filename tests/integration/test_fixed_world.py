"""``elastic=False``: plain functions have a rank and torch's default group, and a loss runs all of them again, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import training

import spark_elastic
from spark_elastic import TrainingFailedError


def test_a_function_of_torchs_own_trains_and_runs_again_after_a_loss_beside_nobody(run: Any, tmp_path: Path) -> None:
    result = run(training.fixed_of_torchs_own, str(tmp_path), elastic=False, num_proc=3, max_np=3)
    assert [entry["rank"] for entry in result.results] == [0, 1, 2]
    assert {entry["generation"] for entry in result.results} == {2}
    assert len({entry["weights"] for entry in result.results}) == 1
    assert [entry["sum"] for entry in result.results] == [3.0] * 3
    # Rank 2 of the first attempt swallowed every error and would have gone on until it was told to end.
    assert {path.name for path in tmp_path.glob("attempt-1-*")} == {"attempt-1-0", "attempt-1-1", "attempt-1-2"}
    assert not list(tmp_path.glob("beside-*")), "two attempts ran beside each other"
    assert result.sizes == [3, 3]


@pytest.mark.parametrize("plain", [True, False])
def test_a_state_goes_on_from_the_newest_checkpoint(plain: bool, run_on_spark: Any, tmp_path: Path) -> None:
    lose = tmp_path / "lose"

    def watch(event: dict[str, Any]) -> None:
        # That of the first commit may be under way when commit 10 is asked for: then a later commit is written instead.
        if event["event"] == "checkpoint_written" and event["values"]["step"] >= 10:
            lose.touch()

    result = run_on_spark(
        training.fixed_with_state, 10, 10, str(lose), plain, on_event=watch,
        elastic=False, num_proc=2, checkpoint=tmp_path / "saved", checkpoint_interval=1e6,
    )  # fmt: skip
    first, second = result.results
    assert first == second
    assert first["start"] == result.of("checkpoint_restored")[0]["values"]["step"] >= 10
    assert (first["end"], first["generation"]) == (first["start"] + 10, 2)


def test_an_exception_on_one_rank_ends_the_job_and_those_that_wait_for_it(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match="ValueError: bad row") as failure:
        run(training.fixed_raises, elastic=False, num_proc=2)
    assert [entry.rank for entry in failure.value.failures] == [1]
    assert "in fixed_raises" in failure.value.failures[0].traceback


def test_a_plain_function_that_asks_for_its_rank_is_told_of_fixed_worlds_and_not_tried_again(run: Any) -> None:
    with pytest.raises(TrainingFailedError, match=r"NotInWorldError: .*elastic=False") as failure:
        run(spark_elastic.rank, num_proc=2)
    assert len(failure.value.failures) <= 2  # both workers, once each
