"""Reads the index of row groups that Petastorm's ``build_rowgroup_index`` stores in a dataset, without Petastorm.

It is a pickle, and is read like that of a Unischema: only the names that occur in an index are admitted, and stand-ins are
built for them.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import io
import json
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import Manifest, read_common_metadata
from spark_elastic.data.pinning import key_of
from spark_elastic.data.selectors import RowGroupSelectorBase
from spark_elastic.data.unischema import PETASTORM_PACKAGES
from spark_elastic.errors import DataError

INDEX_KEY = b"dataset-toolkit.rowgroups_index.v1"
_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
_INDEXERS = ("SingleFieldIndexer", "FieldNotNullIndexer")
# The NumPy dtypes of index values: numbers, text, bytes and times. Their bytes contain no pointers.
_KINDS = re.compile(r"[biufSU]\d*|M8\[(Y|M|W|D|h|m|s|[munpfa]s)\]")


class _Sealed(type):
    """A class whose attributes no pickle can set: that would change how later indexes are read."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {cls.__name__}.{name}")


class _Index(metaclass=_Sealed):
    """One of Petastorm's indexers, as far as selectors use it."""

    # Row groups by value, or, for an index of non-null values, those of all values together.
    _index_data: dict[object, set[int]] | set[int]

    def __setstate__(self, state: Any) -> None:
        self._index_data = state["_index_data"]

    @property
    def indexed_values(self) -> list[object]:
        """The values. An index of non-null values has none."""
        return list(self._index_data) if isinstance(self._index_data, dict) else []

    def get_row_group_indexes(self, value_key: object = None) -> set[int]:
        """Return the numbers of the row groups that have the value."""
        data = self._index_data
        return set(data.get(value_key, ()) if isinstance(data, dict) else data)

    @property
    def numbers(self) -> set[int]:
        """The numbers of all row groups in the index. Raises ValueError if this is not an index."""
        data = self.__dict__.get("_index_data")
        numbers = set[int]()
        for found in data.values() if isinstance(data, dict) else [data]:
            if not isinstance(found, set) or not all(type(number) is int for number in found):
                raise ValueError("an indexer has other data than sets of numbers")
            numbers |= found
        return numbers


class _Dtype(metaclass=_Sealed):
    """Stands for a NumPy dtype. Only the type, its byte order and the unit of times are used."""

    def __init__(self, kind: object, *flags: object) -> None:
        self.kind, self.is_swapped = kind, False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.is_swapped = state[1] == ">"
        if self.kind == "M8":
            unit, count = state[-1][1][:2]
            self.kind = f"M8[{unit if isinstance(unit, str) else unit.decode()}]" if count == 1 else None


def _scalar(dtype: object, data: object) -> object:
    """Stand in for NumPy's function that makes a scalar from bytes."""
    if type(dtype) is not _Dtype or not isinstance(data, (bytes, str)):
        raise pickle.UnpicklingError("it has a value that is no scalar")
    if not isinstance(dtype.kind, str) or _KINDS.fullmatch(dtype.kind) is None:
        raise pickle.UnpicklingError("it has a value of a dtype that no index needs")
    content = data.encode("latin1") if isinstance(data, str) else data
    kind = np.dtype(dtype.kind).newbyteorder(">" if dtype.is_swapped else "<")
    return np.frombuffer(content, kind)[0] if kind.itemsize else kind.type()


def _decimal(text: object) -> decimal.Decimal:
    """Stand in for Decimal, of a text alone."""
    if not isinstance(text, str):
        raise pickle.UnpicklingError(f"it has a Decimal of {text!r}")
    return decimal.Decimal(text)


