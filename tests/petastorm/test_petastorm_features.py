"""What Petastorm's readers offer and ours has under the same names, row by row against Petastorm's own."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("petastorm")

import petastorm.ngram
import petastorm.predicates
import petastorm.pytorch
import petastorm.selectors
import pyarrow.parquet as pq
from petastorm import make_batch_reader, make_reader
from petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer
from petastorm.transform import TransformSpec
from petastorm.weighted_sampling_reader import WeightedSamplingReader
from petastorm_datasets import SCHEMA, reading, write_drive

from spark_elastic.data import NGram, ParquetLoader, WeightedSamplingLoader, predicates, selectors
from spark_elastic.data.rowgroup_index import INDEX_KEY

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drive(tmp_path_factory.mktemp("drive") / "data")


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


def test_a_list_of_files_is_read_in_the_same_order(drive: Path) -> None:
    files = [drive / "part-1.parquet", drive / "part-0.parquet"]
    with reading(files, make_batch_reader, schema_fields=["id", "speed"]) as reader:
        expected = [int(row) for batch in reader for row in batch.id]
    assert ids(ParquetLoader(files, 8, columns=["id", "speed"], shuffle=False)) == expected


@pytest.mark.parametrize("patterns", [["id|half"], ["s.*", "id"], ["p.s.", "i.?"], [".*e"]])
def test_patterns_choose_the_fields_that_they_choose_in_petastorm(drive: Path, patterns: list[str]) -> None:
    with reading(drive, schema_fields=patterns) as reader:
        expected = set(reader.schema.fields)
    columns = [re.compile(pattern) for pattern in patterns]
    (first, *_) = ParquetLoader(drive, 4, columns=columns, shuffle=False, filters=[("id", "<", 4)])
    assert set(first) == expected


# Each made by the names of a module of predicates, Petastorm's or ours.
PREDICATES = {
    "set of strings": lambda of: of.in_set({"car 1", "car 3"}, "car"),
    "set of numbers": lambda of: of.in_set([3, 5.0, 7], "id"),
    "null and NaN": lambda of: of.in_lambda(["half"], lambda half: half != half),
    "several fields": lambda of: of.in_lambda(["car", "pose"], lambda car, pose: car == "car 2" and pose[1] < -9),
    "with a state": lambda of: of.in_lambda(["labels"], lambda labels, least: len(labels) >= least, 3),
    "intersection": lambda of: of.in_intersection([7, 12, 30], "labels"),
    "not": lambda of: of.in_negate(of.in_set(range(10, 30), "id")),
    "and": lambda of: of.in_reduce([of.in_set(range(10, 30), "id"), of.in_set(["car 0"], "car")], all),
    "or": lambda of: of.in_reduce([of.in_set(range(10, 20), "id"), of.in_set(["car 0"], "car")], any),
    **{
        f"part {part} by {field}": lambda of, part=part, field=field: of.in_pseudorandom_split(
            [0.3, 0.3, 0.3], part, field
        )
        for part in range(3)
        for field in ("id", "time", "speed", "half", "car", "pose", "labels")
    },
}


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_pass_the_same_rows(drive: Path, name: str) -> None:
    with reading(drive, predicate=PREDICATES[name](petastorm.predicates)) as reader:
        expected = [(int(row.id), float(row.speed)) for row in reader]
    for module in (predicates, petastorm.predicates):
        loader = ParquetLoader(drive, 8, columns=["id", "speed"], predicate=PREDICATES[name](module), shuffle=False)
        found = [row for b in loader for row in zip(b["id"].tolist(), b["speed"].tolist(), strict=True)]
        assert found == expected


# Each made by the names of a module of selectors, Petastorm's or ours.
SELECTORS = {
    "one value": lambda of: of.SingleIndexSelector("by car", ["car 1"]),
    "values": lambda of: of.SingleIndexSelector("by id", [3, 31, 1000]),
    "no value": lambda of: of.SingleIndexSelector("by id", [-1]),
    "not null": lambda of: of.SingleIndexSelector("has half", ["Field is Not Null"]),
    "all of several": lambda of: of.IntersectIndexSelector(
        [of.SingleIndexSelector("by id", [3, 31]), of.SingleIndexSelector("has half", [None])]
    ),
    "any of several": lambda of: of.UnionIndexSelector(
        [of.SingleIndexSelector("by id", [3]), of.SingleIndexSelector("by id", [31])]
    ),
}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with indexes by Petastorm's indexers; ``half`` is null in all of the second row group."""
    root = write_drive(tmp_path_factory.mktemp("indexed") / "data")
    indexers = [
        SingleFieldIndexer("by car", "car"),
        SingleFieldIndexer("by id", "id"),
        FieldNotNullIndexer("has half", "half"),
    ]
    for piece in range(4):
        rows = [
            {"car": np.str_(f"car {row % 2 if piece else 4}"), "id": np.int64(row), "half": None if piece == 1 else 0.5}
            for row in range(10 * piece, 10 * piece + 10)
        ]
        for indexer in indexers:
            indexer.build_index(rows, piece)
    path = root / "_common_metadata"
    schema = pq.read_schema(path)
    index = pickle.dumps({indexer.index_name: indexer for indexer in indexers}, pickle.HIGHEST_PROTOCOL)
    pq.write_metadata(schema.with_metadata({**schema.metadata, INDEX_KEY: index}), path)
    return root


