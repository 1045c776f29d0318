"""Every row counts exactly once an epoch, shown by the model itself, through losses at every kind of place."""

from __future__ import annotations

from typing import Any

import pytest
import training

from spark_elastic.testing import Fault, Point, kill

ROWS = 1000
EPOCHS = 2
# 1000 rows in global batches of 64 are 15 steps and a tail of 40; then the commit that ends the epoch.
STEPS = 16 + 1


def check(run: Any, epochs: int = EPOCHS) -> None:
    for result in run.results:
        assert result["seen"] == pytest.approx([epochs] * ROWS)
        assert result["val"] == pytest.approx(epochs * ROWS)
        assert result["seen"] == run.results[0]["seen"]


@pytest.mark.parametrize(
    "faults",
    [
        [kill(rank=1, step=5), kill(rank=0, step=9, at=Point.RECORDED)],
        [kill(rank=1, step=STEPS - 1), kill(rank=0, step=STEPS)],
        [kill(rank=1, step=2 * STEPS), kill(rank=0, at=Point.RETURN)],
    ],
    ids=["in mid-epoch", "at the epoch's end", "during the last commit and after one rank has left"],
)
def test_the_training_function_of_the_documentation_counts_every_row_once(
    run: Any, dataset: str, faults: list[Fault]
) -> None:
    result = run(
        training.count_rows, dataset, ROWS, EPOCHS, {"global_batch_size": 64}, faults=faults,
        min_np=1, max_np=3, num_proc=3,
    )  # fmt: skip
    check(result)
    assert result.faults == len(faults)


def test_a_batch_size_per_worker_counts_every_row_once_through_a_loss_and_a_return(run: Any, dataset: str) -> None:
    faults = [kill(rank=2, step=4), kill(rank=0, step=20)]
    result = run(
        training.count_rows, dataset, ROWS, 4, {"batch_size": 7}, faults=faults, min_np=1, max_np=3, num_proc=3
    )
    check(result, 4)
    assert result.faults == 2
