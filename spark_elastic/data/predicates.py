"""Predicates: conditions on rows, in Python. ``ParquetLoader(predicate=…)`` reads the rows for which a predicate is true.

They have the names and arguments of Petastorm's predicates, and pass the same rows; Petastorm's own are accepted as well. A
predicate is called for each row, which takes microseconds each time: conditions that pyarrow can express are faster in
``filters=``.

Values have the type of their column: a NumPy number, a string, an array for a list or an encoded array. A null is None, or NaN
if the column has fractional numbers. A timestamp is a datetime64[ns], in UTC if its column has a time zone; a date is a
``datetime.date``, in a list a datetime64. In a dataset of Petastorm's, a timestamp is a datetime64[us] and a date a
datetime64[D], as in its ``make_reader``. A predicate's answer must depend on the values alone, and always be the same.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np

from spark_elastic._integers import whole_number

__all__ = [
    "PredicateBase",
    "in_intersection",
    "in_lambda",
    "in_negate",
    "in_pseudorandom_split",
    "in_reduce",
    "in_set",
]

_UNITS = ("ns", "us")  # nanoseconds reach from 1678 to 2262 only


class PredicateBase(ABC):
    """Base class for conditions on rows. Any object with these two methods is a predicate, too."""

    @abstractmethod
    def get_fields(self) -> set[str]:
        """Return the names of the columns that ``do_include`` uses, at least one."""

    @abstractmethod
    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether to read a row with these values, given by column."""


class in_set(PredicateBase):
    """Passes rows whose value is in a set.

    inclusion_values: the values that pass. A ``datetime`` without a time zone, a ``date`` and a datetime64 pass the timestamps
    and dates of the same time, which is its midnight for a date. predicate_field: the name of the column. Its values have to be
    hashable.
    """

    def __init__(self, inclusion_values: Iterable[object], predicate_field: str) -> None:
        """Store the values as a set.

        Raises ValueError for a single string in place of several values and for a column that is not a name, and TypeError for
        values that cannot be hashed.
        """
        if isinstance(inclusion_values, str):
            raise ValueError(f"inclusion_values must be several values, not the string {inclusion_values!r}")
        self._values = frozenset(_as_timestamp(value, _UNITS) for value in _without_zones(inclusion_values))
        self._field = _name(predicate_field)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for pickling, in an order that is the same in all processes: that of a set of strings is not."""
        return {**vars(self), "_values": sorted(self._values, key=_sort_key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state."""
        vars(self).update(state, _values=frozenset(state["_values"]))

    def get_fields(self) -> set[str]:
        """Return the column."""
        return {self._field}

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether the value is in the set."""
        return _as_timestamp(values[self._field], _UNITS) in self._values


class in_intersection(PredicateBase):
    """Passes rows whose list contains at least one of the given values.

    inclusion_values: the values to look for; times as in ``in_set``. predicate_field: the name of a column of lists or arrays;
    nulls are an error.
    """

    def __init__(self, inclusion_values: Iterable[object], predicate_field: str) -> None:
        """Store the values in an order that is the same in all processes.

        Raises ValueError for a single string in place of several values and for a column that is not a name.
        """
        if isinstance(inclusion_values, str):
            raise ValueError(f"inclusion_values must be several values, not the string {inclusion_values!r}")
        self._values = sorted(map(_as_timestamp, _without_zones(inclusion_values)), key=_sort_key)  # a set has no order
        self._field = _name(predicate_field)

    def get_fields(self) -> set[str]:
        """Return the column."""
        return {self._field}

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether the list contains one of the values."""
        found = values[self._field]
        if not isinstance(found, (np.ndarray, Sequence)) or isinstance(found, (str, bytes)):
            raise ValueError(f"in_intersection needs lists in {self._field!r}, not {found!r}")
        return bool(np.isin(found, self._values).any())


class in_lambda(PredicateBase):
    """Passes rows for which a function is true.

    predicate_fields: the names of the columns whose values the function gets, in this order. predicate_func: the function.
    state_arg: a further argument for it, after the values, unless it is None.
    """

    def __init__(
        self, predicate_fields: Sequence[str], predicate_func: Callable[..., object], state_arg: object = None
    ) -> None:
        """Store the function, which is not called before rows are read.

        Raises ValueError for fields that are not a list of names, and TypeError for a function that is not callable.
        """
        if isinstance(predicate_fields, str) or not predicate_fields:
            raise ValueError(f"predicate_fields must be a list of names, not {predicate_fields!r}")
        if not callable(predicate_func):
            raise TypeError(f"predicate_func must be callable, not {predicate_func!r}")
        self._fields = [_name(field) for field in predicate_fields]
        self._function = predicate_func
        self._state = () if state_arg is None else (state_arg,)

    def get_fields(self) -> set[str]:
        """Return the columns."""
        return set(self._fields)

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return the function's result for the values."""
        return bool(self._function(*(values[field] for field in self._fields), *self._state))


