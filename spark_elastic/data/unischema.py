"""Reads datasets that Petastorm wrote, without Petastorm: their schema is a pickle, their columns are encoded.

The pickle is read by an unpickler that admits only the names that occur in a Unischema, and builds stand-ins for them. So no
foreign code runs, and neither petastorm nor pyspark is needed.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from spark_elastic.data.column_choice import Columns, choose_columns
from spark_elastic.data.images import decode_image
from spark_elastic.data.row_values import column_values, times_of, whole
from spark_elastic.errors import DataError

_NUMBERS = ("bool_", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "float32", "float64")
_OTHERS = ("str_", "unicode_", "bytes_", "string_", "datetime64", "timedelta64", "object_", "void")
_WIDE = ("longlong", "ulonglong", "longdouble", "complex64", "complex128", "clongdouble")
PETASTORM_PACKAGES = ("petastorm", "av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
# The names under which several releases of Python and NumPy pickle the same type.
_KINDS = {
    "int": "int64",
    "long": "int64",
    "longlong": "int64",
    "ulonglong": "uint64",
    "float": "float64",
    "bool_": "bool",
    "str": "str_",
    "unicode": "str_",
    "unicode_": "str_",
    "bytes": "bytes_",
    "string_": "bytes_",
}
_TEXTS = {"str_": pa.string(), "bytes_": pa.binary()}
_SCALARS = ("", "ScalarCodec")
_CODECS = ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec")


@dataclass(frozen=True, slots=True)
class Field:
    """One field: shape with None for free dimensions, and the codec's name or "".

    ``kind`` is the name of its NumPy type, such as "str_", or of another class; ``dtype`` is None if it is not a number.
    """

    name: str
    kind: str
    dtype: np.dtype | None
    shape: tuple[int | None, ...]
    codec: str
    nullable: bool


class _StandIn:
    """An instance of a class that the pickle names. Its state is set as attributes, and no other code runs."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _UnischemaField(NamedTuple):
    name: str
    numpy_dtype: object
    shape: tuple[int | None, ...] = ()
    codec: object = None
    nullable: bool | None = False


class _Type:
    """A stand-in for a class that the pickle only refers to by name, such as numpy.int32."""

    def __init__(self, name: str) -> None:
        self.name = name


def _reconstruct(kind: type, base: type, state: Any) -> object:
    """Stand in for copyreg._reconstructor, by which old pickles make plain objects."""
    if kind is _UnischemaField and base is tuple:
        return _UnischemaField(*state)
    if not (isinstance(kind, type) and issubclass(kind, _StandIn)):
        raise pickle.UnpicklingError(f"{kind!r} may not be made here")
    return kind()


def _restore(name: object, fields: Sequence[str], values: Sequence[object]) -> _UnischemaField:
    """Stand in for pyspark.serializers._restore, by which older releases of pyspark pickled every namedtuple."""
    if name != "UnischemaField":
        raise pickle.UnpicklingError(f"it has a namedtuple {name!r}, which no Unischema needs")
    return _UnischemaField(**dict(zip(fields, values, strict=True)))  # type: ignore[arg-type]


def _stand_in(name: str) -> type:
    return type(name, (_StandIn,), {})


# Functions that make objects, by their module and name in pickles.
_FUNCTIONS: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("copy_reg", "_reconstructor"): _reconstruct,
    ("pyspark.serializers", "_restore"): _restore,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        package, _, last = module.rpartition(".")
        if package in PETASTORM_PACKAGES and last == "unischema" and name == "Unischema":
            return _stand_in(name)
        if name == "UnischemaField" and (
            module == "collections" or (package in PETASTORM_PACKAGES and last == "unischema")
        ):
            return _UnischemaField
        if package in PETASTORM_PACKAGES and last == "codecs" and name in _CODECS:
            return _stand_in(name)
        if module == "numpy" and name in (*_NUMBERS, *_FLOATS, *_OTHERS, *_WIDE):
            return _Type(name)
        if module == "pyspark.sql.types" and name.isidentifier() and name.endswith("Type"):
            return _stand_in(name)
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if (module, name) == ("decimal", "Decimal"):
            return _Type(name)
        if module in ("builtins", "__builtin__"):
            if name in ("str", "unicode", "bytes", "int", "long", "float", "bool"):
                return _Type(name)
            if name in ("object", "tuple"):
                return object if name == "object" else tuple
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no Unischema needs")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it has persistent ids, which no Unischema needs")


