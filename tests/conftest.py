"""What holds for all tests."""

from __future__ import annotations

import gc
import os

from class_archive import jvm_options

os.environ.setdefault("JAVA_TOOL_OPTIONS", jvm_options())


def pytest_collection_finish() -> None:
    """Leave what the imports and the collection have made to no search for cycles: it takes a seventh of the suite's time."""
    gc.collect()
    gc.freeze()
