from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from spark_elastic.data import ParquetLoader
from spark_elastic.data.manifest import UNISCHEMA_KEY
from spark_elastic.data.predicates import in_lambda
from spark_elastic.data.unischema import read_fields
from spark_elastic.errors import DataError

SAVED = Path(__file__).with_name("unischema.pickle")


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Modules with the names that Petastorm pickles, gone again before anything is read."""
    made: dict[str, Any] = {}

    def module(name: str, **members: Any) -> None:
        fake = types.ModuleType(name)
        for key, value in members.items():
            value.__module__ = name
            setattr(fake, key, value)
            made[key] = value
        monkeypatch.setitem(sys.modules, name, fake)

    plain = {name: type(name, (), {}) for name in ("Unischema",)}
    field = collections.namedtuple("UnischemaField", "name numpy_dtype shape codec nullable")
    codecs = {
        name: type(name, (), {})
        for name in ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec", "EvilCodec")
    }
    module("petastorm")
    module("petastorm.unischema", UnischemaField=field, **plain)
    module("petastorm.codecs", **codecs)
    module("pyspark")
    module("pyspark.sql")
    module("pyspark.sql.types", IntegerType=type("IntegerType", (), {}))
    return types.SimpleNamespace(**made)


def saved(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def zipped(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, arr=value)
    return file.getvalue()


def scalar(foreign: Any) -> Any:
    codec = foreign.ScalarCodec()
    codec._spark_type = foreign.IntegerType()
    return codec


def pickled(foreign: Any, fields: list[tuple[Any, ...]], protocol: int = 4) -> bytes:
    schema = foreign.Unischema()
    schema._name = "S"
    schema._fields = collections.OrderedDict((field[0], foreign.UnischemaField(*field)) for field in fields)
    return pickle.dumps(schema, protocol)


def materialize(root: Path, schema: bytes, table: pa.Table) -> Path:
    root.mkdir(exist_ok=True)
    pq.write_table(table, root / "part-0.parquet", row_group_size=7)
    pq.write_metadata(table.schema.with_metadata({UNISCHEMA_KEY: schema}), root / "_common_metadata")
    return root


def images() -> tuple[Callable[[np.ndarray, str], bytes], Any]:
    image = pytest.importorskip("PIL.Image")

    def encode(array: np.ndarray, kind: str) -> bytes:
        file = io.BytesIO()
        image.fromarray(array).save(file, kind)
        return file.getvalue()

    return encode, image


def test_every_codec_is_decoded_without_petastorm(foreign: Any, tmp_path: Path, monkeypatch: Any) -> None:
    encode, _ = images()
    png, jpeg, nd, packed = (
        foreign.CompressedImageCodec(), foreign.CompressedImageCodec(), foreign.NdarrayCodec(),
        foreign.CompressedNdarrayCodec(),
    )  # fmt: skip
    png._image_codec, png._quality, jpeg._image_codec, jpeg._quality = ".png", 80, ".jpeg", 90
    schema = pickled(
        foreign,
        [
            ("id", np.uint8, (), scalar(foreign), False),
            ("plain", np.int64, (), None, False),
            ("name", np.str_, (), scalar(foreign), False),
            ("price", Decimal, (), scalar(foreign), False),
            ("when", np.datetime64, (), scalar(foreign), False),
            ("matrix", np.float32, (3, 2), nd, False),
            ("flags", np.bool_, (4,), nd, False),
            ("packed", np.int16, (5,), packed, False),
            ("ragged", np.float64, (None,), nd, False),
            ("png", np.uint8, (4, 6, 3), png, False),
            ("grey", np.uint16, (4, 6), png, False),
            ("jpeg", np.uint8, (16, 16, 3), jpeg, False),
        ],
    )
    ids = list(range(20))
    colour = [np.random.default_rng(i).integers(0, 255, (4, 6, 3)).astype(np.uint8) for i in ids]
    table = pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "plain": ids,
            "name": [f"n{i}" for i in ids],
            "price": [Decimal(i) for i in ids],
            "when": pa.array(ids, pa.timestamp("us")),
            "matrix": [saved(np.full((3, 2), i, np.float32)) for i in ids],
            "flags": [saved(np.array([True, False, i % 2 == 0, True])) for i in ids],
            "packed": [zipped(np.full(5, i, np.int16)) for i in ids],
            "ragged": [saved(np.full(i % 3, i, np.float64)) for i in ids],
            "png": [encode(image, "PNG") for image in colour],
            "grey": [encode(np.full((4, 6), 1000 * i, np.uint16), "PNG") for i in ids],
            "jpeg": [encode(np.full((16, 16, 3), 10 * i, np.uint8), "JPEG") for i in ids],
        }
    )
    root = materialize(tmp_path / "d", schema, table)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("petastorm", "pyspark")]:
        monkeypatch.delitem(sys.modules, name)
    seen = []
    for batch in ParquetLoader(root, 6):
        assert set(batch) == {"id", "plain", "matrix", "flags", "packed", "ragged", "png", "grey", "jpeg"}
        rows = batch["id"].tolist()
        seen += rows
        assert batch["id"].dtype == torch.uint8
        assert batch["plain"].tolist() == rows
        assert batch["matrix"].shape == (len(rows), 3, 2)
        assert batch["matrix"].dtype == torch.float32
        assert batch["matrix"][:, 2, 1].tolist() == rows
        assert batch["flags"].dtype == torch.bool
        assert batch["flags"][:, 2].tolist() == [i % 2 == 0 for i in rows]
        assert batch["packed"][:, 4].tolist() == rows
        assert [part.tolist() for part in batch["ragged"].unbind()] == [[float(i)] * (i % 3) for i in rows]
        assert np.array_equal(batch["png"].numpy(), np.stack([colour[i] for i in rows]))
        assert batch["grey"].dtype == torch.uint16
        assert batch["grey"].numpy()[:, 0, 0].tolist() == [1000 * i for i in rows]
        assert (abs(batch["jpeg"].int()[:, 5, 5, 1] - 10 * torch.tensor(rows)) <= 3).all()
    assert sorted(seen) == ids
    assert not {"petastorm", "pyspark"} & {name.partition(".")[0] for name in sys.modules}


def test_free_dimensions_are_made_equal_by_a_transform(foreign: Any, tmp_path: Path) -> None:
    schema = pickled(foreign, [("v", np.float32, (None, 2), foreign.NdarrayCodec(), False)])
    values = [np.full((1 + i % 3, 2), i, np.float32) for i in range(20)]
    root = materialize(tmp_path / "d", schema, pa.table({"v": [saved(value) for value in values]}))
    with pytest.raises(DataError, match=r"row group 0: column 'v': its values have shapes \[\(1, 2\), \(2, 2\)"):
        list(ParquetLoader(root, 5, shuffle=False))

    def first_row(table: pa.Table) -> dict[str, Any]:
        data = pc.struct_field(table["v"], "data")
        return {"first": pc.list_element(data, 0), "rows": pc.list_element(pc.struct_field(table["v"], "shape"), 0)}

    (batch,) = ParquetLoader(root, 100, shuffle=False, transform=first_row)
    assert batch["first"].tolist() == list(range(20))
    assert batch["rows"].tolist() == [len(value) for value in values]


def seen_by_a_predicate(root: Path, column: str) -> list[Any]:
    seen: list[Any] = []
    ParquetLoader(root, 4, columns=["id"], predicate=in_lambda([column], lambda value: seen.append(value) or True))
    return seen


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        (np.str_, [np.array([], "U1"), np.array(["a", "größe"]), None]),
        (np.str_, [np.array(["a", "b"])] * 3),
        (np.bytes_, [np.array([b"x", b"yz"]), None, np.array([], "S2")]),
        (np.datetime64, [np.array(["2020-01-02"], "M8[D]"), np.array(["2020-01-02T03"], "M8[h]")]),
        (np.float32, [np.array([1, 2], np.float32), None]),
    ],
)
@pytest.mark.parametrize(("codec", "encode"), [("NdarrayCodec", saved), ("CompressedNdarrayCodec", zipped)])
def test_a_predicate_gets_arrays_of_every_type(
    foreign: Any, tmp_path: Path, kind: Any, arrays: list[Any], codec: str, encode: Any
) -> None:
    fields = [("id", np.int64, (), None, False), ("v", kind, (None,), getattr(foreign, codec)(), True)]
    stored = [None if array is None else encode(array) for array in arrays]
    table = pa.table({"id": range(len(arrays)), "v": pa.array(stored, pa.binary())})
    found = seen_by_a_predicate(materialize(tmp_path / "d", pickled(foreign, fields), table), "v")
    for value, array in zip(found, arrays, strict=True):
        assert (value is None) == (array is None)
        if array is not None:
            assert (value.dtype, value.tolist()) == (array.dtype, array.tolist())


@pytest.mark.parametrize(
    ("kind", "array"),
    [(np.complex64, np.array([1, 2j], np.complex64)), (np.timedelta64, np.array([1, 2], "m8[s]"))],
)
def test_fields_of_types_without_tensors_leave_the_others_readable(
    foreign: Any, tmp_path: Path, kind: Any, array: np.ndarray
) -> None:
    fields = [("id", np.int64, (), None, False), ("v", kind, (2,), foreign.NdarrayCodec(), False)]
    table = pa.table({"id": range(3), "v": [saved(array)] * 3})
    root = materialize(tmp_path / "d", pickled(foreign, fields), table)
    assert [batch["id"].tolist() for batch in ParquetLoader(root, 4, shuffle=False)] == [[0, 1, 2]]
    assert [value.tolist() for value in seen_by_a_predicate(root, "v")] == [array.tolist()] * 3
    with pytest.raises(ValueError, match="'v' is not of numbers"):
        ParquetLoader(root, 4, columns=["v"])


@pytest.mark.parametrize("name", ["longlong", "ulonglong", "longdouble", "clongdouble", "complex128", "void"])
def test_every_scalar_type_of_numpy_is_known(foreign: Any, name: str) -> None:
    (field,) = read_fields(pickled(foreign, [("v", getattr(np, name), (), None, False)]))
    assert field.dtype == {"longlong": np.int64, "ulonglong": np.uint64}.get(name)


@pytest.mark.parametrize("shape", [(2,), (None,), (None, None)])
@pytest.mark.parametrize(("codec", "encode"), [("NdarrayCodec", saved), ("CompressedNdarrayCodec", zipped)])
def test_arrays_of_the_other_byte_order_are_read(
    foreign: Any, tmp_path: Path, shape: Any, codec: str, encode: Any
) -> None:
    arrays = [np.array([row, row + 0.5], ">f4").reshape(2, *[1] * (len(shape) - 1)) for row in range(3)]
    fields = [("id", np.int64, (), None, False), ("v", np.float32, shape, getattr(foreign, codec)(), False)]
    table = pa.table({"id": range(3), "v": [encode(array) for array in arrays]})
    root = materialize(tmp_path / "d", pickled(foreign, fields), table)
    (batch,) = ParquetLoader(root, 4, shuffle=False)
    assert [value.tolist() for value in batch["v"].unbind()] == [array.tolist() for array in arrays]
    assert [value.tolist() for value in seen_by_a_predicate(root, "v")] == [array.tolist() for array in arrays]


def test_half_floats_are_read_from_the_floats_that_spark_writes(foreign: Any, tmp_path: Path) -> None:
    fields = [("id", np.int64, (), None, False), ("half", np.float16, (), scalar(foreign), True)]
    table = pa.table({"id": range(3), "half": pa.array([0.5, 1 / 3, None], pa.float32())})
    root = materialize(tmp_path / "d", pickled(foreign, fields), table)
    (batch,) = ParquetLoader(root, 2, columns=["half"], filters=[("half", ">", 0)], shuffle=False)
    assert torch.equal(batch["half"], torch.tensor([0.5, 1 / 3], dtype=torch.float16))
    with pytest.raises(DataError, match="column 'half' has 1 nulls"):
        list(ParquetLoader(root, 3, columns=["half"]))
    found = seen_by_a_predicate(root, "half")
    assert [str(half) for half in found] == ["0.5", "0.3333", "nan"]
    assert {half.dtype for half in found} == {np.dtype("float16")}


def test_a_predicate_gets_times_and_dates_in_petastorms_units(foreign: Any, tmp_path: Path) -> None:
    fields = [("id", np.int64, (), None, False), *((name, np.datetime64, (), None, True) for name in ("time", "day"))]
    times = [datetime(2020, 1, 2, 3, 4, 5, 6), None, datetime(3000, 1, 1)]
    days = pa.array([time and time.date() for time in times])
    stored = {"id": range(3), "time": pa.array(times, pa.timestamp("us", "UTC")), "day": days}
    root = materialize(tmp_path / "d", pickled(foreign, fields), pa.table(stored))
    assert [str(time) for time in seen_by_a_predicate(root, "time")] == [
        "2020-01-02T03:04:05.000006",
        "None",
        "3000-01-01T00:00:00.000000",
    ]
    found = seen_by_a_predicate(root, "day")
    assert found == [np.datetime64("2020-01-02"), None, np.datetime64("3000-01-01")]
    assert [getattr(day, "dtype", None) for day in found] == [np.dtype("M8[D]"), None, np.dtype("M8[D]")]


@pytest.mark.parametrize(
    ("kind", "texts", "values"),
    [
        (np.str_, ["01", "02"], ["01", "02"]),
        (np.str_, ["1.5", "__HIVE_DEFAULT_PARTITION__"], ["1.5", None]),
        (np.float64, ["1", "2"], [1.0, 2.0]),
        (np.uint8, ["1", "200"], [1, 200]),
    ],
)
def test_a_partition_has_the_type_of_its_field(
    foreign: Any, tmp_path: Path, kind: Any, texts: list[str], values: list[Any]
) -> None:
    schema = pickled(foreign, [("id", np.int64, (), None, False), ("p", kind, (), scalar(foreign), True)])
    for number, text in enumerate(texts):
        folder = tmp_path / f"p={text}"
        folder.mkdir()
        pq.write_table(pa.table({"id": [number]}), folder / "part.parquet")
    pq.write_metadata(
        pa.schema([("id", pa.int64())]).with_metadata({UNISCHEMA_KEY: schema}), tmp_path / "_common_metadata"
    )
    found = sorted(seen_by_a_predicate(tmp_path, "p"), key=str)  # the files are read on several threads
    assert (found, set(map(type, found)) - {str, type(None)}) == (values, {kind} - {np.str_})
    assert ParquetLoader(tmp_path, 1, columns=["id"], filters=[("p", "=", values[0])]).rows_total == 1


def test_a_partition_that_is_not_what_the_schema_says_is_named(foreign: Any, tmp_path: Path) -> None:
    (tmp_path / "p=x").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "p=x" / "part.parquet")
    schema = pickled(foreign, [("id", np.int64, (), None, False), ("p", np.int32, (), scalar(foreign), False)])
    pq.write_metadata(
        pa.schema([("id", pa.int64())]).with_metadata({UNISCHEMA_KEY: schema}), tmp_path / "_common_metadata"
    )
    with pytest.raises(DataError, match=r"the Hive partition 'p' is int32 in Petastorm's schema: .*'x'"):
        ParquetLoader(tmp_path, 1, columns=["id"])


def test_a_transform_gets_arrays_of_text_as_lists(foreign: Any, tmp_path: Path) -> None:
    tags = [np.array([f"t{place}" for place in range(row % 3)], "U4") for row in range(6)]
    days = saved(np.array(["2020-01-02"], "M8[D]"))
    fields = [
        ("tags", np.str_, (None,), foreign.NdarrayCodec(), False),
        ("words", np.bytes_, (None,), foreign.CompressedNdarrayCodec(), False),
        ("table", np.str_, (None, None), foreign.NdarrayCodec(), False),
        ("days", np.datetime64, (1,), foreign.NdarrayCodec(), False),
    ]
    table = pa.table(
        {
            "tags": [saved(each) for each in tags],
            "words": [zipped(each.astype("S4")) for each in tags],
            "table": [saved(each[:, None]) for each in tags],
            "days": [days] * 6,
        }
    )
    seen: list[dict[str, Any]] = []

    def count(table: pa.Table) -> dict[str, Any]:
        seen.extend(table.to_pylist())
        return {"count": pc.list_value_length(table["tags"])}

    root = materialize(tmp_path / "d", pickled(foreign, fields), table)
    counts = [count for batch in ParquetLoader(root, 4, transform=count, shuffle=False) for count in batch["count"]]
    assert counts == [len(each) for each in tags]
    assert seen == [
        {
            "tags": each.tolist(),
            "words": each.astype("S4").tolist(),
            "table": {"data": each.tolist(), "shape": [len(each), 1]},
            "days": days,
        }
        for each in tags
    ]


def test_a_null_in_an_encoded_column_is_named(foreign: Any, tmp_path: Path) -> None:
    schema = pickled(foreign, [("v", np.float32, (2,), foreign.NdarrayCodec(), True)])
    root = materialize(tmp_path / "d", schema, pa.table({"v": [saved(np.ones(2, np.float32)), None]}))
    with pytest.raises(DataError, match="row group 0: column 'v' has 1 nulls"):
        list(ParquetLoader(root, 5))


@pytest.mark.parametrize("broken", [b"", b"no array", saved(np.ones(3, np.float32)), saved(np.ones(2, np.float64))])
def test_a_value_that_is_not_what_the_schema_says_is_named(foreign: Any, tmp_path: Path, broken: bytes) -> None:
    schema = pickled(foreign, [("v", np.float32, (2,), foreign.NdarrayCodec(), False)])
    root = materialize(tmp_path / "d", schema, pa.table({"v": [saved(np.ones(2, np.float32)), broken]}))
    with pytest.raises(DataError, match="row group 0: column 'v'"):
        list(ParquetLoader(root, 5))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_schema_of_any_pickle_protocol_is_read(foreign: Any, protocol: int) -> None:
    (field,) = read_fields(pickled(foreign, [("v", np.float32, (None, 2), foreign.NdarrayCodec(), True)], protocol))
    assert (field.name, field.dtype, field.shape, field.codec, field.nullable) == (
        "v", np.dtype("float32"), (None, 2), "NdarrayCodec", True,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["UnischemaField", "Other"])
def test_namedtuples_as_pyspark_once_pickled_them_are_read_where_they_are_fields(
    foreign: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the schemas of Petastorm's releases 0.4 to 0.7, which it cannot open with newer ones of pyspark itself."""

    def _restore(name: str, fields: Any, values: Any) -> Any: ...

    _restore.__module__, _restore.__qualname__ = "pyspark.serializers", "_restore"
    serializers = types.ModuleType("pyspark.serializers")
    serializers._restore = _restore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark.serializers", serializers)
    names = ("name", "numpy_dtype", "shape", "codec", "nullable")
    schema = foreign.Unischema()
    values = ("v", np.float32, (None, 2), foreign.NdarrayCodec(), True)
    schema._fields = {"v": _Runs(_restore, name, names, values)}
    made = pickle.dumps(schema, 2)
    if name == "Other":
        with pytest.raises(DataError, match="it has a namedtuple 'Other', which no Unischema needs"):
            read_fields(made)
        return
    (field,) = read_fields(made)
    assert (field.name, field.dtype, field.shape, field.codec, field.nullable) == (
        "v", np.dtype("float32"), (None, 2), "NdarrayCodec", True,
    )  # fmt: skip


