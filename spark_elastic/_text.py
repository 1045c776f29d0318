"""Makes any text safe to send and store."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode, such as parts of file names that are not valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()
