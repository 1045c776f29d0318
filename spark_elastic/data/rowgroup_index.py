"""Reads the index of row groups that Petastorm's `build_rowgroup_index` leaves in a dataset, without Petastorm.

It is a pickle, which is taken apart as that of a Unischema is: only the names that an index is made of are admitted, and
stand-ins are built of them.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import hashlib
import io
import json
import pickle
from collections.abc import Mapping, Sequence

import cloudpickle
import numpy as np

from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import Manifest, read_common_metadata
from spark_elastic.data.selectors import RowGroupIndex, RowGroupSelectorBase
from spark_elastic.data.unischema import PETASTORM_PACKAGES
from spark_elastic.errors import DataError

INDEX_KEY = b"dataset-toolkit.rowgroups_index.v1"
_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
_INDEXERS = ("SingleFieldIndexer", "FieldNotNullIndexer")
_SCALAR = np.int64(0).__reduce__()[0]
# What values and their containers are pickled by, in the releases of NumPy and Python that have written indexes.
_OTHERS: dict[tuple[str, str], object] = {
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("_codecs", "encode"): codecs.encode,
}


class _Index:
    """Has what selectors ask of one of Petastorm's indexers."""

    # By value, or, where the index is of what is not null, of all values together.
    _index_data: dict[object, set[int]] | set[int]

    @property
    def indexed_values(self) -> list[object]:
        """The values; an index of what is not null has none."""
        return list(self._index_data) if isinstance(self._index_data, dict) else []

    def get_row_group_indexes(self, value_key: object = None) -> set[int]:
        """Return the numbers of the row groups that have the value."""
        data = self._index_data
        return set(data.get(value_key, ()) if isinstance(data, dict) else data)


def _reconstruct(kind: type, base: type, state: object) -> object:
    """Stand in for copyreg._reconstructor, by which old pickles make plain objects."""
    if kind is not _Index:
        raise pickle.UnpicklingError(f"{kind!r} may not be made here")
    return _Index()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        package = module.removesuffix(".etl.rowgroup_indexers")
        if package != module and package in PETASTORM_PACKAGES and name in _INDEXERS:
            return _Index
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        if module in ("copyreg", "copy_reg") and name == "_reconstructor":
            return _reconstruct
        if module in ("builtins", "__builtin__") and name == "object":
            return object
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no index needs")


def read_indexes(pickled: bytes) -> dict[str, RowGroupIndex]:
    """Return the indexes by their names. Raises DataError for anything else, before any of it is run."""
    try:
        found = _Unpickler(io.BytesIO(pickled)).load()
        if not all(type(name) is str and isinstance(index, _Index) for name, index in found.items()):
            raise ValueError(f"it is {found!r}")
        return dict(found)
    except Exception as failure:
        raise DataError(f"the dataset's index of row groups cannot be read: {failure}") from failure


class Selection:
    """The row groups of a dataset that a selector selects. Raises ValueError for what is no selector, or has too many URLs."""

    def __init__(self, manifest: Manifest, locations: Sequence[Location], selector: RowGroupSelectorBase) -> None:
        if not all(callable(getattr(selector, name, None)) for name in ("get_index_names", "select_row_groups")):
            raise ValueError(f"rowgroup_selector must be one of spark_elastic.data.selectors, not {selector!r}")
        if len(locations) > 1:
            raise ValueError("rowgroup_selector= needs one URL: each dataset has an index of its own")
        self._manifest, self._location, self._selector = manifest, locations[0], selector

    @property
    def key(self) -> str | None:
        """Names the selector, alike in all processes; None for what cannot be pickled."""
        try:
            return hashlib.blake2b(cloudpickle.dumps(self._selector), digest_size=8).hexdigest()
        except Exception:  # whatever an object that the selector refers to raises
            return None

    def find(self) -> bytes:
        """Read the index, and return the numbers of the row groups that are selected, int64 in ascending order.

        Raises DataError where there is no index, or it is of other files, and ValueError where it is another than is asked for.
        """
        stored, name = read_common_metadata(self._location), self._manifest.name
        if INDEX_KEY not in stored:
            raise DataError(
                f"{name} has no index of its row groups, which Petastorm's build_rowgroup_index makes; filters= needs none"
            )
        self._check_files(stored)
        indexes = read_indexes(stored[INDEX_KEY])
        missing = sorted(set(self._selector.get_index_names()) - indexes.keys())
        if missing:
            raise ValueError(
                f"rowgroup_selector: {name} has no index {missing[0]!r}, only {', '.join(sorted(indexes))}"
            )
        numbers = sorted({int(number) for number in self._selector.select_row_groups(indexes)})
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(self._manifest):
            raise DataError(f"{name} has {len(self._manifest)} row groups, and its index names number {numbers[-1]}")
        return np.array(numbers, "<i8").tobytes()

    def of(self, numbers: bytes) -> Manifest:
        """Return the manifest of the row groups that `find` has found, here or in another process."""
        groups = tuple(self._manifest.row_groups[number] for number in np.frombuffer(numbers, "<i8"))
        name = hashlib.blake2b(numbers, digest_size=8).hexdigest()
        return dataclasses.replace(self._manifest, row_groups=groups, selection=name)

    def _check_files(self, stored: Mapping[bytes, bytes]) -> None:
        """Raise DataError if the dataset has other row groups than when Petastorm counted them: numbers would mean others."""
        expected = json.loads(stored.get(_PER_FILE_KEY, b"{}"))
        found = collections.Counter(group.path for group in self._manifest)
        if expected and {path: count for path, count in expected.items() if count} != dict(found):
            raise DataError(
                f"{self._manifest.name} has other files, or row groups, than its index: run Petastorm's build_rowgroup_index "
                "again, behind petastorm-generate-metadata.py"
            )
