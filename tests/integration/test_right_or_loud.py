"""Mistakes of ordinary user code, in jobs of this machine: training is right, or something says that it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loud_training
import pytest
from descendants import TEMPORARY

import spark_elastic
from spark_elastic.errors import ResetLimitExceededError, SparkElasticError, TrainingFailedError
from spark_elastic.testing import drain, inject, kill


def test_values_that_each_rank_computes_alone_are_warned_of_once_also_through_a_loss(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with inject(kill(rank=1, step=3)):
        results = spark_elastic.run(
            loud_training.train_with_values_of_each_rank, args=(6,), num_proc=3, min_np=2, max_np=3, local=True
        )
    assert {steps for steps, _ in results} == {6}
    # After the reset, survivors and newcomers have the values of one rank: of rank 0, or of rank 2 where only that had made the
    # last commit. Its first loss, to which its rank was added, tells which.
    entered = [of_all for _, entries in results for of_all in entries]
    assert entered
    for of_all in entered:
        assert of_all == [of_all[0]] * len(of_all)
        assert of_all[0][2] == ([1.0, 1.0] if of_all[0][1][0] >= 2 else None)
    told = [line for line in capfd.readouterr().err.splitlines() if "UserWarning" in line]
    named = ("state.best is", "state.losses[0] is", "state.only_on_one[0] is there")
    assert [any(name in line for name in named) for line in told] == [True] * 3
    assert all("se.allreduce" in line for line in told)


def test_code_that_swallows_the_loss_of_a_worker_goes_on_from_the_last_commit() -> None:
    with inject(kill(rank=1, step=4)):
        results = spark_elastic.run(
            loud_training.train_and_swallow_errors_of_a_step, args=(8,), num_proc=3, min_np=2, max_np=3, local=True
        )
    assert set(results) == {8}


@pytest.mark.parametrize("commit", ["copy", "in_place"])
def test_code_that_swallows_an_interrupt_in_each_batch_trains_the_whole_epoch(commit: str) -> None:
    """In place, no batch after it could train: the loop ran out of batches, and the job ended well after a fifth of its steps."""
    with inject(drain(rank=1, step=6)):
        results = spark_elastic.run(
            loud_training.train_an_epoch_and_swallow_errors_of_a_batch, args=(commit,), num_proc=3, min_np=2, max_np=3, local=True
        )  # fmt: skip
    assert set(results) == {30}


@pytest.mark.parametrize(
    "way",
    ["all_reduce", "async_op", "backward", "hook", "several", "scattered", "objects", "transfer", "barrier"],
)
def test_the_loss_of_a_worker_is_no_runtime_error_in_torchs_own_collectives(way: str) -> None:
    """Code that goes on after running out of memory would swallow it, and wait for ever for a rank that is gone."""
    with inject(kill(rank=1, step=4)):
        results = spark_elastic.run(
            loud_training.train_and_go_on_after_runtime_errors,
            args=(8, way), num_proc=3, min_np=2, max_np=3, local=True, start_timeout=60,
        )  # fmt: skip
    assert results == [(8, [])] * len(results)


@pytest.mark.parametrize("commit", ["copy", "host", "in_place", "sharded"])
def test_tensors_of_all_dtypes_and_those_of_inference_mode_survive_losses_joins_and_jobs(
    commit: str, tmp_path: Path
) -> None:
    with inject(kill(rank=1, step=4)):  # at the second step after one in inference mode
        lost = spark_elastic.run(
            loud_training.train_with_odd_tensors,
            args=(8, commit), num_proc=3, min_np=3, max_np=3, local=True, checkpoint=tmp_path,
        )  # fmt: skip
    resumed = spark_elastic.run(
        loud_training.train_with_odd_tensors,
        args=(9, commit), num_proc=3, min_np=3, max_np=3, local=True, checkpoint=tmp_path,
    )  # fmt: skip
    for results, step, of in ((lost, 8, 5.0), (resumed, 9, 8.0)):
        scale = (1 + 1e-5) ** -0.5  # of the frozen normalization
        odd = [[step - 1.0] * 4] * len(loud_training.ODD_DTYPES) + [[step - 1.0]] + [[1.0] * 3] * 2
        made = [pytest.approx([of * scale] * 2), [1.0, 1.0], [0.0, 0.0]]
        assert results == [(step, odd, made)] * 3


def test_a_result_that_the_driver_cannot_unpickle_is_named() -> None:
    message = "fn has returned in all workers, and result 0 cannot be unpickled here: ValueError: invalid literal"
    with pytest.raises(SparkElasticError, match=message):
        spark_elastic.run(loud_training.NoNumber, num_proc=1, local=True)


@pytest.mark.parametrize("function", [loud_training.end_before_training, loud_training.end_while_training])
def test_the_error_of_a_job_says_how_its_last_worker_ended(function: Callable[[], None]) -> None:
    with pytest.raises(ResetLimitExceededError) as failure:
        spark_elastic.run(function, num_proc=1, reset_limit=0, local=True)
    assert "failures have caused 1 reset, more than reset_limit=0 allows; the last one: " in str(failure.value)
    assert str(failure.value).count("exited with code 7 before its result had arrived") == 2


def test_a_rank_that_fails_ahead_of_each_commit_ends_the_job_though_the_other_commits() -> None:
    """The job went on for ever, by one step in each world."""
    with pytest.raises(TrainingFailedError, match=r"FileNotFoundError.* was raised 3 times without a commit between"):
        spark_elastic.run(
            loud_training.fail_on_one_rank_ahead_of_each_commit, num_proc=2, min_np=2, max_np=2, local=True
        )


def test_a_loader_forks_its_workers_while_no_collective_is_pending() -> None:
    """A fork during a process's first collective held a lock of the C library for ever, in one of three starts."""
    broken: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_broken":
            broken.append(event)

    for _ in range(8):
        steps = spark_elastic.run(
            loud_training.train_with_workers_of_a_loader,
            args=(2,), num_proc=2, min_np=1, max_np=2, local=True, hang_timeout=30, on_event=watch,
        )  # fmt: skip
        assert steps == [8, 8]
    assert broken == []


