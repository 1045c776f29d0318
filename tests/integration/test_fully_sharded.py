"""A model that is divided among ranks outlives losses and joins, with the bits of its commits and an undisturbed run's losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import fully_sharded_training
import pytest
from fully_sharded_training import train_fully_sharded

import spark_elastic
from spark_elastic.errors import StateLostError
from spark_elastic.testing import Point, drain, give_back, inject, kill, kill_executor, local_cluster, take_away

cloudpickle.register_pickle_by_value(fully_sharded_training)

STEPS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_cluster(slots=4) as cluster:
        yield cluster


def train(
    cluster: Any, *faults: Any, steps: int = STEPS, num_proc: int = 4, min_np: int = 2, **settings: Any
) -> dict[str, Any]:
    with inject(*faults):
        results: list[dict[str, Any]] = spark_elastic.run(
            train_fully_sharded, (steps,), settings, local=cluster, num_proc=num_proc, min_np=min_np
        )
    assert {result["digest"] for result in results} == {results[0]["digest"]}
    assert all(results[0]["equal"]), "a generation began with other weights or moments than those of its commit"
    return results[0]


@pytest.fixture(scope="module")
def undisturbed(cluster: Any) -> dict[str, Any]:
    return train(cluster)


def check(result: dict[str, Any], undisturbed: dict[str, Any], done: int = 0) -> None:
    assert result["losses"] == pytest.approx(undisturbed["losses"][done:], rel=0, abs=1e-12)
    assert result["rate"] == undisturbed["rate"]


def test_a_world_that_shrinks_and_grows_and_is_drained_trains_as_if_nothing_had_happened(
    cluster: Any, undisturbed: dict[str, Any]
) -> None:
    faults = [take_away(rank=2, step=3, grace=0), give_back(step=5), drain(rank=1, step=9)]
    result = train(cluster, *faults, whole=7, last=4)
    assert result["sizes"][:3] == [4, 3, 4]
    check(result, undisturbed)


def test_losses_in_a_commit_and_in_a_repair_cost_nothing(cluster: Any, undisturbed: dict[str, Any]) -> None:
    faults = [
        kill(rank=2, step=3),
        kill(rank=3, generation=2, at=Point.REPAIR),  # a newcomer
        kill(rank=0, step=8, at=Point.RECORDED),
    ]
    check(train(cluster, *faults, min_np=4), undisturbed)


def test_two_neighbours_may_be_lost_with_a_redundancy_of_two(cluster: Any, undisturbed: dict[str, Any]) -> None:
    check(train(cluster, pair=5, redundancy=2), undisturbed)


def test_two_neighbours_lose_the_state_otherwise_and_the_error_says_who_holds_what(cluster: Any) -> None:
    with pytest.raises(
        StateLostError,
        match=r"(?s)rank 0 \(worker \d\) holds slices 0, 1 of 4 of commit 1\.4; rank 3 \(worker \d\) holds slices 0, 3 of 4.*"
        r"with a ShardedState run the job again, which goes on from what the function has last written by torch\.distributed",
    ):
        train(cluster, pair=5)


def test_a_loss_while_a_checkpoint_of_torchs_is_written_costs_nothing_and_another_size_goes_on_from_the_next_one(
    cluster: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    train(cluster, struck=3, saved=saved, steps=7)
    check(train(cluster, num_proc=3, saved=saved), undisturbed, done=7)


def test_on_spark_a_killed_worker_and_a_killed_executor_are_replaced_and_cost_nothing(
    run_on_spark: Any, undisturbed: dict[str, Any]
) -> None:
    faults = [kill(rank=1, step=3), kill_executor(rank=2, step=8)]
    result = run_on_spark(train_fully_sharded, STEPS, faults=faults, num_proc=4, min_np=4)
    assert (result.faults, result.sizes) == (2, [4, 4, 4])
    assert all(all(each["equal"]) for each in result.results)
    check(result.results[0], undisturbed)
