"""Whole jobs on one device: losses, joins and drains, commits, random numbers, scales, compilers, lack of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_training
import pytest
import torch

from spark_elastic import TrainingFailedError
from spark_elastic.testing import Point, drain, give_back, kill, raise_error, stop, take_away

# About a twentieth of a second on GPUs of today: longer than a step, shorter than any limit.
BUSY = 100_000_000


def assert_counted(results: list[dict[str, Any]], steps: int, device: torch.device) -> None:
    """Every step counts once in the state and in the weights, which are the same everywhere."""
    assert [result["history"] for result in results] == [list(range(1, steps + 1))] * len(results)
    assert [result["counter"] for result in results] == [steps] * len(results)
    assert len({result["digest"] for result in results}) == 1
    assert {torch.device(result["device"]).type for result in results} == {device.type}


def test_four_ranks_on_one_device_go_on_through_kills_joins_and_drains(
    run: Callable[..., Any], device: torch.device
) -> None:
    faults = [
        kill(rank=3, step=15), drain(rank=2, step=60), kill(rank=0, step=120), take_away(rank=1, step=180),
        give_back(step=200),
    ]  # fmt: skip
    done = run(gpu_training.count_steps, 260, "copy", 0.02, min_np=1, num_proc=4, max_np=4, faults=faults)
    assert done.faults == len(faults)
    assert_counted(done.results, 260, device)
    assert {result["backend"] for result in done.results} == {"elastic_gloo"}, "NCCL takes no two ranks on one GPU"
    assert done.sizes[0] == 4
    assert min(done.sizes[1:]) < 4, "survivors do not wait for newcomers"
    assert max(done.sizes[1:]) == 4, "newcomers join"
    used = done.of("gpu_used")
    assert all(event["values"]["memory"] > 0 and 0 <= event["values"].get("utilization", 0) <= 100 for event in used)
    assert bool(used) == (device.type == "cuda")


@pytest.mark.parametrize("commit", ["copy", "host", "in_place"])
def test_a_kill_at_any_point_of_a_commit_loses_and_repeats_no_step(
    run: Callable[..., Any], device: torch.device, commit: str
) -> None:
    """The copy is enqueued at RECORDED and COMMITTED, and the GPU is busy ahead of it."""
    points = [Point.COMMIT, Point.RECORDED, Point.COMMITTED, Point.RECORDED]
    faults = [kill(rank=number % 2, step=6 * (number + 1), at=point) for number, point in enumerate(points)]
    done = run(gpu_training.count_steps, 30, commit, 0.0, BUSY, min_np=2, num_proc=2, max_np=2, faults=faults)
    assert done.faults == len(faults)
    assert_counted(done.results, 30, device)
    assert len(done.sizes) == 1 + len(faults)


def test_a_scale_of_gradients_goes_on_after_a_kill(run: Callable[..., Any], device: torch.device) -> None:
    """It doubles every seven steps, wherever these were made."""
    faults = [kill(rank=1, step=10), kill(rank=0, step=19)]
    done = run(gpu_training.count_steps, 30, "copy", 0.0, 0, True, min_np=2, num_proc=2, max_np=2, faults=faults)
    assert_counted(done.results, 30, device)
    assert {result["scale"] for result in done.results} == {1024.0 * 2 ** (30 // 7)}


def test_random_numbers_of_the_device_are_those_of_the_last_commit_again(run: Callable[..., Any]) -> None:
    drawn = run(gpu_training.draw, 12, 6, min_np=1, num_proc=2, max_np=2).results[0]
    numbers: dict[int, set[float]] = {}
    for step, number in drawn:
        numbers.setdefault(step, set()).add(number)
    assert len(drawn) == 13, "the step in which the other rank was lost was made twice"
    assert all(len(found) == 1 for found in numbers.values()), "and drew the same number again"
    assert len({number for found in numbers.values() for number in found}) == 12


def test_a_compiled_network_goes_on_after_a_reset(run: Callable[..., Any], device: torch.device) -> None:
    compiler = "inductor" if device.type == "cuda" else "aot_eager"
    arguments = (20, "copy", 0.0, 0, False, compiler)
    done = run(gpu_training.count_steps, *arguments, min_np=1, num_proc=2, max_np=2, faults=[kill(rank=1, step=10)])
    assert done.faults == 1
    assert_counted(done.results, 20, device)


@pytest.mark.parametrize("commit", ["copy", "host", "in_place"])
def test_a_network_that_moves_to_the_device_in_the_elastic_function_is_reduced_there(
    run: Callable[..., Any], device: torch.device, commit: str
) -> None:
    """Its wrapper, its first commit and what newcomers get were made on the CPU."""
    arguments = (20, commit, 0.0, 0, False, "", True)
    done = run(gpu_training.count_steps, *arguments, min_np=1, num_proc=2, max_np=2, faults=[kill(rank=1, step=10)])
    assert done.faults == 1
    assert_counted(done.results, 20, device)


@pytest.mark.gpu
def test_a_graph_that_was_captured_once_computes_with_restored_weights(run: Callable[..., Any]) -> None:
    done = run(gpu_training.replay_a_graph, 20, min_np=1, num_proc=2, max_np=2, faults=[kill(rank=1, step=10)])
    assert {result["step"] for result in done.results} == {20}
    assert all(result["worst"] <= 1e-6 for result in done.results)
    assert done.results[0]["generation"] > 1


@pytest.mark.parametrize("rank", [None, 1], ids=["all ranks", "one rank"])
def test_running_out_of_memory_ends_the_job_with_the_users_traceback_and_no_loop_of_resets(
    run: Callable[..., Any], device: torch.device, rank: int | None
) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        run(gpu_training.run_out_of_memory, rank, 3, min_np=2, num_proc=2, max_np=2)
    said = str(caught.value)
    assert "OutOfMemoryError" in said if device.type == "cuda" else "can't allocate memory" in said
    assert "run_out_of_memory" in said
    # The third time without a commit in between is the last one; each may cost a second world, which was being formed.
    events = [event["event"] for event in caught.value.events]  # type: ignore[attr-defined]
    assert events.count("world_formed") <= 6


def test_an_exception_of_a_rank_on_the_device_is_retried_from_the_last_commit(
    run: Callable[..., Any], device: torch.device
) -> None:
    done = run(gpu_training.count_steps, 20, min_np=2, num_proc=2, max_np=2, faults=[raise_error(rank=1, step=10)])
    assert_counted(done.results, 20, device)


def test_a_world_of_one_takes_nccl_and_keeps_count_over_all_kinds_of_commits(
    run_alone: Callable[..., Any], device: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    for commit in ("copy", "host", "in_place"):
        done = run_alone(gpu_training.count_steps, 20, commit, 0.0, BUSY // 10)
        assert_counted(done.results, 20, device)
        assert ("nccl" in done.results[0]["backend"]) == (device.type == "cuda")
    assert "ProcessGroupNCCL" not in capfd.readouterr().err, "torch warns of generations that are over"


# ---------------------------------------------------------------- two GPUs and more: NCCL among ranks


@pytest.mark.gpu
@pytest.mark.parametrize("commit", ["copy", "host", "in_place"])
def test_over_nccl_a_kill_at_any_point_of_a_commit_loses_and_repeats_no_step(
    run_on_all: Callable[..., Any], device: torch.device, commit: str
) -> None:
    """Both steps of the abort: copies are looked at before any rank aborts NCCL, and what was pending then is no commit."""
    points = [Point.COMMIT, Point.RECORDED, Point.COMMITTED]
    faults = [kill(rank=number % 2, step=6 * (number + 1), at=point) for number, point in enumerate(points)]
    done = run_on_all(gpu_training.count_steps, 25, commit, 0.0, BUSY, min_np=1, faults=faults)
    assert done.faults == len(faults)
    assert_counted(done.results, 25, device)
    assert all("nccl" in result["backend"] for result in done.results)


@pytest.mark.gpu
def test_over_nccl_a_rank_that_stops_or_leaves_does_not_hold_the_others_in_a_collective(
    run_on_all: Callable[..., Any], device: torch.device
) -> None:
    faults = [stop(rank=1, step=15), drain(rank=0, step=60)]
    done = run_on_all(gpu_training.count_steps, 100, "copy", 0.02, min_np=1, heartbeat_timeout=3.0, faults=faults)
    assert done.faults == len(faults)
    assert_counted(done.results, 100, device)
