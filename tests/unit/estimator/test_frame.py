"""What a DataFrame's schema says of its columns, and which columns are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.ml.linalg import MatrixUDT, VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)
from unstarted_fits import SCHEMA, make

from spark_elastic.estimator.frame import (
    check_case,
    check_columns,
    check_scalars,
    is_index,
    is_only_in_rows,
    labels_of,
    row_shape,
    shown_columns,
    unambiguous,
)
from spark_elastic.estimator.planning import plan_split


def test_two_columns_of_one_name_are_refused_by_it_where_they_are_used_and_nowhere_else() -> None:
    twice = StructType([*SCHEMA.fields, StructField("y", DoubleType()), StructField("text", StringType())])
    with pytest.raises(ValueError, match="labelCols: 2 columns of the DataFrame are named 'y', as after a join"):
        make()._layout(twice)
    with pytest.raises(ValueError, match="stratifyCol: 2 columns of the DataFrame are named 'y'"):
        plan_split(make(stratifyCol="y", validationFraction=0.1), None, twice)
    assert make(labelCols=["n"])._layout(twice).columns == ["x", "n"]


def test_indexes_that_string_indexer_wrote_become_whole_numbers() -> None:
    assert is_index(SCHEMA["code"])
    assert is_index(SCHEMA["n"])
    assert not is_index(SCHEMA["x"])
    layout = make(featureCols=None, inputs={"c": ["code", "n"], "x": ["x"], "d": (["x"], "int64")})._layout(SCHEMA)
    assert [entry.dtype for entry in layout.inputs] == ["int64", None, "int64"]


def test_the_shape_of_a_row_is_told_as_far_as_the_schema_knows_it() -> None:
    sized = StructField("v", VectorUDT(), metadata={"ml_attr": {"num_attrs": 3}})
    unsized = StructField("v", VectorUDT())
    assert [row_shape(field) for field in (SCHEMA["x"], sized, unsized)] == [(), (3,), None]
    assert row_shape(SCHEMA["list"]) is None
    assert row_shape(StructField("b", BinaryType())) is None


def test_what_spark_passes_on_in_rows_only_is_found_wherever_a_column_holds_it() -> None:
    deep = StructType([StructField("m", MapType(StringType(), ArrayType(VectorUDT())))])
    assert all(map(is_only_in_rows, (VectorUDT(), MatrixUDT(), ArrayType(VectorUDT()), ArrayType(NullType()), deep)))
    assert not any(is_only_in_rows(field.dataType) for field in SCHEMA)


@pytest.mark.skipif(pyspark.__version__.startswith("3."), reason="Spark 3.5 knows no collations")
def test_strings_with_a_collation_pass_on_in_rows_only() -> None:
    assert is_only_in_rows(ArrayType(StringType("UTF8_LCASE")))
    assert not is_only_in_rows(StringType())


def test_the_strings_of_a_label_are_known_where_string_indexer_wrote_them() -> None:
    assert labels_of(SCHEMA["code"]) == {"ml_attr": {"type": "nominal", "vals": ["a", "b"]}}
    assert labels_of(StructField("y", DoubleType(), metadata={"ml_attr": {"type": "numeric"}})) == {}
    assert labels_of(SCHEMA["x"]) == {}


class Frame:
    """The columns of a DataFrame, and whether its session tells upper from lower case."""

    def __init__(self, *columns: str, case: str = "false") -> None:
        self.columns = list(columns)
        self.sparkSession = SimpleNamespace(conf={"spark.sql.caseSensitive": case})


def test_names_that_spark_takes_for_one_are_refused_unless_it_minds_their_case() -> None:
    frame: Any = Frame("x", "X", "y")
    check_case(frame, ["y"])
    with pytest.raises(ValueError, match="the columns 'x' and 'X' have one name to Spark, which ignores case"):
        check_case(frame, ["x"])
    minding: Any = Frame("x", "X", "y", case="TRUE")
    check_case(minding, ["x"])
    assert (unambiguous(frame), unambiguous(minding)) == (["y"], ["x", "X", "y"])


def test_a_row_is_shown_by_single_values_of_columns_that_can_be_meant() -> None:
    frame: Any = Frame("x", "X", "list", "bytes", "text", "n", case="false")
    kinds = [DoubleType(), DoubleType(), ArrayType(DoubleType()), BinaryType(), StringType(), DoubleType()]
    schema = StructType([StructField(name, kind) for name, kind in zip(frame.columns, kinds, strict=True)])
    assert shown_columns(frame, schema) == ["text", "n"]


@pytest.mark.parametrize(
    "kind", [MapType(StringType(), DoubleType()), ArrayType(StringType()), ArrayType(ArrayType(DoubleType()))]
)
def test_what_holds_no_numbers_is_no_column_to_train_on(kind: DataType) -> None:
    with pytest.raises(
        TypeError, match=r"featureCols: column 'c' is .*; it must be a number, a boolean, an array of these"
    ):
        check_columns(StructType([StructField("c", kind)]), ["c"], "featureCols")


def test_one_number_a_row_is_neither_a_list_nor_bytes() -> None:
    schema = StructType(
        [StructField("b", BinaryType()), StructField("flag", BooleanType()), StructField("d", DecimalType())]
    )
    check_columns(schema, schema.names, "featureCols")
    check_scalars(schema, ["flag", "d"], "weightCol")
    with pytest.raises(TypeError, match="weightCol: column 'b' is binary; it must be one number or boolean a row"):
        check_scalars(schema, ["b"], "weightCol")