def read_fields(pickled: bytes) -> list[Field]:
    """Return the fields of a pickled Unischema. Raises DataError for anything else, before any of it is run."""
    try:
        schema = _Unpickler(io.BytesIO(pickled)).load()
        found = schema._fields
        return [_field(field) for field in found.values()]
    except Exception as failure:
        raise DataError(f"the dataset's Petastorm schema cannot be read: {failure}") from failure


def _field(raw: _UnischemaField) -> Field:
    name = raw.numpy_dtype.name if isinstance(raw.numpy_dtype, _Type) else ""
    kind = _KINDS.get(name, name)
    dtype = np.dtype(kind) if kind in (*_NUMBERS, *_FLOATS) else None
    codec = type(raw.codec).__name__ if raw.codec is not None else ""
    if codec and codec not in _CODECS:
        raise ValueError(f"field {raw.name!r} has codec {codec}")
    shape = tuple(None if size is None else int(size) for size in raw.shape or ())
    return Field(str(raw.name), kind, dtype, shape, codec, bool(raw.nullable))


def scalar_types(pickled: bytes) -> dict[str, pa.DataType]:
    """Return the Arrow types of the fields that are single texts and numbers. Raises as ``read_fields`` does."""
    types = {}
    for field in read_fields(pickled):
        if field.shape or field.codec not in _SCALARS:
            continue
        if field.kind == "str_":
            types[field.name] = pa.string()
        elif field.dtype is not None:  # some releases of pyarrow make no half floats of texts
            types[field.name] = pa.float32() if field.kind == "float16" else pa.from_numpy_dtype(field.dtype)
    return types


class Decoder:
    """Decodes the columns of a Petastorm dataset, a table at a time.

    Fields of a fixed shape become fixed-shape tensors. Fields with one free dimension become lists. With more dimensions, a
    ``transform`` gets a struct of ``data`` (a flat list) and ``shape``; without a transform, all arrays of a dataset must have
    the same shape. A ``transform`` gets arrays of text and bytes as lists, and those of other types without numbers as stored.
    """

    def __init__(self, pickled: bytes, *, transformed: bool = False) -> None:
        self.fields = {field.name: field for field in read_fields(pickled)}
        self._transformed = transformed

    def select(self, columns: Columns, stored: Sequence[str]) -> list[str]:
        """Return the columns to read. Raises the same errors as ``arrow_engine.select_columns``."""
        known = [name for name in self.fields if name in stored]

        def trouble(name: str) -> str:
            return "" if self._transformed or self.fields[name].dtype is not None else "not of numbers"

        return (
            [name for name in known if not trouble(name)]
            if columns is None
            else choose_columns(columns, known, trouble)
        )

    def row_bytes(self, columns: Sequence[str]) -> float:
        """Return the size of a decoded row in bytes. A free dimension counts as 64."""
        sizes = [field for name in columns if (field := self.fields[name]).dtype is not None]
        return float(sum(f.dtype.itemsize * np.prod([n or 64 for n in f.shape]) for f in sizes if f.dtype is not None))

    def __call__(self, table: pa.Table, where: str) -> pa.Table:
        """Return the table with every encoded column decoded. Raises DataError naming column and row group."""
        for place, name in enumerate(table.column_names):
            field = self.fields.get(name)
            if field is None or (field.dtype is None and (field.codec in _SCALARS or field.kind not in _TEXTS)):
                continue
            with _naming(field, where):
                table = table.set_column(place, name, self._decode(field, whole(table.column(place))))
        return table

    def values(self, column: pa.Array, name: str, where: str) -> Sequence[object]:
        """Return a column's values as Petastorm's ``make_reader`` gives them. Raises DataError naming column and row group."""
        field = self.fields.get(name)
        if field is None:
            return column_values(column, name, where)
        with _naming(field, where):
            if field.codec not in _SCALARS:
                return list(_arrays(field, column))
            if field.kind == "datetime64" and pa.types.is_timestamp(column.type):
                return times_of(column, "us")
            if field.kind == "datetime64" and pa.types.is_date(column.type):
                return times_of(column, "D")
            return column_values(column if field.dtype is None else _cast(field, column), name, where)

    def _decode(self, field: Field, column: pa.Array) -> pa.Array:
        if field.codec in _SCALARS:
            return _cast(field, column)
        values = _arrays(field, column)
        if field.dtype is None or None in field.shape:
            return self._assemble(field, list(values))
        if isinstance(values, list) and not column.null_count and values:
            values = np.stack(values)  # type: ignore[arg-type]
        return self._assemble(field, values)

    def _assemble(self, field: Field, values: np.ndarray | list[np.ndarray | None]) -> pa.Array:
        kind = _TEXTS[field.kind] if field.dtype is None else pa.from_numpy_dtype(field.dtype)
        if isinstance(values, np.ndarray):
            return _tensors(values.astype(field.dtype, copy=False))
        if len(field.shape) == 1 or None not in field.shape:
            lists = [None if value is None else value.ravel() for value in values]
            return pa.array(lists, pa.list_(kind))
        if self._transformed:
            rows = [None if v is None else {"data": v.ravel(), "shape": list(v.shape)} for v in values]
            return pa.array(rows, pa.struct([("data", pa.list_(kind)), ("shape", pa.list_(pa.int32()))]))
        shapes = sorted({value.shape for value in values if value is not None})
        if len(shapes) > 1 or any(value is None for value in values):
            raise DataError(f"its values have shapes {shapes}; give a transform= that makes them equal")
        return _tensors(np.stack(values).astype(field.dtype, copy=False))  # type: ignore[arg-type]


