"""What compiled code says about a function."""

from __future__ import annotations

from typing import Any

from spark_elastic._code import globals_of

known = 1


class Holder:
    unknown = 2


def test_globals_are_told_from_attributes_and_found_in_functions_within() -> None:
    def read(value: Holder) -> Any:
        return value.unknown, [known for _ in range(value.unknown)]

    assert globals_of(read.__code__) >= {"known", "range"}
    assert "unknown" not in globals_of(read.__code__)
