"""Text that can be sent and stored whatever it holds."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    """Return the text with escapes for what UTF-8 has no bytes for, such as parts of file names that are not valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()
