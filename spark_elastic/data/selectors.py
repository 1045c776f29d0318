"""Row-group selectors: which row groups are read at all, by an index that Petastorm's `build_rowgroup_index` has left.

`ParquetLoader(rowgroup_selector=…)` takes these, which have the names and arguments of Petastorm's, and Petastorm's own. Of a row
group that is selected all rows are read. Where no index is to be kept up to date, `filters=` skips row groups by the statistics
that Parquet has of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

__all__ = ["IntersectIndexSelector", "RowGroupSelectorBase", "SingleIndexSelector", "UnionIndexSelector"]


class RowGroupIndex(Protocol):
    """One index of a dataset: in which row groups each value of a field is, or in which ones the field is not always null."""

    @property
    def indexed_values(self) -> Sequence[object]:
        """The values that are in the index."""
        ...

    def get_row_group_indexes(self, value_key: object = None) -> set[int]:
        """Return the numbers of the row groups that have the value, counted in the order of the files' paths."""
        ...


class RowGroupSelectorBase(ABC):
    """A choice of row groups. Subclasses are selectors, as is any object with these two methods."""

    @abstractmethod
    def get_index_names(self) -> Sequence[str]:
        """Return the names of the indexes that `select_row_groups` looks at."""

    @abstractmethod
    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return the numbers of the row groups to read."""


class SingleIndexSelector(RowGroupSelectorBase):
    """Selects row groups that have any of some values.

    index_name: the name that the index was built under. values_list: the values, of the type that the field has.
    """

    def __init__(self, index_name: str, values_list: Iterable[object]) -> None:
        """Keep both. Raises ValueError for one string in the place of several values."""
        if isinstance(values_list, str):
            raise ValueError(f"values_list must be several values, not the string {values_list!r}")
        self._index_name = index_name
        self._values = list(values_list)

    def get_index_names(self) -> list[str]:
        """Return the index."""
        return [self._index_name]

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return the row groups that have any of the values."""
        index = index_dict[self._index_name]
        return set().union(*(index.get_row_group_indexes(value) for value in self._values))


class _SeveralSelectors(RowGroupSelectorBase):
    """Base of what several selectors make together."""

    def __init__(self, single_index_selectors: Sequence[RowGroupSelectorBase]) -> None:
        """Keep the selectors. Raises ValueError where there are none."""
        self._selectors = list(single_index_selectors)
        if not self._selectors:
            raise ValueError(f"{type(self).__name__} needs at least one selector")

    def get_index_names(self) -> list[str]:
        """Return the indexes of all selectors."""
        return [name for selector in self._selectors for name in selector.get_index_names()]


class IntersectIndexSelector(_SeveralSelectors):
    """Selects row groups that each of several selectors selects.

    single_index_selectors: the selectors, at least one.
    """

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return what all select."""
        return set.intersection(*(selector.select_row_groups(index_dict) for selector in self._selectors))


class UnionIndexSelector(_SeveralSelectors):
    """Selects row groups that at least one of several selectors selects.

    single_index_selectors: the selectors, at least one.
    """

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return what any selects."""
        return set.union(*(selector.select_row_groups(index_dict) for selector in self._selectors))
