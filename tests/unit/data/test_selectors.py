"""Selectors of row groups, on an index in memory; test_rowgroup_index.py has them on those that are stored."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.data.selectors import (
    IntersectIndexSelector,
    RowGroupSelectorBase,
    SingleIndexSelector,
    UnionIndexSelector,
)


class Index:
    """The row groups of each value."""

    def __init__(self, **groups: set[int]) -> None:
        self.groups = groups
        self.indexed_values = list(groups)

    def get_row_group_indexes(self, value_key: Any = None) -> set[int]:
        return self.groups.get(value_key, set())


INDEXES = {"city": Index(oslo={0, 1}, bergen={1, 2}), "year": Index(old={0, 2}, new={1})}


def test_a_row_group_with_any_of_the_values_is_selected() -> None:
    assert SingleIndexSelector("city", iter(["oslo", "bergen"])).select_row_groups(INDEXES) == {0, 1, 2}
    assert SingleIndexSelector("city", ["oslo", "nowhere"]).select_row_groups(INDEXES) == {0, 1}
    assert SingleIndexSelector("city", []).select_row_groups(INDEXES) == set()


def test_selectors_of_several_indexes_ask_for_all_of_them() -> None:
    one, other = SingleIndexSelector("city", ["oslo"]), SingleIndexSelector("year", ["new"])
    both, either = IntersectIndexSelector([one, other]), UnionIndexSelector([one, other])
    assert (both.select_row_groups(INDEXES), either.select_row_groups(INDEXES)) == ({1}, {0, 1})
    nested = UnionIndexSelector([both, SingleIndexSelector("year", ["old"])])
    assert nested.get_index_names() == ["city", "year", "year"]
    assert nested.select_row_groups(INDEXES) == {0, 1, 2}


def test_a_selector_without_its_two_methods_cannot_be_made() -> None:
    class Half(RowGroupSelectorBase):
        def get_index_names(self) -> list[str]:
            return []

    with pytest.raises(TypeError, match="select_row_groups"):
        Half()  # type: ignore[abstract]
