"""A stream with a position of its own, torchdata's StatefulDataLoader over an iterable dataset, as the loader of a State."""

from __future__ import annotations

import io
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import spark_elastic as se
from spark_elastic.testing import drain, kill

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, BATCH = 240, 4


class Stream(torch.utils.data.IterableDataset[int]):
    """Every rank reads the rows whose number leaves its rank as the remainder. It is asked for its rank at the first row."""

    def __iter__(self) -> Iterator[int]:
        yield from range(se.rank(), ROWS, se.size())


class CountingStream(Stream):
    """The same, with a position of its own, so that nothing has to be read again."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while (row := se.rank() + self.read * se.size()) < ROWS:
            self.read += 1
            yield row
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def shards_of_rank(urls: Iterable[str]) -> Iterator[str]:
    yield from (url for number, url in enumerate(urls) if number % se.size() == se.rank())


def web_dataset(urls: list[str]) -> Any:
    import webdataset

    dataset = webdataset.WebDataset(urls, nodesplitter=shards_of_rank, shardshuffle=False)
    return dataset.map(lambda sample: int(sample["txt"]))


def train_fn(dataset: Callable[[], Any], epochs: int) -> Counter[int]:
    model = se.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = StatefulDataLoader(dataset(), batch_size=BATCH)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, seen=Counter())

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.epoch < epochs:
            for rows in state.loader:
                optimizer.zero_grad()
                model(rows.float().unsqueeze(1)).mean().backward()
                optimizer.step()
                for one in se.allgather_object(rows.tolist()):
                    state.seen.update(one)
                state.commit()
            state.epoch += 1
            state.commit()

    train(state)
    return state.seen


# A position that is taken after a loss has to be right as well, which only a second loss shows.
FAULTS = pytest.mark.parametrize(
    "faults",
    [[kill(rank=1, step=9), kill(rank=1, step=20), kill(rank=0, step=40)], [drain(rank=0, step=20)]],
    ids=["kills", "drain"],
)


@pytest.mark.parametrize("dataset", [Stream, CountingStream])
@FAULTS
def test_a_stream_goes_on_from_its_position_in_a_world_of_the_same_size(run: Any, dataset: Any, faults: Any) -> None:
    assert_each_row_counts_twice(run(train_fn, dataset, 2, min_np=2, max_np=2, num_proc=2, faults=faults), len(faults))


@FAULTS
def test_a_web_dataset_goes_on_from_its_position_in_a_world_of_the_same_size(
    run: Any, faults: Any, tmp_path: Path
) -> None:
    urls = [
        write_shard(tmp_path / f"{first}.tar", range(first, first + ROWS // 4)) for first in range(0, ROWS, ROWS // 4)
    ]
    course = partial(web_dataset, urls)
    assert_each_row_counts_twice(run(train_fn, course, 2, min_np=2, max_np=2, num_proc=2, faults=faults), len(faults))


def write_shard(path: Path, rows: Iterable[int]) -> str:
    with tarfile.open(path, "w") as shard:
        for row in rows:
            content = str(row).encode()
            entry = tarfile.TarInfo(f"{row:03}.txt")
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    return str(path)


def assert_each_row_counts_twice(done: Any, faults: int) -> None:
    assert done.sizes == [2] * (1 + faults)
    assert all(seen == Counter(dict.fromkeys(range(ROWS), 2)) for seen in done.results)