class in_negate(PredicateBase):
    """Passes the rows that another predicate does not pass.

    predicate: the other predicate.
    """

    def __init__(self, predicate: PredicateBase) -> None:
        """Store the other predicate. Raises ValueError for an object without a predicate's methods."""
        self._predicate = checked(predicate)

    def get_fields(self) -> set[str]:
        """Return the other predicate's columns."""
        return fields_of(self._predicate)

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return the opposite of the other predicate's result."""
        return not self._predicate.do_include(values)


class in_reduce(PredicateBase):
    """Passes rows according to the combined results of several predicates.

    predicate_list: the predicates, all of which are called. reduce_func: reduces the list of their results to one, as ``all`` and
    ``any`` do.
    """

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[bool]], object]) -> None:
        """Store the predicates and the function, none of which is called before rows are read.

        Raises ValueError for an empty list and for an object without a predicate's methods, and TypeError for a function that
        is not callable.
        """
        if not predicate_list:
            raise ValueError("predicate_list must have at least one predicate")
        if not callable(reduce_func):
            raise TypeError(f"reduce_func must be callable, not {reduce_func!r}")
        self._predicates = [checked(predicate) for predicate in predicate_list]
        self._reduce = reduce_func

    def get_fields(self) -> set[str]:
        """Return the columns of all predicates."""
        return set().union(*map(fields_of, self._predicates))

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return the function's result for the predicates' results."""
        return bool(self._reduce([predicate.do_include(values) for predicate in self._predicates]))


class in_pseudorandom_split(PredicateBase):
    """Passes one subset of a random split that is always the same, because it depends on the values of one column alone.

    Rows with equal values are in the same subset, so a column of group ids (patients, days) keeps groups together.

    fraction_list: the approximate fraction of the values in each subset; if they add up to less than 1, the rest is in no
    subset. subset_index: which subset passes, from 0. predicate_field: the name of the column. The MD5 of its value as a string
    decides.
    """

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        """Compute the subset's range of hashes.

        Raises ValueError for fractions that are not parts of 1, for an index without a subset, and for a column that is not a
        name.
        """
        edges = list(itertools.accumulate(fraction_list, initial=0))
        if not (min(fraction_list, default=-1) >= 0 and edges[-1] <= 1 + 1e-9):  # NaN is neither
            raise ValueError(
                f"fraction_list must be parts of 1, none below 0 and in all at most 1, not {fraction_list!r}"
            )
        subset_index = whole_number("subset_index", subset_index, 0)
        if subset_index >= len(fraction_list):
            raise ValueError(f"subset_index must be from 0 to {len(fraction_list) - 1}, not {subset_index!r}")
        self._low, self._high = (edge * (sys.maxsize - 1) for edge in edges[subset_index : subset_index + 2])
        self._field = _name(predicate_field)

    def get_fields(self) -> set[str]:
        """Return the column."""
        return {self._field}

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether the hash of the value is in this subset's range."""
        text = str(values[self._field]).encode()
        bucket = int(hashlib.md5(text, usedforsecurity=False).hexdigest(), 16) % sys.maxsize
        return self._low <= bucket < self._high


def checked(predicate: PredicateBase) -> PredicateBase:
    """Return a predicate: ours, Petastorm's or a user's. Raises ValueError for anything else."""
    methods = (getattr(predicate, name, None) for name in ("get_fields", "do_include"))
    if isinstance(predicate, type) or not all(map(callable, methods)):
        raise ValueError(
            f"predicate must have get_fields() and do_include(values), as in_set(…) has, not be {predicate!r}"
        )
    return predicate


def fields_of(predicate: PredicateBase) -> set[str]:
    """Return the columns that a predicate uses. Raises ValueError if it does not name them properly."""
    found: object = predicate.get_fields()
    names = found if isinstance(found, Iterable) and not isinstance(found, (str, bytes)) else [None]
    fields = set(names)
    if not fields or not all(isinstance(field, str) for field in fields):
        raise ValueError(
            f"get_fields() of the predicate {predicate!r} must return the names of columns, at least one, not {found!r}"
        )
    return fields


def _without_zones(values: Iterable[object]) -> Iterator[object]:
    """Yield the values of a set. Raises ValueError for a time with a zone."""
    for value in values:
        if type(value) is datetime and value.tzinfo is not None:
            raise ValueError(
                f"inclusion_values: {value!r} has a time zone; give it without one, in UTC if its column has one"
            )
        yield value


def _as_timestamp(value: Any, units: Sequence[str] = ("ns",)) -> Any:
    """Return a time or date in the first unit that has it exactly, and anything else unchanged.

    Equal times of different units have different hashes in releases of NumPy before 2.
    """
    if isinstance(value, np.datetime64):
        time = value
    elif type(value) is date or (type(value) is datetime and value.tzinfo is None):
        time = np.datetime64(value, "us")
    else:
        return value
    for unit in units:
        found = time.astype(f"M8[{unit}]")
        if found.astype(time.dtype) == time:  # NumPy wraps around beyond a unit's range
            return found
    return value


def _sort_key(value: object) -> tuple[str, str]:
    """Return a key by which any two values can be sorted, equally in all processes."""
    return type(value).__name__, repr(value)


def _name(field: object) -> str:
    if not isinstance(field, str):
        raise ValueError(f"predicate_field must be the name of a column, not {field!r}")
    return field
