"""Columns of Parquet, and those that a transform makes, become tensors."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from loaded_rows import batch_of, table_of

from spark_elastic.data import ParquetLoader
from spark_elastic.errors import DataError

pytestmark = pytest.mark.usefixtures("no_thread_stays_behind")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int8(), torch.int8),
        (pa.uint8(), torch.uint8),
        (pa.int16(), torch.int16),
        (pa.int32(), torch.int32),
        (pa.int64(), torch.int64),
        (pa.float16(), torch.float16),
        (pa.float32(), torch.float32),
        (pa.float64(), torch.float64),
        (pa.uint16(), torch.uint16),
        (pa.uint32(), torch.uint32),
    ],
)
def test_numbers_keep_their_type(tmp_path: Path, kind: pa.DataType, expected: torch.dtype) -> None:
    values = pa.array(np.array([1, 2, 3]).astype(kind.to_pandas_dtype()), kind)
    if kind == pa.float16() and int(pa.__version__.split(".")[0]) < 15:
        pytest.skip("pyarrow below 15, which Petastorm needs, writes no float16 to Parquet")
    batch = batch_of(tmp_path, table_of(("v", values)))
    assert batch["v"].dtype == expected
    assert batch["v"].tolist() == [1, 2, 3]


def test_bools_and_dictionaries_of_numbers_are_columns(tmp_path: Path) -> None:
    table = table_of(("b", pa.array([True, False, True])), ("d", pa.array([7, 9, 7]).dictionary_encode()))
    batch = batch_of(tmp_path, table)
    assert batch["b"].dtype == torch.bool
    assert batch["b"].tolist() == [True, False, True]
    assert batch["d"].tolist() == [7, 9, 7]


def test_fixed_size_lists_are_matrices(tmp_path: Path) -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.float32()), 3)
    assert batch_of(tmp_path, table_of(("v", values)))["v"].tolist() == [[0, 1, 2], [3, 4, 5]]


VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def vector(kind: int | None, size: int, indices: list[int], values: list[float | None]) -> dict[str, Any]:
    return {"type": kind, "size": size, "indices": indices, "values": values}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.list_(pa.int64())), [[1, 2], [3]]),
        (pa.list_(pa.list_(pa.int64(), 2)), [[1, 2], [3, 4]]),
        (pa.list_(pa.list_(pa.list_(pa.int64())), 1), [[[1, 2], [3]]]),
        (pa.list_(pa.string(), 2), ["a", "b"]),
        (pa.struct([("pair", pa.list_(pa.int64(), 2))]), {"pair": [1, 2]}),
    ],
)
def test_what_has_lists_of_lists_or_texts_somewhere_inside_is_left_out_and_refused_when_it_is_named(
    kind: pa.DataType, value: object, tmp_path: Path
) -> None:
    table = table_of(("id", pa.array([1, 2])), ("v", pa.array([value] * 2, kind)))
    assert list(batch_of(tmp_path, table)) == ["id"]
    with pytest.raises(ValueError, match=r"columns: 'v' is .*, which cannot be made into a tensor; give a transform="):
        batch_of(tmp_path, table, columns=["v"])
    with pytest.raises(DataError, match=r"row group 0: column 'v' is .*, which cannot be made into a tensor"):
        batch_of(tmp_path, table, transform=lambda table: {"v": table["v"]})


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.list_(pa.list_(pa.int64()), 2), [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
        (pa.list_(pa.large_list(pa.int64()), 2), [[1], [2]], [[1], [2]]),
        (pa.list_(pa.list_(pa.list_(pa.int64()), 1), 2), [[[1, 2]], [[3, 4]]], [[[1, 2]], [[3, 4]]]),
        (pa.list_(VECTOR, 2), [vector(1, 2, [], [1.0, 2.0]), vector(0, 2, [1], [3.0])], [[1, 2], [0, 3]]),
    ],
)
def test_lists_of_one_length_in_fixed_size_lists_are_matrices(
    kind: pa.DataType, value: object, expected: object, tmp_path: Path
) -> None:
    assert batch_of(tmp_path, table_of(("v", pa.array([value] * 2, kind))))["v"].tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.list_(pa.int64()), 2), [[1, 2], [3]]),
        (pa.list_(VECTOR, 2), [vector(1, 2, [], [1.0, 2.0]), vector(1, 1, [], [3.0])]),
    ],
)
def test_lists_of_different_lengths_in_fixed_size_lists_are_an_error_that_names_column_and_row_group(
    kind: pa.DataType, value: object, tmp_path: Path
) -> None:
    table = table_of(("id", pa.array([1, 2])), ("v", pa.array([value] * 2, kind)))
    with pytest.raises(
        DataError, match=r"parquet, row group 0: column 'v' has lists of different lengths in its fixed-"
    ):
        batch_of(tmp_path, table)
    assert batch_of(tmp_path, table, columns=["id"])["id"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.list_(pa.int64()), [[1, 2], [3]], [[1, 2], [3], [1, 2]]),
        (VECTOR, [vector(1, 2, [], [1.0, 2.0]), vector(0, 3, [1], [5.0])], [[1, 2], [0, 5, 0], [1, 2]]),
    ],
)
def test_dictionaries_of_lists_that_a_transform_makes_are_lists(
    kind: pa.DataType, values: list[Any], expected: list[list[int]], tmp_path: Path
) -> None:
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(values, kind))
    batch = batch_of(tmp_path, table_of(("id", pa.array([1, 2, 3]))), transform=lambda table: {"v": encoded})
    assert [row.tolist() for row in batch["v"].unbind()] == expected


def test_tensors_without_numbers_are_left_out(tmp_path: Path) -> None:
    dates = pa.array([[1, 2]] * 2, pa.list_(pa.date32(), 2))
    kind = pa.fixed_shape_tensor(pa.date32(), [2])
    table = table_of(("id", pa.array([1, 2])), ("v", pa.ExtensionArray.from_storage(kind, dates)))
    assert list(batch_of(tmp_path, table)) == ["id"]


def test_fixed_size_lists_of_each_other_and_of_dictionaries_have_more_dimensions(tmp_path: Path) -> None:
    nested = pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int64(), 3), 2))
    encoded = pa.FixedSizeListArray.from_arrays(pa.array([7, 8, 8, 7]).dictionary_encode(), 2)
    batch = batch_of(tmp_path, table_of(("nested", nested), ("encoded", encoded)))
    assert batch["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2
    assert batch["encoded"].tolist() == [[7, 8], [8, 7]]


@pytest.mark.parametrize(
    "broken",
    [
        vector(None, 1, [], [1.0]),
        vector(1, 2, [], [1.0, None]),
        vector(0, 2, [7], [1.0]),
        vector(0, 2, [0], [1.0, 2.0]),
    ],
)
def test_a_vector_that_spark_would_not_write_is_an_error_that_names_column_and_row_group(
    broken: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="row group 0: column 'v' has vectors that Spark ML cannot read"):
        batch_of(tmp_path, table_of(("v", pa.array([broken] * 2, VECTOR))))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda words: np.stack([np.pad(word, (0, 8 - len(word))) for word in words]), (4, 8)),
        (lambda words: torch.tensor([len(word) for word in words]), (4,)),
        (lambda words: np.zeros((len(words), 2, 3)), (4, 2, 3)),
    ],
)
def test_a_transform_may_make_a_dense_column_of_lists_under_their_own_name(
    tmp_path: Path, make: Any, shape: tuple[int, ...]
) -> None:
    pq.write_table(pa.table({"v": [[1] * (1 + row % 3) for row in range(12)]}), tmp_path / "part-0.parquet")
    loader = ParquetLoader(tmp_path, 4, transform=lambda table: {"v": make(table["v"].to_pylist())})
    assert [tuple(batch["v"].shape) for batch in loader] == [shape] * 3


def test_lists_that_a_transform_passes_on_are_jagged_in_any_batch(tmp_path: Path) -> None:
    lists = [[1, 2]] * 8 + [[1]] * 4
    pq.write_table(pa.table({"v": lists}), tmp_path / "part-0.parquet", row_group_size=4)
    for transform in (None, lambda table: table, lambda table: {"v": table["v"]}):
        loader = ParquetLoader(tmp_path, 4, transform=transform, shuffle=False)
        assert [batch["v"].is_nested for batch in loader] == [True] * 3


def test_lists_of_different_lengths_are_jagged_tensors_in_any_batch(tmp_path: Path) -> None:
    lists = [[float(i)] * (i % 5) for i in range(300)]
    table = table_of(("id", pa.array(range(300))), ("v", pa.array(lists, pa.list_(pa.float32()))))
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=37)
    seen = 0
    for batch in ParquetLoader(tmp_path / "lists.parquet", 1, shuffle_rows=128):
        assert batch["v"].layout == torch.jagged
    for batch in ParquetLoader(tmp_path / "lists.parquet", 16, shuffle_rows=128):
        assert batch["v"].layout == torch.jagged
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert values.tolist() == lists[row]
            seen += 1
    assert seen == 300


def test_a_transform_makes_numbers_of_strings_and_nulls(tmp_path: Path) -> None:
    table = table_of(("v", pa.array([1.0, None, 3.0])), ("s", pa.array(["a", "bc", "def"])))
    arrow = batch_of(
        tmp_path,
        table,
        transform=lambda t: pa.table({"n": pc.utf8_length(t["s"]), "v": pc.fill_null(t["v"], 0.0), "s": t["s"]}),
    )
    assert {name: column.tolist() for name, column in arrow.items()} == {"n": [1, 2, 3], "v": [1, 0, 3]}
    arrays = batch_of(tmp_path, table, transform=lambda t: {"w": np.ones((len(t), 2, 3)), "t": torch.zeros(len(t))})
    assert arrays["w"].shape == (3, 2, 3)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_transform_may_return_the_same_memory_each_time(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"v": np.arange(400.0)}), tmp_path / "rows.parquet", row_group_size=50)
    memory = np.zeros(400)

    def fill(table: pa.Table) -> dict[str, Any]:
        part = memory[: len(table)]
        part[:] = table["v"].to_numpy()
        return {"v": part if kind == "array" else torch.from_numpy(part)}

    loader = ParquetLoader(str(tmp_path), global_batch_size=16, shuffle=False, transform=fill)
    assert [value for batch in loader for value in batch["v"].tolist()] == list(range(400))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda t: t.slice(1), "transform returned 2 rows for 3; it must keep all rows"),
        (lambda t: {"v": np.zeros(2)}, "transform returned 2 rows in 'v' for 3"),
        (lambda t: {"v": 7.0}, "transform made column 'v' of one value for 3 rows"),
        (lambda t: 1 / 0, "transform raised ZeroDivisionError"),
        (lambda t: 5, "transform must return a pyarrow.Table or a dict of arrays, not int"),
        (lambda t: {"v": np.array(["a"] * 3)}, "made column 'v' of dtype <U1"),
        (lambda t: {"v": np.ma.masked_less(np.arange(3), 2)}, "'v' of an array that masks 2 values: fill them"),
        (lambda t: {"v": np.arange(3.0).astype(">f4")}, "'v' of >f4, which cannot be made into an array of numbers"),
        (
            lambda t: {"v": torch.zeros(3, dtype=torch.bfloat16)},
            "'v' of torch.bfloat16, which cannot be made into an array",
        ),
    ],
)
def test_a_transform_that_breaks_the_rules_is_named(tmp_path: Path, transform: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"one\.parquet|row group 0") as failure:
        batch_of(tmp_path, table_of(("v", [1, 2, 3])), transform=transform)
    assert message in str(failure.value)


def test_tensors_have_their_dimensions_in_their_logical_order(tmp_path: Path) -> None:
    def tensors(shape: list[int], order: list[int]) -> pa.ExtensionArray:
        kind = pa.fixed_shape_tensor(pa.int64(), shape, permutation=order)
        rows = np.arange(2 * math.prod(shape)).reshape(2, -1).tolist()
        return pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.int64(), math.prod(shape))))

    batch = batch_of(tmp_path, table_of(("x", tensors([2, 3], [1, 0])), ("v", [1, 2])), filters=[("v", ">", 0)])
    assert batch["x"].tolist() == np.arange(12).reshape(2, 2, 3).transpose(0, 2, 1).tolist()
    with pytest.raises(DataError, match=r"column 'x' has tensors whose dimensions are in the order \[1, 2, 0\]"):
        batch_of(tmp_path, table_of(("x", tensors([2, 3, 4], [1, 2, 0]))))


@pytest.mark.parametrize("values", [pa.array([1, None, 3]), pa.array([[1.0], [None], [2.0]])])
def test_nulls_are_an_error_that_names_column_and_row_group(tmp_path: Path, values: pa.Array) -> None:
    with pytest.raises(DataError, match=r"row group 0: column 'v' has 1 nulls"):
        batch_of(tmp_path, table_of(("v", values)))


def test_lists_of_different_lengths_are_delivered_without_a_word_of_torchs() -> None:
    code = (
        "import torch; from spark_elastic.data.convert import jagged_tensor; "
        "print(jagged_tensor(torch.arange(5.0), torch.tensor([0, 2, 5])).is_nested)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
