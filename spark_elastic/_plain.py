"""Makes text from a log safe to show: what workers print and raise may hold anything, even terminal control codes."""

from __future__ import annotations

import math
import re

from spark_elastic._json import Json

# A longer text is cut off here. This leaves room for the traceback of each worker of a large job.
TEXT_LIMIT = 20_000

# ECMA-48's control sequences (colours, cursor), strings for the terminal itself (titles, links), and short escapes.
# A string whose end is missing, because the line was cut, ends with its line: it must not swallow the lines after it.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]", re.MULTILINE
)
# Other control characters, halves of surrogate pairs, and marks that change the direction of the text around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Return ``printable`` text, of which no more than ``TEXT_LIMIT`` characters are left."""
    # The text is cut off last: an escape sequence that was cut in two would be shown as text.
    text = printable(text)
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}\n… {len(text) - TEXT_LIMIT:,} more characters"


def printable(text: str) -> str:
    """Return the text without escape sequences, and with other control characters replaced, except tabs and line ends."""
    return _CONTROLS.sub("�", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def all_plain(value: Json) -> Json:
    """Return plain data in which ``plain`` was applied to each text, including keys."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    if isinstance(value, dict):
        return {plain(name): all_plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_plain(each) for each in value]
    return value
