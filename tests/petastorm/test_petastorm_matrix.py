"""One matrix for both engines: nulls, NaN, filters on nulls, and columns that are named, in both kinds of datasets."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("petastorm")

from petastorm.codecs import NdarrayCodec, ScalarCodec
from petastorm.transform import TransformSpec
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql.types import BooleanType, DoubleType, IntegerType, LongType, StringType

from spark_elastic.data import ParquetLoader, petastorm_workers
from spark_elastic.data.manifest import UNISCHEMA_KEY
from spark_elastic.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, NULLS = 40, (7, 30)
ENGINES = ["arrow", "petastorm"]
KINDS = ["plain", "unischema"]
NULLABLE = ["half", "count", "flag", "array"]
SCHEMA = Unischema(
    "Nullable",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("half", np.float64, (), ScalarCodec(DoubleType()), True),
        UnischemaField("count", np.int32, (), ScalarCodec(IntegerType()), True),
        UnischemaField("flag", np.bool_, (), ScalarCodec(BooleanType()), True),
        UnischemaField("array", np.float32, (2,), NdarrayCodec(), True),
        UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
    ],
)


def encoded(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def write(root: Path, kind: str, null: str = "") -> Path:
    """A dataset of two files; ``null`` names the column that is null in the rows ``NULLS``."""
    arrays: list[Any] = [np.full(2, row, np.float32) for row in range(ROWS)]
    values: dict[str, list[Any]] = {
        "id": list(range(ROWS)),
        "half": [row / 2 for row in range(ROWS)],
        "count": list(range(ROWS)),
        "flag": [row % 2 == 0 for row in range(ROWS)],
        "array": [encoded(array) for array in arrays] if kind == "unischema" else [array.tolist() for array in arrays],
        "name": [f"r{row}" for row in range(ROWS)],
    }
    if null:
        for row in NULLS:
            values[null][row] = None
    array = pa.binary() if kind == "unischema" else pa.list_(pa.float32())
    types = [pa.int64(), pa.float64(), pa.int32(), pa.bool_(), array, pa.string()]
    table = pa.table({name: pa.array(values[name], type) for name, type in zip(values, types, strict=True)})
    root.mkdir()
    files = {"part-0.parquet": table.slice(0, 20), "part-1.parquet": table.slice(20)}
    for name, part in files.items():
        pq.write_table(part, root / name, row_group_size=10)
    if kind == "unischema":
        metadata = {
            UNISCHEMA_KEY: pickle.dumps(SCHEMA),
            b"dataset-toolkit.num_row_groups_per_file.v1": json.dumps(dict.fromkeys(files, 2)).encode(),
        }
        pq.write_metadata(table.schema.with_metadata(metadata), root / "_common_metadata")
    return root


def read(root: Path, engine: str, **settings: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for batch in ParquetLoader(root, 8, engine=engine, shuffle=False, **settings):
        for name, values in batch.items():
            rows = [row.tolist() for row in values.unbind()] if values.is_nested else values.tolist()
            found.setdefault(name, []).extend(rows)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("null", NULLABLE)
def test_a_null_is_an_error_that_names_the_column(null: str, kind: str, engine: str, tmp_path: Path) -> None:
    root = write(tmp_path / "d", kind, null)
    with pytest.raises(
        DataError, match=f"column '{null}' has 1 nulls; fill them with transform= or drop them with filt"
    ):
        read(root, engine)
    assert read(root, engine, columns=["id"]) == {"id": list(range(ROWS))}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("null", NULLABLE)
def test_filters_drop_nulls(null: str, kind: str, engine: str, tmp_path: Path) -> None:
    root = write(tmp_path / "d", kind, null)
    found = read(root, engine, filters=~pc.field(null).is_null())
    left = [row for row in range(ROWS) if row not in NULLS]
    assert found["id"] == left
    assert set(found) == {"id", *NULLABLE}
    assert found["half"] == [row / 2 for row in left]
    assert found["count"] == left
    assert found["array"] == [[row, row] for row in left]
    only = read(root, engine, filters=pc.field(null).is_null(), columns=["id"])
    assert only["id"] == list(NULLS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_does_not_pass_nulls(kind: str, engine: str, tmp_path: Path) -> None:
    root = write(tmp_path / "d", kind, "half")
    assert read(root, engine, filters=[("half", ">=", 0.0)])["id"] == [row for row in range(ROWS) if row not in NULLS]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_nan_is_a_value(kind: str, engine: str, tmp_path: Path) -> None:
    root = write(tmp_path / "d", kind)
    for path in root.glob("part-*"):
        table = pq.read_table(path)
        halves = pa.array([np.nan if row == 3 else row / 2 for row in table["id"].to_pylist()])
        pq.write_table(table.set_column(1, "half", halves), path, row_group_size=10)
    assert [row for row, half in enumerate(read(root, engine)["half"]) if np.isnan(half)] == [3]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_named_columns_come_or_are_refused(kind: str, engine: str, tmp_path: Path) -> None:
    root = write(tmp_path / "d", kind)
    assert set(read(root, engine, columns=["count", "id"])) == {"count", "id"}
    assert set(read(root, engine)) == {"id", *NULLABLE}
    for name, complaint in (
        ("nothing", "'nothing' is not in the dataset"),
        ("name", "'name' is .*; give a transform="),
    ):
        with pytest.raises(ValueError, match=complaint):
            read(root, engine, columns=["id", name])
    with pytest.raises(ValueError, match="columns must be a list of names, not 'id'"):
        read(root, engine, columns="id")


@pytest.mark.parametrize("kind", [pa.uint16(), pa.list_(pa.float32(), 2)])
def test_a_type_that_petastorm_does_not_read_is_named(
    kind: pa.DataType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = pa.array([[1, 2]] * 3, kind) if pa.types.is_fixed_size_list(kind) else pa.array([1, 2, 3], pa.int64())
    values = values.cast(kind)
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"id": [1, 2, 3], "odd": values}), tmp_path / "d" / "part-0.parquet")
    assert set(read(tmp_path / "d", "arrow")) == {"id", "odd"}
    with pytest.raises(ValueError, match=r"columns: 'odd' is .*, which Petastorm does not read; use engine='arrow'"):
        read(tmp_path / "d", "petastorm", columns=["id", "odd"])
    assert set(read(tmp_path / "d", "petastorm")) == {"id"}
    assert "does not read the columns odd" in caplog.text


def test_a_transform_spec_sees_nulls_as_ever_and_what_it_leaves_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path / "d", "unischema", "half")
    fill = TransformSpec(lambda row: {**row, "half": np.nan_to_num(row["half"], nan=-1.0)})
    found = read(root, "petastorm", transform=fill)
    assert [row for row, half in enumerate(found["half"]) if half == -1.0] == list(NULLS)
    with pytest.raises(DataError, match="column 'half' has 1 nulls"):
        read(root, "petastorm", transform=TransformSpec(lambda row: {**row, "count": row["count"] + 1}))


def test_a_cache_gives_nothing_of_other_columns_rows_or_files(tmp_path: Path) -> None:
    root = write(tmp_path / "d", "unischema", "half")
    cache = {
        "cache_type": "local-disk", "cache_location": str(tmp_path / "cache"), "cache_size_limit": 10**8,
        "cache_row_size_estimate": 100,
    }  # fmt: skip
    assert set(read(root, "petastorm", columns=["id"], engine_options=cache)) == {"id"}
    assert set(read(root, "petastorm", columns=["id", "count"], engine_options=cache)) == {"id", "count"}
    assert len(read(root, "petastorm", filters=[("id", "<", 5)], columns=["id"], engine_options=cache)["id"]) == 5
    for path in root.glob("part-*"):
        table = pq.read_table(path)
        pq.write_table(table.set_column(0, "id", pc.add(table["id"], 100)), path, row_group_size=10)
    assert read(root, "petastorm", columns=["id"], engine_options=cache)["id"] == list(range(100, 100 + ROWS))


def test_a_reader_process_that_dies_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path / "d", "plain")
    space: dict[str, Any] = {}
    exec("def die(frame):\n    import os\n    os._exit(7)", space)  # of no module, so it travels as it is
    options = {"reader_pool_type": "process", "workers_count": 1}
    with pytest.raises(DataError, match=r"a reader process ended by itself, exit codes \[7\]"):
        read(root, "petastorm", engine_options=options, transform=TransformSpec(space["die"]))


def test_a_reader_process_that_cannot_start_is_an_error_at_once(tmp_path: Path) -> None:
    root = write(tmp_path / "d", "plain")

    class Elsewhere:
        """Of a module that the reader processes do not have."""

        def __call__(self, frame: Any) -> Any: ...

    Elsewhere.__module__ = "nowhere"
    module = types.ModuleType("nowhere")
    Elsewhere.__qualname__ = "Elsewhere"
    module.Elsewhere = Elsewhere  # type: ignore[attr-defined]
    sys.modules["nowhere"] = module
    options = {"reader_pool_type": "process", "workers_count": 1}
    try:
        with pytest.raises(DataError, match=r"did not start: a reader process ended by itself, exit codes \[1\]"):
            read(root, "petastorm", engine_options=options, transform=TransformSpec(Elsewhere()))
    finally:
        del sys.modules["nowhere"]


def test_a_process_pool_that_does_not_start_does_not_hang_the_process_at_its_end(tmp_path: Path) -> None:
    root = write(tmp_path / "d", "plain")
    program = f"""
        import sys
        from spark_elastic.data import ParquetLoader, petastorm_workers
        from spark_elastic.errors import DataError

        pools = petastorm_workers._WatchedPool
        started = pools._wait_for_workers_to_start
        def fail(pool):
            started(pool)
            pool._ventilator_send.send_pyobj("never received")  # what zmq would linger for
            raise RuntimeError("no workers")
        pools._wait_for_workers_to_start = fail
        loader = ParquetLoader({str(root)!r}, 8, engine="petastorm", engine_options={{"reader_pool_type": "process"}})
        try:
            next(iter(loader))
        except DataError as error:
            print(error)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert "Petastorm's workers did not start: no workers" in done.stdout
    assert done.returncode == 0


def test_the_sockets_of_a_pool_that_is_abandoned_are_closed() -> None:
    import zmq

    class Pool:
        _context = zmq.Context()

    pool = Pool()
    socket = pool._context.socket(zmq.PUSH)
    socket.bind_to_random_port("tcp://127.0.0.1")
    petastorm_workers._abandon(pool)
    assert socket.closed
    assert pool._context.closed
