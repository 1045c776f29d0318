"""Numbers of seconds that users give: every argument takes and refuses the same, and says so in the same words."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from spark_elastic._seconds import seconds_above, seconds_from


@pytest.mark.parametrize("given", [3, 2.5, math.inf, np.float32(0.5), np.int64(7), Fraction(1, 4)])
def test_real_numbers_of_any_type_become_floats(given: object) -> None:
    for check in (seconds_above, seconds_from):
        taken = check("timeout", given)
        assert type(taken) is float
        assert taken == given


def test_only_one_of_the_two_takes_0() -> None:
    assert seconds_from("grace", 0) == 0.0
    with pytest.raises(ValueError, match=r"^timeout must be a number of seconds above 0, not 0$"):
        seconds_above("timeout", 0)


@pytest.mark.parametrize("given", [-1, -0.5, math.nan, True, None, "3", 1j, 10**400, np.array([1.0])])
def test_what_is_no_number_of_seconds_is_refused_by_the_name_of_the_argument(given: object) -> None:
    for check, words in ((seconds_above, "above 0"), (seconds_from, "from 0 on")):
        with pytest.raises(ValueError, match=f"^timeout must be a number of seconds {words}, not "):
            check("timeout", given)
