"""Row-group selectors choose the row groups to read, by an index that Petastorm's ``build_rowgroup_index`` has stored.

``ParquetLoader(rowgroup_selector=…)`` takes these, which have the names and arguments of Petastorm's selectors, and also takes
Petastorm's own. All rows of a selected row group are read. To avoid maintaining an index, use ``filters=``, which skips row
groups by their Parquet statistics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

__all__ = ["IntersectIndexSelector", "RowGroupSelectorBase", "SingleIndexSelector", "UnionIndexSelector"]


class RowGroupIndex(Protocol):
    """One index of a dataset: the row groups of each value of a field, or those in which the field is not always null."""

    @property
    def indexed_values(self) -> Sequence[object]:
        """The values in the index."""
        ...

    def get_row_group_indexes(self, value_key: object = None) -> set[int]:
        """Return the numbers of the row groups that have the value, numbered in the order of the files' paths."""
        ...


class RowGroupSelectorBase(ABC):
    """Base class for selectors of row groups. Any object with these two methods is a selector, too."""

    @abstractmethod
    def get_index_names(self) -> Sequence[str]:
        """Return the names of the indexes that ``select_row_groups`` uses."""

    @abstractmethod
    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return the numbers of the row groups to read."""


class SingleIndexSelector(RowGroupSelectorBase):
    """Selects row groups that have any of the given values.

    index_name: the name of the index. values_list: the values, of the field's type.
    """

    def __init__(self, index_name: str, values_list: Iterable[object]) -> None:
        """Store both. Raises ValueError for a single string in place of several values."""
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
    """Base class for combinations of selectors."""

    def __init__(self, single_index_selectors: Sequence[RowGroupSelectorBase]) -> None:
        """Store the selectors. Raises ValueError if there are none."""
        self._selectors = list(single_index_selectors)
        if not self._selectors:
            raise ValueError(f"{type(self).__name__} needs at least one selector")

    def get_index_names(self) -> list[str]:
        """Return the indexes of all selectors."""
        return [name for selector in self._selectors for name in selector.get_index_names()]


class IntersectIndexSelector(_SeveralSelectors):
    """Selects the row groups that all of several selectors select.

    single_index_selectors: the selectors, at least one.
    """

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return the row groups that all selectors select."""
        return set.intersection(*(selector.select_row_groups(index_dict) for selector in self._selectors))


class UnionIndexSelector(_SeveralSelectors):
    """Selects the row groups that at least one of several selectors selects.

    single_index_selectors: the selectors, at least one.
    """

    def select_row_groups(self, index_dict: Mapping[str, RowGroupIndex]) -> set[int]:
        """Return the row groups that any selector selects."""
        return set.union(*(selector.select_row_groups(index_dict) for selector in self._selectors))
