"""The examples with other libraries' loops and Trainers: with workers lost on the way they end where an undisturbed loop ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from examples_here import example, run_main

from spark_elastic.data import ElasticDataLoader
from spark_elastic.testing import kill

ITEMS, EPOCHS = 1000, 2
STEPS = 16  # an epoch, in batches of 64
COURSE = ["--workers", "3", "--items", str(ITEMS), "--epochs", str(EPOCHS)]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Keep what these libraries write into the environment from other tests."""
    with mock.patch.dict(os.environ):
        yield


def assert_all_are(expected: dict[str, Any], results: list[dict[str, Any]]) -> None:
    assert len({result["weights"] for result in results}) == 1
    for result in results:
        assert result == pytest.approx(expected, rel=1e-3)


def test_a_loop_of_accelerate_goes_on_in_memory(spark: Any) -> None:
    results = run_main("accelerate_loop", *COURSE, "--precision", "no", faults=[kill(rank=0, step=20)])
    assert_all_are(example("accelerate_loop").train_fn(ITEMS, EPOCHS, "no"), results)


def test_a_loop_of_fabric_goes_on_in_memory() -> None:
    results = run_main("fabric", *COURSE, "--precision", "32-true", "--local", faults=[kill(rank=0, step=20)])
    assert_all_are(example("fabric").train_fn(ITEMS, EPOCHS, "32-true"), results)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_lightning_goes_on_in_memory_between_two_epochs_and_within_one() -> None:
    # Of an epoch, the commits are one at its start and one for each batch but the last, which the next epoch's start commits.
    between, within = kill(rank=0, step=STEPS + 1, at="committed"), kill(rank=1, step=STEPS + 10)
    results = run_main("lightning_trainer", *COURSE, "--local", faults=[between, within])
    assert_all_are(by_hand(example("lightning_trainer")), results)


def by_hand(script: Any) -> dict[str, Any]:
    """Train the same module without a Trainer."""
    torch.manual_seed(0)
    lit = script.LitNet()
    (optimizer,), (scheduler,) = lit.configure_optimizers()
    loader = ElasticDataLoader(script.Digits(ITEMS), global_batch_size=64)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(lit.net(pictures), labels).backward()
            optimizer.step()
        scheduler.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in lit.parameters()])
    rate = optimizer.param_groups[0]["lr"]
    return {"items": EPOCHS * ITEMS, "right": 1.0, "rate": rate, "weights": weights.double().abs().sum().item()}


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_goes_on_in_memory_between_two_epochs_and_within_one() -> None:
    between, within = kill(rank=0, step=STEPS, at="committed"), kill(rank=1, step=STEPS + 9)
    results = run_main("huggingface_trainer", *COURSE, "--local", faults=[between, within])
    alone = example("huggingface_trainer").train_fn(ITEMS, EPOCHS)
    for result in [*results, alone]:
        assert 0 < result.pop("loss") < 0.1  # of this rank's rows
    assert_all_are(alone, results)