class _Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("true",)),
        (eval, ("1",)),
        (getattr, (1, "real")),
        (subprocess.Popen, (["true"],)),
        (np.load, ("x",)),
        (__import__, ("os",)),
    ],
)
def test_a_schema_that_would_run_code_is_refused(tmp_path: Path, function: Any, arguments: Any) -> None:
    root = materialize(tmp_path / "d", pickle.dumps(_Runs(function, *arguments)), pa.table({"v": [b""]}))
    with pytest.raises(DataError, match="Petastorm schema cannot be read: it refers to"):
        ParquetLoader(root, 5)


def test_an_unknown_codec_is_refused_and_a_transform_decodes_it_from_files_that_are_given_one_by_one(
    foreign: Any, tmp_path: Path
) -> None:
    schema = pickled(foreign, [("v", np.float32, (2,), foreign.EvilCodec(), False)])
    root = materialize(tmp_path / "d", schema, pa.table({"v": [b"ab", b"cd"]}))
    with pytest.raises(DataError, match=r"it refers to petastorm\.codecs\.EvilCodec"):
        ParquetLoader(root, 2)

    def decode(table: pa.Table) -> dict[str, Any]:
        return {"v": np.stack([np.frombuffer(value, np.uint8) for value in table["v"].to_pylist()])}

    (batch,) = ParquetLoader(sorted(root.glob("*.parquet")), 2, transform=decode, shuffle=False)
    assert batch["v"].tolist() == [[97, 98], [99, 100]]