def _encode(text: object, encoding: object) -> bytes:
    """Stand in for the codec by which old pickles encode bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it is encoded by {encoding!r}")
    return text.encode("latin1")


def _empty() -> bytes:
    """Stand in for ``bytes``, by which old pickles make empty bytes."""
    return b""


def _reconstruct(kind: type, base: type, state: object) -> object:
    """Stand in for copyreg._reconstructor, by which old pickles make plain objects."""
    if kind is not _Index:
        raise pickle.UnpicklingError(f"{kind!r} may not be made here")
    return _Index()


# The functions and classes in pickles of values and containers, for the releases of NumPy and Python that have written indexes.
_STAND_INS: dict[tuple[str, str], object] = {
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "object"): object,
    ("__builtin__", "object"): object,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("copy_reg", "_reconstructor"): _reconstruct,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("decimal", "Decimal"): _decimal,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _empty,
    ("__builtin__", "bytes"): _empty,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        package = module.removesuffix(".etl.rowgroup_indexers")
        if package != module and package in PETASTORM_PACKAGES and name in _INDEXERS:
            return _Index
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no index needs")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it has persistent ids, which no index needs")


def read_indexes(pickled: bytes) -> dict[str, _Index]:
    """Return the indexes by their names. Raises DataError for anything else, before any of it is run."""
    try:
        # Python 2 pickled the bytes of values as its text.
        found = _Unpickler(io.BytesIO(pickled), encoding="latin1").load()
        if not all(type(name) is str and type(index) is _Index for name, index in found.items()):
            raise ValueError("it is not a dict of indexers")
        for index in found.values():
            index.numbers  # noqa: B018  # raises for what is no index
        return dict(found)
    except Exception as failure:
        raise DataError(f"the dataset's index of row groups cannot be read: {failure}") from failure


class Selection:
    """The row groups that a selector selects. Raises ValueError if it is not a selector, or the dataset has several URLs."""

    def __init__(self, manifest: Manifest, locations: Sequence[Location], selector: RowGroupSelectorBase) -> None:
        methods = ("get_index_names", "select_row_groups")
        if isinstance(selector, type) or not all(callable(getattr(selector, name, None)) for name in methods):
            raise ValueError(f"rowgroup_selector must be one of spark_elastic.data.selectors, not {selector!r}")
        if len(locations) > 1:
            raise ValueError("rowgroup_selector= needs one URL: each dataset has an index of its own")
        self._manifest, self._location, self._selector = manifest, locations[0], selector

    @property
    def key(self) -> str | None:
        """Identifies the selector, equally in all processes; None if it cannot be pickled."""
        return key_of(self._selector)

    def find(self) -> bytes:
        """Read the index, and return the numbers of the selected row groups, int64 in ascending order.

        Raises DataError if there is no index, or it describes other files, and ValueError if the requested index is not there.
        """
        stored, name = read_common_metadata(self._location), self._manifest.name
        if INDEX_KEY not in stored:
            raise DataError(
                f"{name} has no index of its row groups, which Petastorm's build_rowgroup_index makes; filters= needs none"
            )
        indexes = read_indexes(stored[INDEX_KEY])
        self._check_files(stored, indexes)
        names = self._selector.get_index_names()
        missing = sorted(({names} if isinstance(names, str) else set(names)) - indexes.keys())
        if missing:
            raise ValueError(
                f"rowgroup_selector: {name} has no index {missing[0]!r}, only {', '.join(sorted(indexes))}"
            )
        numbers = sorted(self._selector.select_row_groups(indexes))
        for number in numbers:
            if type(number) is not int or not 0 <= number < len(self._manifest):
                raise ValueError(f"rowgroup_selector: {name} has {len(self._manifest)} row groups, and not {number!r}")
        return np.array(numbers, "<i8").tobytes()

    def of(self, numbers: bytes) -> Manifest:
        """Return the manifest of the row groups that ``find`` found, in this or another process."""
        groups = tuple(self._manifest.row_groups[number] for number in np.frombuffer(numbers, "<i8"))
        return dataclasses.replace(self._manifest, row_groups=groups, dataset=self._manifest)

    def _check_files(self, stored: Mapping[bytes, bytes], indexes: Mapping[str, _Index]) -> None:
        """Raise DataError if the index was detectably built for other row groups, so that its numbers would mean others.

        An index names no files. Detectable are other files than Petastorm has counted, and fewer row groups. Warns of row
        groups at the end that are in no index: those of added files, and those that hold only nulls.
        """
        found = collections.Counter(group.path for group in self._manifest)
        try:
            counted = json.loads(stored.get(_PER_FILE_KEY, b"{}"))
            is_other = bool(counted) and {path: count for path, count in counted.items() if count} != dict(found)
        except (AttributeError, ValueError) as failure:
            raise DataError(f"{self._manifest.name}: Petastorm's count of row groups cannot be read") from failure
        named = 1 + max(set().union(*(index.numbers for index in indexes.values())), default=-1)
        if not is_other and named < len(self._manifest):
            warnings.warn(
                f"{self._manifest.name}: no index has row groups from number {named} on, of {len(self._manifest)}. If files were "
                "added since Petastorm's build_rowgroup_index, other row groups are selected than are meant: run it again",
                stacklevel=5,
            )
        if is_other or named > len(self._manifest):
            raise DataError(
                f"{self._manifest.name} has other row groups than its index: run Petastorm's build_rowgroup_index again, behind "
                "petastorm-generate-metadata.py"
            )
