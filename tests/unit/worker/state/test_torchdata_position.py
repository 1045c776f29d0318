"""A loader of torchdata's whose dataset has no state goes on where it was, and counts batches once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from spark_elastic.worker.state.torchdata_position import read_forward


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def loader(kind: Any, position: Any = None) -> Any:
    made: Any = StatefulDataLoader(kind(), batch_size=2)
    if position is not None:
        made.load_state_dict(position)
        read_forward(made)
    return made


def position_after(made: Any, batches: int) -> Any:
    for _ in zip(range(batches), made, strict=False):
        pass
    return made.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("kind", [Stream, Numbers])
def test_a_loader_that_is_set_back_again_and_again_goes_on_with_the_next_batch(kind: Any) -> None:
    position = position_after(loader(kind), 2)
    for number in (2, 3, 4):  # after two batches, then after one more each
        made = loader(kind, position)
        assert made.state_dict()["_num_yielded"] == number
        batches = iter(made)
        assert next(batches).tolist() == [2 * number, 2 * number + 1]
        position = made.state_dict()
        assert position["_num_yielded"] == position["_sampler_iter_yielded"] == number + 1


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_other_loaders_and_those_without_a_position_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader(Stream)
    read_forward(made)
    assert made._iterator is None, "nothing has been read"
    read_forward(torch.utils.data.DataLoader(Numbers()))
    read_forward(object())
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader")
    read_forward(made)
