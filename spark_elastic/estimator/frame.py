"""Reads facts about columns from a DataFrame's schema, and converts columns to numbers and arrays of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
)

from spark_elastic._json import Json

# What one pass over the data found about each column, by names such as "min"; a value that does not exist is None.
Facts = Mapping[str, Mapping[str, Any]]

# Spark's setting by which pandas UDFs right after a Parquet scan are fed in columnar form.
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
# The collation of strings that have none.
_PLAIN = "UTF8_BINARY"


def check_columns(schema: StructType, names: Iterable[str], role: str) -> None:
    """Raise ValueError unless exactly one column has each name; TypeError if it holds neither numbers nor arrays of them."""
    for name in names:
        check_exists(schema, name, role)
        kind = schema[name].dataType
        if not (_is_number(kind) or is_list(kind)) or (
            isinstance(kind, ArrayType) and not _is_number(kind.elementType)
        ):
            raise TypeError(
                f"{role}: column {name!r} is {kind.simpleString()}; it must be a number, a boolean, an array of these, a vector "
                f"or binary{_hint(name, kind)}"
            )


def check_exists(schema: StructType, name: str, role: str) -> None:
    """Raise ValueError unless exactly one column has this name."""
    if name not in schema.names:
        raise ValueError(
            f"{role}: there is no column {name!r}; the DataFrame has {', '.join(schema.names)}{_fields_of(schema, name)}"
        )
    if schema.names.count(name) > 1:
        raise ValueError(
            f"{role}: {schema.names.count(name)} columns of the DataFrame are named {name!r}, as after a join on an expression; "
            "rename or drop all but one, or join by on=[…]"
        )


def is_case_sensitive(frame: DataFrame) -> bool:
    """Whether Spark tells columns apart whose names differ only in case."""
    return str(frame.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def unambiguous(frame: DataFrame) -> list[str]:
    """Return the names by which Spark means exactly one column each, in order."""
    fold = str if is_case_sensitive(frame) else str.lower
    count = Counter(map(fold, frame.columns))
    return [name for name in frame.columns if count[fold(name)] == 1]


def check_case(frame: DataFrame, names: Iterable[str]) -> None:
    """Raise ValueError for a name by which Spark could mean several columns."""
    columns = dict.fromkeys(frame.columns)
    count = Counter(map(str.lower, columns))
    for name in names:
        if count[name.lower()] > 1 and not is_case_sensitive(frame):
            alike = " and ".join(repr(other) for other in columns if other.lower() == name.lower())
            raise ValueError(
                f"the columns {alike} have one name to Spark, which ignores case: rename all but one, or set "
                "spark.sql.caseSensitive to true"
            )


def check_free(frame: DataFrame, added: Iterable[str]) -> None:
    """Raise ValueError for a column that ``transform`` adds twice or the DataFrame already has, in Spark's view of case."""
    fold = str if is_case_sensitive(frame) else str.lower
    there = {fold(name): name for name in frame.columns}
    made = set()
    for name in added:
        taken = there.get(fold(name))
        if taken is not None:
            alike = "" if taken == name else f", as {taken!r}"
            raise ValueError(f"the output column {name!r} exists already in the DataFrame{alike}")
        if fold(name) in made:
            seen = "" if name in made else ", as Spark ignores case"
            raise ValueError(f"two outputs have the column {name!r}{seen}; give each a name of its own")
        made |= {fold(name), name}


def _hint(name: str, kind: DataType) -> str:
    """Say how to turn such a column into numbers, if Spark has a way."""
    if isinstance(kind, StringType):
        return "; StringIndexer makes numbers of strings"
    if isinstance(kind, StructType) and kind.names:
        return f"; name one of its fields, as in {f'{name}.{kind.names[0]}'!r}"
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        return f"; flatten({name!r}) makes one list of its lists, which the network can reshape"
    return ""


def _fields_of(schema: StructType, name: str) -> str:
    """List the fields of the struct that the first part of the name refers to, if it is one."""
    outer = name.partition(".")[0]
    kind = schema[outer].dataType if outer in schema.names else None
    return f", and {outer!r} has {', '.join(kind.names)}" if isinstance(kind, StructType) and outer != name else ""


