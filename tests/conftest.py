"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal

from class_archive import jvm_options

os.environ.setdefault("JAVA_TOOL_OPTIONS", jvm_options())
# A shell that starts the suite in the background has SIGINT ignored, by this process and by all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what the imports and the collection have made to no search for cycles: it takes a seventh of the suite's time."""
    gc.collect()
    gc.freeze()
