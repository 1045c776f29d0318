"""Makes any text safe to send and store."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode, such as parts of file names that are not valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int) -> str:
    """Return the text without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters are left out …]\n{text[-half:]}"
