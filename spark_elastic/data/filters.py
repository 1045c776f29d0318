"""Row filters: determine which row groups can hold passing rows, and which rows pass, counted once for the whole job.

Steps, tail and lengths follow from the number of rows, so the passing rows must be counted before the first step. Row groups
that the footers' statistics exclude are not read; from the others, only the columns that filter and predicate name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import Manifest, RowGroup
from spark_elastic.data.pinning import key_of
from spark_elastic.data.predicates import PredicateBase, checked, fields_of
from spark_elastic.data.row_values import Values, column_values, row_values
from spark_elastic.data.source import Source, each_file
from spark_elastic.errors import DataError

Filters = object  # pc.Expression, or tuples (column, op, value), ANDed, or lists of such, ORed

_NUMBER = "__spark_elastic_row"
_CHUNK = 65_536
# A value that is not negative passes with a negative number as it passes by this operator with 0.
_WITH_ZERO = {"=": "<", "==": "<", "<": "<", "<=": "<", "!=": ">=", ">": ">=", ">=": ">="}
_COUNTED = np.dtype([("rows", "<i8"), ("digest", "<u8")])  # for a row group: how many rows pass, and a hash of which


class RowFilter:
    """Passes the rows that pass both ``filters``, in pyarrow's form, and ``predicate``.

    Raises ValueError for arguments that do not fit the dataset, and DataError if files have two columns of the name of one of
    theirs. Call ``count`` or ``expect`` before ``passing``, which raises
    DataError if other rows pass than were counted: a predicate whose answers change would lose rows.
    """

    def __init__(self, manifest: Manifest, filters: Filters, predicate: PredicateBase | None = None) -> None:
        self.schema = pa.schema([*manifest.schema, *manifest.partition_types.items()])
        self.expression, text = _expression_and_text(filters, self.schema)
        self._predicate = None if predicate is None else checked(predicate)
        self._fields = [] if self._predicate is None else self._fields_of(self._predicate)
        self._values: Values = column_values
        if manifest.unischema and self._fields:
            from spark_elastic.data.unischema import Decoder

            self._values = Decoder(manifest.unischema).values
        # A pyarrow expression does not list its fields, so they are found in its text. A false match costs no more than reading
        # a column.
        if "FieldPath(" in text:  # the rows below have some of the columns only, in another order
            raise ValueError(f"filters={filters!r} gives a column by its position: give its name")
        named = [name for name in self.schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
        self.columns = list(dict.fromkeys([*named, *self._fields]))
        self._text = text
        self._counted = np.zeros(0, _COUNTED)
        twice = next((name for name in self.columns if self.schema.names.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"{manifest.name}: the files have several columns named {twice!r}, which filters= or predicate= cannot tell apart"
            )
        if self.expression is None:
            return
        try:
            types = {name: self.schema.field(name).type for name in self.columns}
            # One row of nulls, because with no rows pyarrow would even compare times with and without a zone.
            pa.table({name: pa.nulls(1, kind) for name, kind in types.items()}).filter(self.expression)
        except (pa.ArrowException, ValueError) as failure:
            raise ValueError(f"filters={filters!r} does not fit the dataset's columns: {failure}") from failure

    @property
    def text(self) -> str:
        """Identifies the passing rows, once counted: the expression, and for a predicate a hash of the rows that it passes."""
        if self._predicate is None:
            return self._text
        rows = hashlib.blake2b(self._counted.tobytes(), digest_size=8).hexdigest()
        return f"{self._text} and a predicate that passes the rows {rows}".removeprefix(" and ")

    @property
    def key(self) -> str | None:
        """Identifies filter and predicate before counting, equally in all processes; None if they cannot be pickled."""
        if self._predicate:
            return key_of((self._text, self._predicate))
        return hashlib.blake2b(self._text.encode(), digest_size=8).hexdigest()

    def count(self, manifest: Manifest, locations: Sequence[Location]) -> bytes:
        """Find the passing rows of each row group; return the bytes that ``expect`` takes. Reads data; raises DataError."""
        counted = np.zeros(len(manifest), _COUNTED)

        def count_file(source: Source, groups: list[int]) -> None:
            for group in self._may_pass(source, manifest, groups):
                numbers = self._read(source, group)
                counted[group] = (len(numbers), _digest(numbers))

        each_file(manifest, locations, count_file)
        return counted.tobytes()

    def expect(self, counted: bytes) -> np.ndarray:
        """Take the result of ``count``, from this or another process; return each row group's number of passing rows, int64."""
        self._counted = np.frombuffer(counted, _COUNTED)
        return self._counted["rows"].astype(np.int64)

    def passing(self, source: Source, group: int) -> np.ndarray:
        """Read which rows of a row group pass: int64, as stored, ascending. Raises DataError."""
        counted = self._counted[group]
        numbers = self._read(source, group) if counted["rows"] else np.zeros(0, np.int64)
        if len(numbers) != counted["rows"] or (len(numbers) and _digest(numbers) != counted["digest"]):
            raise DataError(
                f"{source.manifest.where(group)}: other rows pass now than when they were counted ({len(numbers)}, then "
                f"{counted['rows']}); a predicate must answer from the row's values alone"
            )
        return numbers

    def _read(self, source: Source, group: int) -> np.ndarray:
        where, found, first = source.manifest.where(group), [], 0
        for batch in source.batches(group, self.columns, _CHUNK):
            numbers = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
            first += batch.num_rows
            table = pa.Table.from_batches([batch]).append_column(_NUMBER, numbers)
            found.append(self._apply(table, where).column(_NUMBER).to_numpy())
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _apply(self, table: pa.Table, where: str) -> pa.Table:
        if self.expression is not None:
            table = table.filter(self.expression)
        if self._predicate is None or not len(table):
            return table
        rows = row_values(table.select(self._fields), where, self._values)
        try:
            included = [bool(self._predicate.do_include(values)) for values in rows]
        except Exception as failure:
            raise DataError(f"{where}: predicate raised {type(failure).__name__}: {failure}") from failure
        return table.filter(pa.array(included, pa.bool_()))

    def _fields_of(self, predicate: PredicateBase) -> list[str]:
        fields = sorted(fields_of(predicate))
        for name in fields:
            if name not in self.schema.names:
                raise ValueError(f"predicate: {name!r} is not in the dataset, which has {', '.join(self.schema.names)}")
        return fields

    def _may_pass(self, source: Source, manifest: Manifest, indices: list[int]) -> list[int]:
        if self.expression is None:
            return indices
        first = manifest.row_groups[indices[0]]
        fragment = pads.ParquetFileFormat().make_fragment(
            source.locations[first.root].join(first.path),
            source.locations[first.root].filesystem,
            partition_expression=_partition(first, manifest),
        )
        with source.naming(indices[0]):
            kept = {group.id for group in fragment.subset(self.expression, schema=self.schema).row_groups}
        return [index for index in indices if manifest.row_groups[index].ordinal in kept]