@pytest.mark.parametrize("broken", [b"", b"x", pickle.dumps(3), pickle.dumps({"_fields": 1})])
def test_anything_else_than_a_schema_is_refused(broken: bytes) -> None:
    with pytest.raises(DataError, match="Petastorm schema cannot be read"):
        read_fields(broken)


def test_columns_of_the_schema_can_be_chosen(foreign: Any, tmp_path: Path) -> None:
    fields = [("a", np.int64, (), None, False), ("s", np.str_, (), scalar(foreign), False)]
    root = materialize(tmp_path / "d", pickled(foreign, fields), pa.table({"a": [1], "s": ["x"]}))
    assert [set(batch) for batch in ParquetLoader(root, 5)] == [{"a"}]
    with pytest.raises(ValueError, match="'s' is not of numbers"):
        ParquetLoader(root, 5, columns=["s"])
    with pytest.raises(ValueError, match="'b' is not in the dataset, which has a, s"):
        ParquetLoader(root, 5, columns=["b"])


def test_importing_the_package_imports_neither_petastorm_nor_pyspark() -> None:
    code = (
        "import sys, spark_elastic.data as d; d.ParquetLoader, d.ElasticDataLoader, d.read_manifest;"
        "assert not {'pyspark', 'petastorm', 'cv2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