@contextlib.contextmanager
def _naming(field: Field, where: str) -> Iterator[None]:
    """Turn failures to decode a field into a DataError that names the column and row group."""
    try:
        yield
    except DataError as failure:
        raise DataError(f"{where}: column {field.name!r}: {failure}") from failure
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, pa.ArrowException) as failure:
        raise DataError(f"{where}: column {field.name!r} cannot be decoded ({field.codec}): {failure}") from failure


def _arrays(field: Field, column: pa.Array) -> np.ndarray | list[np.ndarray | None]:
    """Return an encoded column's arrays as one, if that is fast, else as a list, with None for a null."""
    plain = _same_headers(field, column) if field.codec == "NdarrayCodec" and not column.null_count else None
    if plain is not None:
        return _native(plain)
    one: Callable[[bytes], np.ndarray] = {
        "NdarrayCodec": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
        "CompressedNdarrayCodec": lambda data: np.load(io.BytesIO(data), allow_pickle=False)["arr"],
        "CompressedImageCodec": decode_image,
    }[field.codec]
    values = [None if data is None else _native(one(data)) for data in column.to_pylist()]
    for value in values:
        _check(field, value)
    return values


def _native(values: np.ndarray) -> np.ndarray:
    """Return an array in this machine's byte order, which Arrow needs."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _check(field: Field, value: np.ndarray | None) -> None:
    if value is None:
        return
    fits = len(value.shape) == len(field.shape) and all(
        wanted is None or wanted == size for wanted, size in zip(field.shape, value.shape, strict=True)
    )
    if not fits or (field.dtype is not None and value.dtype != field.dtype):
        raise DataError(
            f"a value is {value.dtype} of shape {value.shape}, the schema says {field.kind} of {field.shape}"
        )


def _cast(field: Field, column: pa.Array) -> pa.Array:
    assert field.dtype is not None
    kind = pa.from_numpy_dtype(field.dtype)
    if field.shape or column.type == kind:
        return column
    if pa.types.is_float16(kind):  # which older releases of pyarrow cannot cast to
        with np.errstate(over="ignore"):
            numbers = column.to_numpy(zero_copy_only=False).astype(np.float16)
        return pa.array(numbers, mask=column.is_null().to_numpy(zero_copy_only=False))
    return column.cast(kind)


def _same_headers(field: Field, column: pa.Array) -> np.ndarray | None:
    """Decode arrays with identical headers all at once; None if the headers differ."""
    if not len(column) or not (pa.types.is_binary(column.type) and column.offset >= 0):
        return None
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths = np.diff(offsets)
    first = np.load(io.BytesIO(column[0].as_py()), allow_pickle=False)
    _check(field, _native(first))
    header = int(lengths[0]) - first.nbytes
    if (lengths != lengths[0]).any() or not first.flags.c_contiguous or not first.nbytes:
        return None
    data = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(column), -1)
    if (data[:, :header] != data[0, :header]).any():
        return None
    values: np.ndarray = np.ascontiguousarray(data[:, header:]).view(first.dtype)
    return values.reshape(len(column), *first.shape)


def _tensors(values: np.ndarray) -> pa.Array:
    """Return [rows, …] as an Arrow column of numbers or fixed-shape tensors."""
    flat = pa.array(values.reshape(-1))
    if values.ndim == 1:
        return flat
    shape = values.shape[1:]
    size = int(np.prod(shape))
    kind = pa.fixed_shape_tensor(flat.type, shape)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, size))
