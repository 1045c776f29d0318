"""Windows of rows, which a loader counts, orders and shares out like rows."""

from __future__ import annotations

import collections
import datetime as dt
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import World, make_table

from spark_elastic.data import NGram, ParquetLoader
from spark_elastic.data.predicates import in_lambda
from spark_elastic.errors import DataError

PAIRS = NGram({-1: ["id", "x"], 0: ["id"]}, 1, "id")


def first_rows() -> list[int]:
    """The rows that begin a window of two in the dataset, which is cut into these row groups."""
    edges = np.cumsum([0, 30, 1, 0, 57, 12, 100, 3])
    return [row for row in range(203) if row + 1 not in edges]


def test_a_batch_stacks_what_each_row_of_a_window_has(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, ngram=PAIRS, shuffle=False, with_row_ids=True)
    assert loader.rows_total == len(first_rows()) == 197
    batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [16] * 12 + [5]
    assert (batches[0]["id"].shape, batches[0]["x"].shape) == ((16, 2), (16, 1, 2))
    found = [tuple(pair) for batch in batches for pair in batch["id"].tolist()]
    assert found == [(row, row + 1) for row in first_rows()]
    assert [x for batch in batches for x in batch["x"].tolist()] == [[[row, row + 0.5]] for row in first_rows()]
    edges = np.cumsum([0, *[group.rows for group in loader.manifest]])
    for batch in batches:
        assert (edges[batch["_row_group"]] + batch["_row"].numpy()).tolist() == batch["id"][:, 0].tolist()


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("overlap", [True, False])
def test_windows_are_the_same_whatever_is_decoded_at_once(
    dataset: Path, chunk: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ngram = NGram({0: ["id"], 1: ["id"], 2: ["id"]}, 1, "id", overlap)
    expected = [batch["id"].tolist() for batch in ParquetLoader(dataset, 16, ngram=ngram)]
    loader = ParquetLoader(dataset, 16, ngram=ngram)
    monkeypatch.setattr(loader, "_chunk", chunk)
    assert [batch["id"].tolist() for batch in loader] == expected


def test_windows_follow_the_rows_that_pass(dataset: Path) -> None:
    even = in_lambda(["id"], lambda row: row % 2 == 0)
    ngram = NGram({0: ["id"], 1: ["id"]}, 2, "id")
    loader = ParquetLoader(dataset, 16, ngram=ngram, predicate=even, filters=[("id", "<", 30)], shuffle=False)
    found = [tuple(pair) for batch in loader for pair in batch["id"].tolist()]
    assert found == [(row, row + 2) for row in range(0, 28, 2)]


class Windows(World):
    """A world whose rows are windows, known by their first row."""

    def form(self, size: int, keep: int = 0) -> None:
        super().form(size, keep)
        self.iterators = [({"id": batch["id"][:, 0]} for batch in iterator) for iterator in self.iterators]


@pytest.mark.parametrize(
    "sizes", [{"global_batch_size": 24}, {"global_batch_size": 24, "shards": 4}, {"batch_size": 8}]
)
def test_each_window_counts_once_through_resets(dataset: Path, sizes: dict[str, int]) -> None:
    world = Windows(lambda: ParquetLoader(dataset, ngram=PAIRS, **sizes), 3)
    world.train_through_a_loss()
    assert world.counted == collections.Counter((0, row) for row in first_rows())


def test_a_position_belongs_to_the_same_windows(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, ngram=PAIRS)
    next(iter(loader))
    loader.close()
    state = loader.state_dict()
    other_columns = NGram({0: ["id"], 1: []}, 1, "id")
    ParquetLoader(dataset, 16, ngram=other_columns).load_state_dict(state)
    with pytest.raises(ValueError, match="the loader's state was saved with ngram=\"2 rows, 'id' at most 1 apart\""):
        ParquetLoader(dataset, 16, ngram=NGram({0: ["id"], 1: ["id"]}, 1, "id", False)).load_state_dict(state)
    with pytest.raises(ValueError, match="the loader's state was saved with ngram=None"):
        ParquetLoader(dataset, 16, ngram=PAIRS).load_state_dict(ParquetLoader(dataset, 16).state_dict())
    with pytest.raises(DataError, match="the dataset has changed since the state was saved: rows"):
        ParquetLoader(dataset, 16).load_state_dict(state)


def test_a_transform_makes_the_columns_of_windows(tmp_path: Path) -> None:
    columns = {"t": pa.array(range(5), pa.timestamp("us")), "word": pa.array(["a", "bb", "c", "dd", "e"])}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")

    def letters(table: pa.Table) -> dict[str, Any]:
        return {"letters": np.array([len(word) for word in table["word"].to_pylist()]), "unused": np.zeros(len(table))}

    loader = ParquetLoader(
        tmp_path, 2, ngram=NGram({0: ["letters"], 1: ["letters"]}, 1000, "t"), transform=letters, columns=["word"],
        shuffle=False,
    )  # fmt: skip
    batches = list(loader)
    assert all(set(batch) == {"letters"} for batch in batches)
    assert [pair for batch in batches for pair in batch["letters"].tolist()] == [[1, 2], [2, 1], [1, 2], [2, 1]]
    missing = ParquetLoader(tmp_path, 2, ngram=NGram({0: ["nope"], 1: []}, 1000, "t"), transform=letters)
    with pytest.raises(
        DataError, match=r"p.parquet, row group 0: ngram: there is no column 'nope' among letters, unused"
    ):
        list(missing)


def test_lists_of_several_lengths_are_refused(tmp_path: Path) -> None:
    table = make_table(np.arange(8)).append_column("v", pa.array([[1.0] * (1 + row // 4) for row in range(8)]))
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="ngram: 'v' has lists of several lengths"):
        ParquetLoader(tmp_path, 2, ngram=NGram({0: ["v"]}, 1, "id"))
    for chunk in (2, 100):
        loader = ParquetLoader(tmp_path, 2, ngram=NGram({0: [re.compile("v")], 1: ["id"]}, 1, "id"))
        loader._chunk = chunk
        with pytest.raises(DataError, match="column 'v' has values of several lengths, which cannot be stacked"):
            list(loader)


def test_timestamps_that_fall_or_are_missing_name_the_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": [1, 3, 2], "n": [1, None, 3]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p.parquet, row group 0: 't' must not fall, but is 3, then 2"):
        ParquetLoader(tmp_path, 2, ngram=NGram({0: ["t"], 1: ["t"]}, 1, "t"))
    with pytest.raises(DataError, match=r"p.parquet, row group 0: the timestamps 'n' have 1 nulls"):
        ParquetLoader(tmp_path, 2, ngram=NGram({0: ["t"], 1: ["t"]}, 1, "n"))


@pytest.mark.parametrize(
    "times",
    [
        pa.array([1, 2**63 + 1], pa.uint64()),
        pa.array([dt.datetime(1, 1, 1), dt.datetime(9999, 1, 1)], pa.timestamp("us")),
    ],
    ids=["integers", "dates"],
)
def test_timestamps_beyond_64_bits_name_the_row_group_and_the_column(tmp_path: Path, times: pa.Array) -> None:
    pq.write_table(pa.table({"t": times, "x": [1.0, 2.0]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p.parquet, row group 0: the timestamps 't' do not fit into 64-bit integers"):
        ParquetLoader(tmp_path, 2, ngram=NGram({0: ["x"], 1: ["x"]}, 1, "t"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ngram": NGram({0: ["id"]}, 1, "nope")}, "timestamp_field='nope' is not in the files, which have id, x"),
        ({"ngram": NGram({0: ["id"]}, 1, "x")}, "timestamp_field='x' is list<"),
        ({"ngram": NGram({0: ["nope"]}, 1, "id")}, "columns: 'nope' is not in the dataset"),
        ({"ngram": NGram({0: [re.compile("n")]}, 1, "id")}, "columns: 'n' matches no column"),
        (
            {"ngram": PAIRS, "columns": ["id"]},
            "give columns= or ngram=, whose fields say which columns are read, not both",
        ),
        ({"ngram": {0: ["id"]}}, "ngram must be an NGram, not {0: ['id']}"),
    ],
)
def test_windows_that_do_not_fit_are_refused(dataset: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ParquetLoader(dataset, 16, **arguments)


def test_offsets_may_have_gaps_and_patterns(dataset: Path) -> None:
    gap = NGram({3: [re.compile("id|nothing")], 0: ["id", re.compile("i.")]}, 1, "id")
    found = [tuple(pair) for batch in ParquetLoader(dataset, 16, ngram=gap) for pair in batch["id"].tolist()]
    assert sorted(found) == [(row, row + 3) for row in range(203) if {row, row + 1, row + 2} <= set(first_rows())]
