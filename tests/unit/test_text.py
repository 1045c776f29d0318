"""Text of any length and content, made safe to send."""

from __future__ import annotations

from spark_elastic._text import as_utf8, shortened


def test_what_utf8_cannot_encode_is_escaped() -> None:
    assert as_utf8("a\udcff") == "a\\udcff"


def test_of_a_long_text_its_beginning_and_its_end_are_left() -> None:
    assert shortened("abcd", 4) == "abcd"
    assert shortened("ab" + 7 * "x" + "yz", 4) == "ab\n[… 7 characters are left out …]\nyz"
