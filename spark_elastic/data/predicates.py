"""Predicates: conditions on rows, in Python. `ParquetLoader(predicate=…)` reads the rows for which one is true.

They have the names and arguments of Petastorm's, and pass the same rows; Petastorm's own are taken as well. A predicate is asked
row by row, which costs microseconds each time: what pyarrow can express is faster in `filters=`.

A value is what the column has: a number of NumPy, a string, an array for a list or an encoded array. A null is None, and NaN
where the column has fractional numbers. A timestamp is a datetime64[ns], in UTC where its column has a time zone; a date is a
`datetime.date`, in a list a datetime64. A predicate must answer from the values alone, and the same each time.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class PredicateBase(ABC):
    """A condition on rows. Subclasses are predicates, as is any object with these two methods."""

    @abstractmethod
    def get_fields(self) -> set[str]:
        """Return the names of the columns that `do_include` looks at, at least one."""

    @abstractmethod
    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return whether a row with these values, by column, is read."""


class in_set(PredicateBase):
    """Passes rows whose value is one of a set.

    inclusion_values: what passes; a `datetime` or `date` without a time zone passes the timestamps equal to it, a date those of
    its midnight. predicate_field: the name of the column, whose values have to be hashable.
    """

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        """Keep the values as a set.

        Raises ValueError for one string in the place of several values and for a column that is no name, and TypeError for values
        that cannot be hashed.
        """
        if isinstance(inclusion_values, str):
            raise ValueError(f"inclusion_values must be several values, not the string {inclusion_values!r}")
        given = frozenset(inclusion_values)
        self._values = given | {_as_timestamp(value) for value in given}
        self._field = _name(predicate_field)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickles, which are alike in all processes: a set of strings is in another order in each."""
        return {**vars(self), "_values": sorted(self._values, key=_sort_key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle."""
        vars(self).update(state, _values=frozenset(state["_values"]))

    def get_fields(self) -> set[str]:
        """Return the column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return whether the value is in the set."""
        return values[self._field] in self._values


class in_intersection(PredicateBase):
    """Passes rows whose list has at least one of some values.

    inclusion_values: what to look for; times as `in_set` has them. predicate_field: the name of a column of lists or arrays;
    nulls are an error.
    """

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        """Keep the values in an order that is the same in all processes.

        Raises ValueError for one string in the place of several values and for a column that is no name.
        """
        if isinstance(inclusion_values, str):
            raise ValueError(f"inclusion_values must be several values, not the string {inclusion_values!r}")
        self._values = sorted((_as_timestamp(value) for value in inclusion_values), key=_sort_key)  # a set has no order
        self._field = _name(predicate_field)

    def get_fields(self) -> set[str]:
        """Return the column."""
        return {self._field}

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return whether the list has one of the values."""
        found = values[self._field]
        if not isinstance(found, (np.ndarray, Sequence)) or isinstance(found, (str, bytes)):
            raise ValueError(f"in_intersection needs lists in {self._field!r}, not {found!r}")
        return bool(np.isin(found, self._values).any())


class in_lambda(PredicateBase):
    """Passes rows for which a function is true.

    predicate_fields: the names of the columns whose values the function gets, in this order. predicate_func: the function.
    state_arg: one more argument for it, after the values, unless it is None.
    """

    def __init__(
        self, predicate_fields: Sequence[str], predicate_func: Callable[..., Any], state_arg: Any = None
    ) -> None:
        """Keep the function, which is called for the first time when rows are read.

        Raises ValueError for fields that are no list of names, and TypeError for a function that cannot be called.
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

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return what the function says of the values."""
        return bool(self._function(*(values[field] for field in self._fields), *self._state))


class in_negate(PredicateBase):
    """Passes the rows that another predicate does not pass.

    predicate: the other one.
    """

    def __init__(self, predicate: PredicateBase) -> None:
        """Keep the other predicate. Raises ValueError for an object without a predicate's methods."""
        self._predicate = checked(predicate)

    def get_fields(self) -> set[str]:
        """Return the other predicate's columns."""
        return fields_of(self._predicate)

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return the opposite of what the other predicate says."""
        return not self._predicate.do_include(values)


class in_reduce(PredicateBase):
    """Passes rows by what several predicates say of them.

    predicate_list: the predicates, each of which is asked. reduce_func: makes one answer of the list of theirs, as `all` and
    `any` do.
    """

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[bool]], Any]) -> None:
        """Keep the predicates and the function, none of which is called before rows are read.

        Raises ValueError for an empty list and for an object without a predicate's methods, and TypeError for a function that
        cannot be called.
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

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return what the function makes of the predicates' answers."""
        return bool(self._reduce([predicate.do_include(values) for predicate in self._predicates]))


class in_pseudorandom_split(PredicateBase):
    """Passes one part of a random split, which is the same each time and everywhere, for it depends on one column alone.

    Rows of equal values are in the same part, so a column that tells groups apart (patients, days) keeps them together.

    fraction_list: the part of the values that each subset has, about; what is missing to 1 is in none. subset_index: which
    subset, from 0. predicate_field: the name of the column, the MD5 of whose value as a string decides.
    """

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        """Work out which part of all hashes the subset has.

        Raises ValueError for fractions that are no parts of 1, for a number that no subset has, and for a column that is no name.
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

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Return whether the hash of the value is in this subset's part of all hashes."""
        text = str(values[self._field]).encode()
        bucket = int(hashlib.md5(text, usedforsecurity=False).hexdigest(), 16) % sys.maxsize
        return self._low <= bucket < self._high


def checked(predicate: PredicateBase) -> PredicateBase:
    """Return a predicate, ours, Petastorm's or a user's. Raises ValueError for anything else."""
    methods = (getattr(predicate, name, None) for name in ("get_fields", "do_include"))
    if isinstance(predicate, type) or not all(map(callable, methods)):
        raise ValueError(
            f"predicate must have get_fields() and do_include(values), as in_set(…) has, not be {predicate!r}"
        )
    return predicate


def fields_of(predicate: PredicateBase) -> set[str]:
    """Return the columns that a predicate looks at. Raises ValueError where it does not name them as it should."""
    found: object = predicate.get_fields()
    names = found if isinstance(found, Iterable) and not isinstance(found, (str, bytes)) else [None]
    fields = set(names)
    if not fields or not all(isinstance(field, str) for field in fields):
        raise ValueError(
            f"get_fields() of the predicate {predicate!r} must return the names of columns, at least one, not {found!r}"
        )
    return fields


def _as_timestamp(value: Any) -> Any:
    """Return a time or date as the values of a column of timestamps are, in nanoseconds, and anything else as it is."""
    if isinstance(value, np.datetime64):
        time = value  # before NumPy 2, equal times of different units have different hashes
    elif type(value) not in (date, datetime):
        return value
    elif isinstance(value, datetime) and value.tzinfo is not None:
        raise ValueError(
            f"inclusion_values: {value!r} has a time zone; give it without one, in UTC if its column has one"
        )
    else:
        time = np.datetime64(value, "us")
    found = time.astype("M8[ns]")
    # NumPy wraps around beyond the years that nanoseconds reach, where no timestamp is equal.
    return found if found.astype(time.dtype) == time else value


def _sort_key(value: object) -> tuple[str, str]:
    """Return what any two values can be sorted by, alike in all processes."""
    return type(value).__name__, repr(value)


def _name(field: object) -> str:
    if not isinstance(field, str):
        raise ValueError(f"predicate_field must be the name of a column, not {field!r}")
    return field