@pytest.mark.parametrize("engine", ["arrow", "petastorm"])
@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_select_the_same_row_groups(indexed: Path, name: str, engine: str) -> None:
    expected: list[int] = []
    if name != "no value":  # which Petastorm's reader refuses
        with reading(indexed, rowgroup_selector=SELECTORS[name](petastorm.selectors)) as reader:
            expected = [int(row.id) for row in reader]
    for module in (selectors, petastorm.selectors):
        loader = ParquetLoader(
            indexed, 8, columns=["id"], rowgroup_selector=SELECTORS[name](module), shuffle=False, engine=engine
        )
        assert ids(loader) == expected
        loader.close()
    arguments = {"rowgroup_selector": SELECTORS[name](petastorm.selectors), "batch_size": 8, "schema_fields": ["id"]}
    assert sorted(ids(ParquetLoader.from_reader_arguments(indexed, **arguments))) == sorted(expected)


def test_a_selector_goes_with_filters_predicates_and_windows(indexed: Path) -> None:
    selector = SELECTORS["any of several"](selectors)  # ids 0 to 9 and 30 to 39
    loader = ParquetLoader(
        indexed, 8, columns=["id"], rowgroup_selector=selector, shuffle=False, filters=[("id", ">", 5)],
        predicate=predicates.in_lambda(["id"], lambda row: row % 2 == 0),
    )  # fmt: skip
    assert ids(loader) == [6, 8, 30, 32, 34, 36, 38]
    window = NGram({0: ["id"], 1: ["id"]}, 1, "time")
    loader = ParquetLoader(indexed, 8, rowgroup_selector=selector, shuffle=False, ngram=window)
    found = [tuple(map(int, row)) for batch in loader for row in batch["id"]]
    assert found == [(row, row + 1) for row in (*range(9), *range(30, 39)) if row % 3 != 2]


def test_predicates_are_asked_also_where_petastorms_workers_read(drive: Path) -> None:
    predicate = predicates.in_set(["car 1"], "car")
    loader = ParquetLoader(drive, 8, columns=["id"], predicate=predicate, shuffle=False, engine="petastorm")
    assert ids(loader) == list(range(1, 40, 5))
    loader.close()


@pytest.mark.parametrize("predicate", [None, "every second row"])
@pytest.mark.parametrize("engine", ["arrow", "petastorm"])
@pytest.mark.parametrize(
    ("fields", "delta", "overlap"),
    [
        ({-1: ["id", "pose"], 0: ["id", "time", "speed"]}, 1, True),
        ({-1: ["id", "pose"], 0: ["id", "time", "speed"]}, 5, True),
        ({0: ["id"], 1: ["id"], 2: ["id", "time"]}, 5, False),
        ({0: ["id"], 1: ["id"], 2: ["id", "time"]}, 1, False),
        ({-2: ["id", "time"], 1: ["id", "p.s."]}, 8, True),
        ({5: ["id", "time"]}, 0, True),
    ],
)
def test_windows_are_the_same(
    drive: Path, fields: dict[int, list[str]], delta: int, overlap: bool, engine: str, predicate: str | None
) -> None:
    passes = petastorm.predicates.in_lambda(["id"], lambda row: row % 4 < 2) if predicate else None
    schema = petastorm.ngram.NGram({**fields}, delta, "time", overlap)
    expected: list[dict[str, list[Any]]] = []
    with reading(drive, schema_fields=schema, predicate=passes) as reader:
        for window in reader:
            stacked: dict[str, list[Any]] = {}
            for offset in sorted(window):
                for name, value in window[offset]._asdict().items():
                    stacked.setdefault(name, []).append(value.tolist())
            expected.append(stacked)
    ours = NGram({offset: [re.compile(name) for name in fields[offset]] for offset in fields}, delta, "time", overlap)
    loader = ParquetLoader(drive, 4, ngram=ours, predicate=passes, shuffle=False, engine=engine)
    found = [
        {name: batch[name][row].tolist() for name in batch} for batch in loader for row in range(loader.batch_rows[0])
    ]
    assert found == expected
    assert loader.rows_total == len(expected)
    loader.close()


