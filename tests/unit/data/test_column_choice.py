from __future__ import annotations

import re
from typing import Any

import pytest

from spark_elastic.data.column_choice import choose_columns

KNOWN = ["label", "feature_1", "feature_2", "feature.x", "name"]


def trouble(name: str) -> str:
    return "string, which cannot be made into a tensor" if name == "name" else ""


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["feature_2", "label"], ["feature_2", "label"]),
        (["label", re.compile("feature_.")], ["label", "feature_1", "feature_2"]),
        ([re.compile("feature_[12]|label"), "feature_2"], ["label", "feature_1", "feature_2"]),
        (["feature.x"], ["feature.x"]),
        ([re.compile(".*e.*")], ["label", "feature_1", "feature_2", "feature.x"]),
        ([], []),
    ],
)
def test_names_and_patterns_choose_columns_each_once(columns: Any, chosen: list[str]) -> None:
    assert choose_columns(columns, KNOWN, trouble) == chosen


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["feature_."], "'feature_.' is not in the dataset, which has label, feature_1,"),
        (["name"], "'name' is string, which cannot be made into a tensor; give a transform="),
        ([re.compile("feature")], "'feature' matches no column of label, feature_1,"),
        ([re.compile("n.*")], "'n.*' matches only name, which cannot be made into a tensor"),
        ("label", "columns must be a list of names, not 'label'"),
        (re.compile("label"), "columns must be a list of names, not re.compile('label')"),
        (7, "columns must be a list of names, not 7"),
        ([7], "columns must be names and compiled patterns, not 7"),
    ],
)
def test_what_chooses_nothing_is_refused(columns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_columns(columns, KNOWN, trouble)
