from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from spark_elastic.data import NGram


def starts(times: Any, *, length: int = 2, delta: float = 4, overlap: bool = True) -> list[int]:
    fields = {offset: ["x"] for offset in range(length)}
    return NGram(fields, delta, "t", overlap).starts(np.asarray(times)).tolist()


@pytest.mark.parametrize(
    ("times", "arguments", "expected"),
    [
        ([0, 10, 20, 30], {}, []),
        ([0, 3, 8, 10, 11, 20, 30], {}, [0, 2, 3]),
        ([0, 3, 8, 10, 11, 20, 30], {"delta": 5}, [0, 1, 2, 3]),
        ([0, 3, 8, 10, 11, 20, 30], {"length": 3}, [2]),
        (range(7), {"length": 3, "overlap": False}, [0, 3]),
        ([0, 0, 0, 1, 1, 2, 3], {"length": 2, "overlap": False}, [0, 3, 5]),
        ([0, 1, 2, 9, 10, 11, 12], {"length": 2, "overlap": False}, [0, 3, 5]),
        ([0.0, 4.0, 8.5], {}, [0]),
        ([5], {}, []),
        ([], {}, []),
        ([5, 4], {"length": 3}, []),
        ([5, 6], {"length": 1}, [0, 1]),
    ],
)
def test_windows_are_rows_that_follow_each_other_closely(times: Any, arguments: Any, expected: list[int]) -> None:
    assert starts(times, **arguments) == expected


@pytest.mark.parametrize("times", [[1, 2, 1], [1.0, np.nan, 2.0]])
def test_timestamps_must_not_fall(times: Any) -> None:
    with pytest.raises(ValueError, match="'t' must not fall, but is"):
        starts(times)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, 1, "t"), "fields must be a dict of lists of columns by offset, not {}"),
        ((["t"], 1, "t"), "fields must be a dict of lists of columns by offset, not ['t']"),
        (({"0": ["t"]}, 1, "t"), "the offset of each list of fields must be a whole number, not '0'"),
        (({0: "t"}, 1, "t"), "fields[0] must be a list of names and compiled patterns, not 't'"),
        (({0: [7]}, 1, "t"), "fields[0] must be a list of names and compiled patterns, not [7]"),
        (({0: [], 1: []}, 1, "t"), "fields must name at least one column"),
        (({0: ["t"]}, None, "t"), "delta_threshold must be a number, not None"),
        (({0: ["t"]}, float("nan"), "t"), "delta_threshold must be 0 or above, not nan"),
        (({0: ["t"]}, -1, "t"), "delta_threshold must be 0 or above, not -1"),
        (({0: ["t"]}, 1, re.compile("t")), "timestamp_field must be the name of a column, not re.compile('t')"),
        (({0: ["t"]}, 1, "t", "no"), "timestamp_overlap must be True or False, not 'no'"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NGram(*arguments)