def arguments_of_readers() -> set[str]:
    return {name for make in (make_reader, make_batch_reader) for name in inspect.signature(make).parameters}


def test_every_argument_of_a_reader_has_its_place(drive: Path) -> None:
    """Each is taken with its default; what the loader would get of an argument that it does not know is a TypeError."""
    defaults = {
        name: parameter.default
        for make in (make_reader, make_batch_reader)
        for name, parameter in inspect.signature(make).parameters.items()
        if not name.startswith("dataset_url")
    }
    loader = ParquetLoader.from_reader_arguments(drive, batch_size=8, **{**defaults, "schema_fields": ["id"]})
    assert sorted(ids(loader)) == list(range(40))
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "petastorm.md").read_text(encoding="utf-8")
    assert {name for name in arguments_of_readers() if f"`{name}" not in page} == set()


def test_every_argument_of_a_loader_has_its_place_or_is_refused_with_advice(drive: Path) -> None:
    makers = (
        petastorm.pytorch.DataLoader,
        petastorm.pytorch.BatchedDataLoader,
        petastorm.pytorch.InMemBatchedDataLoader,
    )
    for name in {name for make in makers for name in inspect.signature(make).parameters}:
        given = {"columns": ["id"], "batch_size": 8, name: 8}
        if name in ("reader", "collate_fn", "transform_fn", "num_epochs", "rows_capacity"):
            with pytest.raises(ValueError, match=f"{name}=.* has no counterpart: "):
                ParquetLoader.from_reader_arguments(drive, **given)
        elif name == "shuffle":
            with pytest.raises(ValueError, match="shuffle= is given twice"):
                ParquetLoader.from_reader_arguments(drive, **given)
        else:
            assert ParquetLoader.from_reader_arguments(drive, **given).rows_total == 40


def test_a_loader_takes_a_readers_arguments(drive: Path) -> None:
    schema = petastorm.ngram.NGram({0: [SCHEMA.id, "s.*"], 1: [SCHEMA.time]}, 1, SCHEMA.time)
    passes = petastorm.predicates.in_lambda(["id"], lambda row: row % 5 in (1, 2))
    loader = ParquetLoader.from_reader_arguments(
        f"file://{drive}",
        batch_size=4,
        schema_fields=schema,
        predicate=passes,
        workers_count=2,
        shuffle_row_groups=False,
    )
    found = [
        (row[0], speed[0])
        for batch in loader
        for row, speed in zip(batch["id"].tolist(), batch["speed"].tolist(), strict=True)
    ]
    with reading(drive, schema_fields=schema, predicate=passes) as reader:
        expected = [(window[0].id, window[0].speed) for window in reader]
    assert found == expected
    assert expected
    spec = TransformSpec(lambda row: {"twice": 2 * row["id"]}, [("twice", np.int64, (), False)], removed_fields=["id"])
    spec_loader = ParquetLoader.from_reader_arguments(
        drive, batch_size=4, schema_fields=["id"], transform_spec=spec, shuffle_row_groups=False, workers_count=1
    )
    assert [int(value) for batch in spec_loader for value in batch["twice"]] == list(range(0, 80, 2))
    spec_loader.close()


def test_a_mix_has_the_rows_of_each_dataset_in_the_order_that_petastorm_gives_them(
    drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "float", float, raising=False)  # which newer releases of NumPy do not have any more
    other = write_drive(tmp_path / "other", rows=80)
    np.random.seed(0)  # by which Petastorm's reader chooses
    with reading(drive, schema_fields=["id"]) as a, reading(other, schema_fields=["id"]) as b:
        theirs = [int(row.id) for row in WeightedSamplingReader([a, b], [0.5, 0.5])]
    ours = WeightedSamplingLoader(
        [ParquetLoader(url, 8, columns=["id"], shuffle=False, with_row_ids=True) for url in (drive, other)], [0.5, 0.5]
    )
    rows = [pair for b in ours for pair in zip(b["_dataset"].tolist(), b["id"].tolist(), strict=True)]
    assert [row for dataset, row in rows if dataset == 0] == list(range(40))
    assert [row for dataset, row in rows if dataset == 1] == list(range(40))
    assert max(theirs.count(row) for row in theirs) == 2, "each dataset gives each of its rows once"
    assert abs(len(theirs) - len(rows)) < 40, "theirs ends by chance, when one dataset is at its end"
