"""What the URLs of local files mean."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote


def without_file_scheme(url: str) -> str:
    """Return the path that a ``file:`` URL stands for. Other URLs, chained ones and paths stay as they are."""
    if not url.startswith("file:") or "::" in url:
        return url
    path = re.sub("^//(localhost(?=/))?", "", url.removeprefix("file:"))  # Hadoop writes file:/path
    return path if os.path.exists(path) else unquote(path)
