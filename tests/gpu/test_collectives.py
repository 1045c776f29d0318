"""Collectives of tensors on a device: over Gloo among ranks that share it, over NCCL in a world of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_training
import pytest
import torch


def test_collectives_of_this_package_and_of_torch_take_tensors_of_the_device(
    run: Callable[..., Any], device: torch.device
) -> None:
    done = run(gpu_training.meet, num_proc=3, min_np=3, max_np=3)
    for rank, found in enumerate(done.results):
        assert found.pop("devices") == {device.type}
        assert found == {
            "mean": 1.0, "sum": 3.0, "broadcast": 2.0, "gathered": [0.0, 1.0, 2.0], "objects": [0, 1, 2],
            "reduced": 3.0, "normalized": pytest.approx(0.0, abs=1e-6), "rank": rank,
        }  # fmt: skip


def test_alone_they_do_so_over_nccl(run_alone: Callable[..., Any], device: torch.device) -> None:
    (found,) = run_alone(gpu_training.meet).results
    assert found.pop("devices") == {device.type}
    assert (found["sum"], found["gathered"], found["objects"]) == (0.0, [0.0], [0])


@pytest.mark.parametrize("aside", [False, True], ids=["one stream", "a stream of one's own"])
def test_gradients_are_whole_when_backward_returns(run: Callable[..., Any], aside: bool) -> None:
    """Gloo's copies back to the device run on streams of their own, which whoever reads the gradients has to wait for."""
    done = run(gpu_training.reduce_large_gradients, 12, aside, num_proc=2, min_np=2, max_np=2)
    assert [result["wrong"] for result in done.results] == [0, 0]
