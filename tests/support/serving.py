"""Serves the page of a log while a test runs, and ends however the test does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_elastic.timeline.server import LiveRun, PageServer


@contextmanager
def serving(log: Path) -> Iterator[PageServer]:
    with PageServer(LiveRun(log)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