def with_fields(frame: DataFrame, names: Iterable[str | None]) -> DataFrame:
    """Return the frame with a column ``a.b`` of its own for each name that is no column, but means a field of a struct.

    Raises ValueError for a name that Spark cannot tell from that of a column, because it ignores case.
    """
    schema, known = frame.schema, unambiguous(frame)
    paths = {name: _path_of(schema, name) for name in names if name and name not in schema.names}
    fields = {name: path for name, path in paths.items() if path is not None and name.partition(".")[0] in known}
    for name in fields:
        alike = [other for other in schema.names if other.lower() == name.lower()]
        if alike and not is_case_sensitive(frame):
            raise ValueError(
                f"the column {alike[0]!r} and the field {name!r} have one name to Spark, which ignores case: rename one, or set "
                "spark.sql.caseSensitive to true"
            )
    return frame.withColumns(fields) if fields else frame


def _path_of(schema: StructType, name: str) -> Column | None:
    """Return the field that a name such as ``a.b.c`` means; None if there is none."""
    outer, *inner = name.split(".")
    if outer not in schema.names:
        return None
    kind, found = schema[outer].dataType, column(outer)
    for part in inner:
        if not isinstance(kind, StructType) or part not in kind.names:
            return None
        kind, found = kind[part].dataType, found.getField(part)
    return found


def check_scalars(schema: StructType, names: Iterable[str], role: str) -> None:
    """Raise ValueError unless exactly one column has each name; TypeError if it holds anything but one number a row."""
    for name in names:
        check_exists(schema, name, role)
        kind = schema[name].dataType
        if not _is_number(kind):
            shown = f"{role}: column {name!r} is {kind.simpleString()}"
            raise TypeError(f"{shown}; it must be one number or boolean a row{_hint(name, kind)}")


def check_orderable(schema: StructType, name: str, role: str) -> None:
    """Raise ValueError unless exactly one column has this name; TypeError if Spark cannot group rows by its values."""
    check_exists(schema, name, role)
    kind = schema[name].dataType
    if not _is_orderable(kind):
        raise TypeError(
            f"{role}: column {name!r} is {kind.simpleString()}, by which Spark cannot group rows; it must be a string, a number "
            "or another type that can be sorted"
        )


