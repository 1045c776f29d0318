"""Jobs that train on shards: the same bits whether one worker trains or several, undisturbed or with kills and joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_training

from spark_elastic import TrainingFailedError
from spark_elastic.testing import kill

cloudpickle.register_pickle_by_value(shard_training)

STEPS = 16


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """234 rows of 16 numbers and a class, in row groups of odd sizes."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((234, 16)).astype(np.float32)
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 16), "y": pa.array(rng.integers(0, 3, 234))}
    )
    pq.write_table(table, folder / "part-0.parquet", row_group_size=31)
    return folder.as_uri()


def alone(run: Any, url: str | None) -> str:
    result = run(shard_training.train_on_shards, STEPS, url, num_proc=1, min_np=1, max_np=1)
    assert len(set(result.results[0]["losses"])) == STEPS
    return str(result.results[0]["digest"])


def test_three_workers_with_kills_and_joins_leave_the_bits_of_one(run: Any, rows: str) -> None:
    # Planned resets make commits of their own, which count as steps here.
    faults = [kill(rank=1, step=3), kill(rank=0, step=7), kill(rank=2, step=14)]
    result = run(
        shard_training.train_on_shards, STEPS, rows, {5: 3, 9: 3}, faults=faults, num_proc=3, min_np=1, max_np=3
    )
    assert result.faults == len(faults)
    assert {2, 3} <= set(result.sizes)
    assert {each["digest"] for each in result.results} == {alone(run, rows)}


def test_a_job_goes_on_from_a_durable_checkpoint_in_a_world_of_another_size(run: Any, tmp_path: Path) -> None:
    for steps, size in ((9, 2), (STEPS, 3)):
        result = run(
            shard_training.train_on_shards, steps, checkpoint=tmp_path.as_uri(), checkpoint_interval=0, num_proc=size,
            min_np=size, max_np=size,
        )  # fmt: skip
    assert {each["digest"] for each in result.results} == {alone(run, None)}


def train_beside_parts(with_module: bool) -> None:
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = se.data.ElasticDataLoader(torch.ones(8, 2), global_batch_size=8, shards=2)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader)

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            (model.module if with_module else model)(batch[0]).sum().backward()
            optimizer.step()
            state.commit()

    train(state)


@pytest.mark.parametrize("with_module", [False, True], ids=["forward", "backward"])
def test_training_beside_the_loop_ends_the_job_with_the_lines_to_write(run: Any, with_module: bool) -> None:
    with pytest.raises(TrainingFailedError, match=r"for part in state\.model\.parts"):
        run(train_beside_parts, with_module, num_proc=1, min_np=1, max_np=1)


def train_with_threads(folder: str) -> int:
    """The first worker to come has one thread, all others have two."""
    import os

    import torch

    import spark_elastic as se

    try:
        os.close(os.open(f"{folder}/first", os.O_CREAT | os.O_EXCL))
        torch.set_num_threads(1)
    except FileExistsError:
        torch.set_num_threads(2)
    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = se.data.ElasticDataLoader(torch.ones(8, 2), global_batch_size=8, shards=2)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader)

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            for part in model.parts(batch):
                model(part).sum().backward()
            optimizer.step()
            state.commit()

    train(state)
    return torch.get_num_threads()


def test_workers_with_other_kernels_end_the_job_with_both_named(run: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"threads was \d and is \d here"):
        run(train_with_threads, str(tmp_path), num_proc=2, min_np=2, max_np=2)
