"""A thread reads ahead: how far, what becomes of its errors, and into which memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loaded_rows import batch_of, ids, table_of

from spark_elastic.data import ParquetLoader
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


def test_what_a_transform_raises_that_is_no_exception_ends_the_iteration(tmp_path: Path) -> None:
    def leave(table: pa.Table) -> None:
        raise SystemExit(3)

    with pytest.raises(DataError, match="reading ahead failed: SystemExit: 3"):
        batch_of(tmp_path, table_of(("v", [1, 2])), transform=leave)


def test_an_error_of_the_reader_reaches_the_consumer_and_iteration_can_start_again(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.data.arrow_engine import ArrowEngine

    loader = ParquetLoader(dataset, 16)
    with monkeypatch.context() as broken:
        broken.setattr(ArrowEngine, "read", lambda *_: iter([]))
        with pytest.raises(DataError, match="the file is not the one listed"):
            ids(loader)
    assert sorted(ids(loader)) == list(range(203))


def test_no_thread_is_started_before_iteration(dataset: Path) -> None:
    before = threading.active_count()
    loader = ParquetLoader(dataset, 16)
    loader.set_world(0, 2)
    assert threading.active_count() == before


def test_a_forked_child_can_read_while_its_parent_does(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            loader.set_epoch(1)
            code = 0 if sorted(ids(loader)) == list(range(203)) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    loader.close()


def test_read_ahead_is_bounded(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 4, prefetch=3)
    iterator = iter(loader)
    next(iterator)
    generator = iterator._batches.gi_frame.f_locals["opened"]
    ahead = generator.gi_frame.f_locals[".0"].gi_frame.f_locals["self"]
    for _ in range(20):
        next(iterator)
        assert len(ahead._ready) <= 2, "half of what may be read ahead waits, the other half is being built"
    loader.close()


def test_batches_share_the_pinned_memory_that_torch_gave_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a GPU there is no pinned memory. With one, torch keeps the block of a dropped batch from reuse while a copy
    # to the GPU still reads from it, but only for tensors that are views of what its allocator returned.
    given: list[torch.Tensor] = []
    lists_pinned: list[torch.Tensor] = []
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            given.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: lists_pinned.append(self) or self)
    lists = [[1.0] * (i % 3) for i in range(60)]
    pq.write_table(table_of(("id", pa.array(range(60))), ("v", pa.array(lists))), tmp_path / "one.parquet")
    batches = list(ParquetLoader(tmp_path / "one.parquet", 16, pin_memory=True))
    blocks = {tensor.untyped_storage()._cdata for tensor in given}
    assert all(batch["id"].untyped_storage()._cdata in blocks for batch in batches)
    assert len(lists_pinned) == len(batches)
    assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(60))
