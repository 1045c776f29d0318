"""Keeps cores of a cluster busy, so that a test decides when slots that wait for them begin. For any kind of session."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 200.0


@contextmanager
def busy(session: Any, cores: int, folder: Path) -> Iterator[Path]:
    """Keep so many cores busy until there is the file whose path this yields, at the latest until the end of the block."""
    folder.mkdir()
    free = folder / "free"

    def hold(batches: Iterable[Any]) -> Iterable[Any]:
        import os
        import time

        (folder / f"busy-{os.getpid()}").touch()
        while not free.exists():
            time.sleep(0.05)
        yield from batches

    query = session.range(0, cores, 1, cores).mapInArrow(hold, "id long")
    thread = threading.Thread(target=query.count)
    thread.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while len(list(folder.glob("busy-*"))) < cores:
            assert time.monotonic() < deadline, "the cluster has no free cores to keep busy"
            time.sleep(0.05)
        yield free
    finally:
        free.touch()
        thread.join()
