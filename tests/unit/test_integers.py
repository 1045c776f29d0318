"""Whole numbers that users give: every argument takes and refuses the same, and says so in the same words."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import spark_elastic as se
from spark_elastic import testing
from spark_elastic._integers import whole_number
from spark_elastic.data.ngram import NGram
from spark_elastic.data.predicates import in_pseudorandom_split
from spark_elastic.driver.settings import JobSettings, check_sizes
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.launchers.resources import TaskResources
from spark_elastic.worker.optimizers.scaling import micro_batches, scale_learning_rate


def _parquet(folder: Path, **arguments: Any) -> object:
    path = folder / "rows.parquet"
    if not path.exists():
        pq.write_table(pa.table({"x": [1.0, 2.0]}), path)
    return se.data.ParquetLoader(str(path), **arguments)


def _taken_away(count: Any) -> None:
    cluster = LocalCluster(2)
    cluster.take_away(count)
    cluster.give_back(count)


def _settings(**given: Any) -> object:
    return JobSettings(**{"min_np": 1, "max_np": 3, "num_proc": 2, **given})


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


# By the name in the message: a function that gives the argument a value, the smallest value that is taken, and an ordinary one.
ARGUMENTS: dict[str, tuple[Callable[[Path, Any], object], int | None, int]] = {
    "reset_limit": (lambda _, value: _settings(reset_limit=value), 0, 3),
    "driver_port": (lambda _, value: _settings(driver_port=value), 0, 4040),
    "num_proc": (lambda _, value: check_sizes(1, value, 3), None, 2),
    "resources: cpus": (lambda _, value: TaskResources.of({"cpus": value}), 1, 2),
    "slots": (lambda _, value: LocalCluster(value).close(), 1, 2),
    "batch_size": (lambda folder, value: _parquet(folder, batch_size=value), 1, 2),
    "global_batch_size": (lambda folder, value: _parquet(folder, global_batch_size=value), 1, 2),
    "shards": (lambda folder, value: _parquet(folder, global_batch_size=8, shards=value), 1, 2),
    "seed": (lambda folder, value: _parquet(folder, batch_size=1, seed=value), 0, 3),
    "shuffle_rows": (lambda folder, value: _parquet(folder, batch_size=1, shuffle_rows=value), 0, 3),
    "prefetch": (lambda folder, value: _parquet(folder, batch_size=1, prefetch=value), 1, 3),
    "epoch": (lambda folder, value: _parquet(folder, batch_size=1).set_epoch(value), 0, 3),  # type: ignore[attr-defined]
    "the offset of each list of fields": (lambda _, value: NGram({value: ["x"]}, 1, "t"), None, -1),
    "subset_index": (lambda _, value: in_pseudorandom_split([0.5, 0.5], value, "x"), 0, 1),
    "redundancy": (lambda _, value: se.TorchState(commit="sharded", redundancy=value), 1, 2),
    "warmup_steps": (lambda _, value: scale_learning_rate(_optimizer(), warmup_steps=value), 0, 2),
    "rows": (lambda _, value: list(micro_batches(_Bare(), torch.ones(2, 1), value)), 1, 2),  # type: ignore[arg-type]
    "rank": (lambda _, value: testing.kill(rank=value), 0, 1),
    "times": (lambda _, value: testing.kill(times=value), 1, 2),
    "code": (lambda _, value: testing.exit_with(code=value), 0, 1),
    "count": (lambda _, value: _taken_away(value), 1, 2),
}


class _Bare:
    """As much of a model as is needed where nothing accumulates."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_takes_the_same_whole_numbers(name: str, tmp_path: Path) -> None:
    give, _, value = ARGUMENTS[name]
    for same in (value, np.int64(value), np.int16(value)):
        give(tmp_path, same)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    "wrong", [True, 1.5, 1.0, np.float32(1), np.bool_(1), "1", float("nan"), Fraction(1), "smaller"]
)
def test_every_argument_refuses_the_same_in_the_same_words(name: str, wrong: Any, tmp_path: Path) -> None:
    give, least, _ = ARGUMENTS[name]
    if wrong == "smaller":
        if least is None:
            return
        wrong = least - 1
    with pytest.raises(ValueError, match=f"^{name} must be a whole number") as told:
        give(tmp_path, wrong)
    assert repr(wrong) in str(told.value)


@pytest.mark.parametrize("name", ["min_np", "num_proc", "max_np", "checkpoint_keep"])
def test_run_refuses_the_same_before_anything_starts(name: str) -> None:
    for wrong in (True, 1.5, 1.0, np.float32(1), "1", 0):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number from 1 on, not "):
            se.run(int, local=True, **{name: wrong})


def test_a_whole_number_of_numpy_is_returned_as_pythons() -> None:
    assert type(whole_number("n", np.uint8(3))) is int
