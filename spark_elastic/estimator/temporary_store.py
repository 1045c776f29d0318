"""The store of a fit that is given none: a folder that is removed after the fit, or by a later one if its process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spark_elastic.estimator.store import Store

PREFIX = "spark_elastic-fit-"
# The file on which the fit's process holds a lock. The kernel releases it when the process ends, however it ends.
LOCK = "lock"
# A new folder is without a lock for a moment only, but clocks may jump.
UNLOCKED_SECONDS = 86_400.0


@contextmanager
def temporary_store() -> Iterator[Store]:
    """Yield a store in a temporary folder of this machine, which is removed at the end."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / f"{LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, folder / LOCK)  # from here on others look at the lock, which is held
            yield Store(f"file://{folder}", {}, frozenset(), True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove this user's folders whose lock nobody holds, and old ones without a lock.

    Spark may go on writing for a moment after an interrupted fit has removed its folder, and makes the folder again.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # held by a running fit, gone, or another user's
            try:
                with (folder / LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            except FileNotFoundError:
                if time.time() - folder.stat().st_mtime > UNLOCKED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