def test_the_temporary_folder_of_a_loaders_workers_is_removed_when_they_are_killed() -> None:
    before = set(TEMPORARY.glob("pymp-*"))
    with inject(kill(rank=1, step=3)):
        steps = spark_elastic.run(
            loud_training.train_with_workers_of_a_loader, args=(2,), num_proc=2, min_np=1, max_np=2, local=True
        )
    assert set(steps) == {8}
    assert set(TEMPORARY.glob("pymp-*")) == before


@pytest.mark.parametrize("elastic", [True, False])
def test_a_child_that_user_code_forks_may_exit(elastic: bool) -> None:
    codes = spark_elastic.run(
        loud_training.fork_a_child_that_exits, num_proc=2, min_np=2, max_np=2, local=True, elastic=elastic
    )
    assert codes == [[5, 5]] * 2


@pytest.mark.parametrize("elastic", [True, False])
def test_an_exception_whose_text_cannot_be_read_is_told_with_its_traceback(elastic: bool) -> None:
    with pytest.raises(
        TrainingFailedError, match=r"(?s)Traceback.*raise Unreadable.*Unreadable: <exception str\(\) failed>"
    ):
        spark_elastic.run(
            loud_training.raise_what_cannot_be_read, num_proc=2, min_np=2, max_np=2, local=True, elastic=elastic
        )


def test_random_numbers_that_nobody_has_seeded_differ_between_workers_and_between_jobs() -> None:
    """Workers of a machine are forked from one process, which stays for the next job."""

    def draw() -> tuple[float, ...]:
        import random

        import numpy
        import torch

        return random.random(), float(numpy.random.random()), float(torch.rand(1))

    drawn = [each for _ in range(2) for each in spark_elastic.run(draw, num_proc=2, min_np=2, max_np=2, local=True)]
    assert [len(set(of_one_kind)) for of_one_kind in zip(*drawn, strict=True)] == [4, 4, 4]


def test_random_numbers_of_an_object_state_go_back_with_it() -> None:
    """Survivors draw again what they drew after their last commit; a newcomer has numbers of its own."""

    def draw() -> dict[int, tuple[float, ...]]:
        import random

        import numpy
        import torch

        import spark_elastic as se

        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(5)
        drawn: dict[int, tuple[float, ...]] = {}

        @se.elastic
        def train(state: se.ObjectState) -> None:
            while state.step < 8:
                drawn[state.step] = random.random(), float(numpy.random.random()), float(torch.rand(1))
                se.barrier()
                state.step += 1
                state.commit()

        train(se.ObjectState(step=0))
        return drawn

    quiet = spark_elastic.run(draw, num_proc=2, min_np=2, max_np=2, local=True)
    assert not set(quiet[0].values()) & set(quiet[1].values())
    with inject(kill(rank=1, step=4)):
        survivor, newcomer = spark_elastic.run(draw, num_proc=2, min_np=2, max_np=2, local=True)
    assert survivor == quiet[0]
    assert set(newcomer) <= set(range(3, 8))
    assert not set(newcomer.values()) & set(quiet[0].values())


def test_objects_of_classes_that_only_the_script_has_are_gathered_and_broadcast() -> None:
    class Found:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    def gather() -> list[int]:
        import spark_elastic as se

        @se.elastic
        def train(state: se.ObjectState) -> list[int]:
            everybody = se.allgather_object(Found(se.rank()))
            first = se.broadcast_object(Found(se.rank()), src=1)
            assert all(type(found) is Found for found in [*everybody, first])
            return [found.rank for found in [*everybody, first]]

        return train(se.ObjectState())

    assert spark_elastic.run(gather, num_proc=2, min_np=2, max_np=2, local=True) == [[0, 1, 1]] * 2


def test_what_a_worker_leaves_in_shared_memory_is_removed() -> None:
    (names,) = spark_elastic.run(loud_training.leave_a_semaphore_and_shared_memory, num_proc=1, local=True)
    assert set(names) & set(os.listdir("/dev/shm")) == set()
