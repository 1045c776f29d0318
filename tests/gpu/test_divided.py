"""State that is divided among ranks, and shards, on one device: through losses with the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import fully_sharded_training
import pytest
import shard_training
import sliced_training
import torch

from spark_elastic import TrainingFailedError
from spark_elastic.testing import Point, drain, kill

cloudpickle.register_pickle_by_value(fully_sharded_training)
cloudpickle.register_pickle_by_value(shard_training)
cloudpickle.register_pickle_by_value(sliced_training)

# With this, cuBLAS adds up in the same order each time; without it, torch refuses deterministic algorithms.
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def slices(run: Callable[..., Any], *faults: Any, commit: str = "sharded", zero: bool = False) -> dict[str, Any]:
    steps = 24
    done = run(
        sliced_training.train_in_slices, steps, False, zero, kwargs={"commit": commit}, num_proc=3, min_np=3, max_np=3,
        faults=list(faults), env=REPEATABLE,
    )  # fmt: skip
    assert done.faults == len(faults)
    assert {tuple(result["history"]) for result in done.results} == {tuple(range(1, steps + 1))}
    assert len({result["digest"] for result in done.results}) == 1
    first: dict[str, Any] = done.results[0]
    return first


@pytest.mark.parametrize(
    ("commit", "zero"), [("sharded", False), ("sharded", True), ("copy", True), ("host", True), ("in_place", True)]
)
def test_slices_of_commits_and_of_optimizers_are_gathered_after_losses(
    run: Callable[..., Any], commit: str, zero: bool
) -> None:
    faults = [kill(rank=1, step=5), kill(rank=2, step=10, at=Point.RECORDED), kill(rank=0, step=15, at=Point.COMMITTED)]
    assert slices(run, *faults, commit=commit, zero=zero)["digest"] == slices(run)["digest"]


def test_shards_have_the_bits_of_one_worker_on_a_device_through_losses(run: Callable[..., Any]) -> None:
    steps = 12
    arguments = (shard_training.train_on_shards, steps)
    faults = [kill(rank=1, step=3), kill(rank=0, step=7)]
    quiet = run(*arguments, num_proc=1, max_np=1, env=REPEATABLE)
    done = run(*arguments, None, {5: 3}, num_proc=3, min_np=1, max_np=3, env=REPEATABLE, faults=faults)
    assert done.faults == len(faults)
    assert {result["digest"] for result in done.results} == {quiet.results[0]["digest"]}


def test_a_model_that_is_divided_trains_on_through_a_loss_and_is_refused_on_a_gpu(
    run: Callable[..., Any], device: torch.device
) -> None:
    arguments = (fully_sharded_training.train_fully_sharded, 10)
    if device.type == "cuda":
        with pytest.raises(TrainingFailedError, match="a ShardedState trains on CPUs, and this worker has cuda:0"):
            run(*arguments, num_proc=2, min_np=2, max_np=2)
        return
    quiet = run(*arguments, num_proc=3, min_np=3, max_np=3).results[0]
    faults = [kill(rank=1, step=3), drain(rank=0, step=6)]
    done = run(*arguments, num_proc=3, min_np=2, max_np=3, faults=faults)
    assert done.faults == len(faults)
    for result in done.results:
        assert all(result["equal"]), "a generation began with other weights or moments than those of its commit"
        assert result["losses"] == pytest.approx(quiet["losses"], rel=0, abs=1e-9)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_of_a_device_goes_on_with_the_same_bits(
    run: Callable[..., Any], device: torch.device, tmp_path: Path, workers: int
) -> None:
    for steps in (8, 24):
        done = run(
            sliced_training.train_in_slices, steps, num_proc=workers, min_np=workers, max_np=workers,
            checkpoint=str(tmp_path), checkpoint_interval=0, kwargs={"commit": "copy"}, env=REPEATABLE,
        )  # fmt: skip
    assert done.of("checkpoint_restored")
    assert {result["digest"] for result in done.results} == {slices(run)["digest"]}