def _is_orderable(kind: DataType) -> bool:
    if isinstance(kind, UserDefinedType):
        return _is_orderable(kind.sqlType())
    if isinstance(kind, StructType):
        return all(_is_orderable(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _is_orderable(kind.elementType)
    # By name, because pyspark 3.5 does not know all of them.
    return kind.typeName() not in ("map", "variant", "interval", "geometry", "geography")


def is_vector(kind: DataType) -> bool:
    """Whether a column holds Spark ML's vectors."""
    return isinstance(kind, VectorUDT)


def is_only_in_rows(kind: DataType) -> bool:
    """Whether Spark cannot feed a column to pandas UDFs in columnar form.

    These are vectors, other types of users, strings with a collation and nulls of no type, also in structs, arrays and maps.
    """
    if isinstance(kind, StructType):
        return any(is_only_in_rows(field.dataType) for field in kind.fields)
    # pyspark 3.5 knows no collations.
    if isinstance(kind, (NullType, UserDefinedType)) or getattr(kind, "collation", _PLAIN) != _PLAIN:
        return True
    parts = (getattr(kind, name, None) for name in ("elementType", "keyType", "valueType"))
    return any(is_only_in_rows(part) for part in parts if part is not None)


def is_list(kind: DataType) -> bool:
    """Whether a row of the column holds several numbers."""
    return is_vector(kind) or isinstance(kind, (ArrayType, BinaryType))


def shown_columns(frame: DataFrame, schema: StructType) -> list[str]:
    """Return the columns by whose values messages show a row: those of single values, of whose names there is one each."""
    lists = {field.name for field in schema if is_list(field.dataType)}
    return [name for name in unambiguous(frame) if name not in lists]


def is_fractional(kind: DataType) -> bool:
    """Whether a column holds single numbers of a fractional type."""
    return isinstance(kind, (FloatType, DoubleType, DecimalType))


def is_index(field: StructField) -> bool:
    """Whether a column holds whole numbers, or doubles written by StringIndexer."""
    attribute = (field.metadata or {}).get("ml_attr", {})
    return isinstance(field.dataType, IntegralType) or attribute.get("type") == "nominal"


def row_shape(field: StructField) -> tuple[int, ...] | None:
    """Return the shape of one row: () for a number, (size,) for a vector of known size, None if the schema does not say."""
    if not is_list(field.dataType):
        return ()
    attributes = (field.metadata or {}).get("ml_attr", {})
    size = attributes.get("num_attrs")
    return (int(size),) if is_vector(field.dataType) and size else None


def labels_of(field: StructField) -> dict[str, Json]:
    """Return the ML attribute of a label column that StringIndexer made, from which IndexToString recovers the strings."""
    metadata = field.metadata or {}
    return dict(metadata) if metadata.get("ml_attr", {}).get("vals") else {}


def column(name: str) -> Column:
    """Return the column with exactly this name, which may contain dots."""
    return f.col("`" + name.replace("`", "``") + "`")


def as_numbers(name: str, kind: DataType) -> Column:
    """Return the column in the form that is best for Parquet and Arrow: vectors as dense arrays, fractional numbers as float.

    kind: the column's type. A wide frame's schema is to be read once, since each time Spark Connect makes a copy of it.
    """
    if isinstance(kind, BinaryType):
        return as_list(name, kind).alias(name)
    if is_vector(kind):
        # Without the condition, Spark's function would raise for nulls without naming the column.
        return f.when(column(name).isNotNull(), vector_to_array(column(name), "float32")).alias(name)
    if isinstance(kind, ArrayType):
        return column(name).cast(ArrayType(_narrow(kind.elementType))).alias(name)
    return column(name).cast(_narrow(kind)).alias(name)


def as_list(name: str, kind: DataType) -> Column:
    """Return a column of vectors, arrays or bytes as arrays; each byte is a number from 0 to 255."""
    if isinstance(kind, BinaryType):
        return _numbers_of_bytes()(column(name))
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, DecimalType):
        return column(name).cast(ArrayType(DoubleType()))
    return vector_to_array(column(name), "float32") if is_vector(kind) else column(name)


def _numbers_of_bytes() -> Callable[[Column], Column]:
    import pandas as pd

    def numbers(values: pd.Series) -> pd.Series:
        return values.map(lambda value: np.frombuffer(value, np.uint8).astype(np.int16), na_action="ignore")

    # Spark needs classes as annotations, not their names.
    numbers.__annotations__ = {"values": pd.Series, "return": pd.Series}
    udf: Callable[[Column], Column] = pandas_udf(numbers, ArrayType(ShortType()))  # type: ignore[call-overload]
    return udf


def in_rows(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the DataFrame, with a filter that lets all rows pass if one of its columns ``is_only_in_rows``.

    names: columns, of which the cheapest is in the condition. Right after a Parquet scan, Spark 4.2 and later feed pandas UDFs
    in columnar form, for which they refuse such columns also where no UDF takes them. A filter passes on rows. Spark's setting
    for this would affect the user's whole session. Spark's optimizer does not detect that the condition always holds. The
    condition is deterministic, so it keeps no other filter from being pushed to the scan.
    """
    session = frame.sparkSession
    version = tuple(map(int, session.version.split(".")[:2]))
    is_columnar = version >= (4, 2) and str(session.conf.get(_COLUMNAR, "true")).lower() == "true"
    schema = frame.schema
    if not is_columnar or not any(is_only_in_rows(field.dataType) for field in schema):
        return frame
    cheapest = min(names, key=lambda name: is_list(schema[name].dataType))
    return frame.where(f.hash(column(cheapest)) >= -(2**31))


def _narrow(kind: DataType) -> DataType:
    return FloatType() if isinstance(kind, (DoubleType, DecimalType)) else kind


def _is_number(kind: DataType) -> bool:
    return isinstance(kind, (IntegralType, FloatType, DoubleType, DecimalType, BooleanType))