def _expression_and_text(filters: Filters | None, schema: pa.Schema) -> tuple[pc.Expression | None, str]:
    """Return the expression that passes rows, and the text that identifies it in checkpoints."""
    if filters is None:
        return None, ""
    if isinstance(filters, pc.Expression):
        return filters, _text(filters)
    types = {field.name: field.type for field in schema}
    ordered = _ordered(filters)
    try:
        fitted = _fitted(ordered, types)
        expression = named = pq.filters_to_expression(fitted)
        if fitted is not ordered:
            # Checkpoints of earlier releases hold the text of what pyarrow makes of the numbers as they are given.
            with suppress(OverflowError, pa.ArrowInvalid):
                named = pq.filters_to_expression(ordered)
        return expression, _text(named)
    except OverflowError as failure:
        raise ValueError(
            f"filters={filters!r} has a whole number that is too large or too small: columns of uint64 are compared with those "
            "up to 2**64 - 1, columns of other whole numbers with -2**63 to 2**63 - 1"
        ) from failure
    except (TypeError, ValueError, pa.ArrowException) as failure:
        raise ValueError(f"filters={filters!r} is not what pyarrow takes: {failure}") from failure


def _ordered(filters: object) -> object:
    """Order the sets in filters equally in each process, because the filters' texts have to be equal."""
    if isinstance(filters, (set, frozenset)):
        return sorted(filters, key=lambda value: (str(type(value)), value))
    if isinstance(filters, (list, tuple)):
        return type(filters)(map(_ordered, filters))
    return filters


def _fitted(filters: object, types: Mapping[str, pa.DataType]) -> object:
    """Make uint64 or float of whole numbers that are compared with such columns, where pyarrow's int64 would not do.

    Returns the same object if nothing has to change.
    """
    match filters:
        case [str(name), str(), _]:
            if name in types and pa.types.is_uint64(types[name]):
                return _for_unsigned(filters)
            return _for_floating(filters) if name in types and pa.types.is_floating(types[name]) else filters
        case list() | tuple():
            parts = [_fitted(part, types) for part in filters]
            is_same = all(new is old for new, old in zip(parts, filters, strict=True))
            return filters if is_same else type(filters)(parts)
    return filters


def _for_unsigned(comparison: Sequence[Any]) -> Sequence[Any]:
    """Compare with uint64, of which no value is negative: negative numbers are compared like 0, and left out of lists."""
    name, operator, value = comparison
    if _are_whole([value]):
        if value < 0:
            return name, _WITH_ZERO.get(operator, operator), pa.scalar(0, pa.uint64())
        return name, operator, pa.scalar(int(value), pa.uint64())
    if isinstance(value, (list, tuple)) and _some_beyond(value, 0):
        return name, operator, pa.array([each for each in value if each is None or each >= 0], pa.uint64())
    return comparison


def _for_floating(comparison: Sequence[Any]) -> Sequence[Any]:
    name, operator, value = comparison
    if _some_beyond([value], -(2**63)):
        return name, operator, float(value)
    if isinstance(value, (list, tuple)) and _some_beyond(value, -(2**63)):
        return name, operator, [None if each is None else float(each) for each in value]
    return comparison


def _some_beyond(values: Sequence[Any], least: int) -> bool:
    """Whether all values are whole numbers or None, and some are less than ``least`` or at least 2**63."""
    numbers = [value for value in values if value is not None]
    return bool(numbers) and _are_whole(numbers) and not least <= min(numbers) <= max(numbers) < 2**63


def _are_whole(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    return all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds)


def _text(expression: pc.Expression) -> str:
    """Describe an expression. pyarrow abbreviates long lists and long values, so a hash of all values is added then."""
    text = str(expression)
    return f"{text} {key_of(expression)}" if "\n  ...\n" in text or " omitted)" in text else text


def _digest(numbers: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=8).digest(), "little")


def _partition(group: RowGroup, manifest: Manifest) -> pc.Expression:
    expression = pc.scalar(True)
    for name, value in group.partition:
        kind = manifest.partition_types.get(name)
        if kind is None:
            continue
        scalar = pa.scalar(value, pa.string()).cast(kind)
        expression = expression & (pc.field(name).is_null() if value is None else pc.field(name) == scalar)
    return expression
