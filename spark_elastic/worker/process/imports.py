"""What workers find imported: by the process that outlives their job, and from which they are forked.

Torch and what every worker needs are imported before the first job (``warm_parent.import_everything``). Modules that only some
jobs need would delay the others. So a worker notes at its end which of them it has imported, in memory that it shares with that
process, and the process imports them once it serves no job: the workers of later jobs find them.

Only modules are listed whose import takes long, and hardly depends on what user code may set just before it, as the import of
transformers depends on ``HF_HOME``. Users can name others in a variable.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from spark_elastic.errors import SparkElasticError
from spark_elastic.task.process_setting import PRELOAD_VARIABLE, preloaded

MODULES = (
    "spark_elastic.data.parquet_loader",
    "spark_elastic.data.arrow_engine",
    "spark_elastic.estimator.training",
)

# What has gone wrong in ``preload`` here, or in the process that this one was forked from.
_failure: SparkElasticError | None = None

# A byte for each module, 1 if it was noted. Forked processes share it.
_noted = mmap.mmap(-1, len(MODULES))


def preload() -> None:
    """Import what the user has named. Raises ``SparkElasticError`` for what cannot be imported, or not ahead of a fork.

    Threads and CUDA do not show in forked processes, which therefore raise what was raised in the process above.
    """
    global _failure
    if _failure is None:
        try:
            _preload()
        except SparkElasticError as error:
            _failure = error
    if _failure is not None:
        raise _failure


def _preload() -> None:
    for name in preloaded(os.environ):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise SparkElasticError(
                f"{PRELOAD_VARIABLE} names {name}, which cannot be imported by {sys.executable}: {type(error).__name__}: {error}"
            ) from error
        if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
            raise SparkElasticError(
                f"{PRELOAD_VARIABLE} names {name}, whose import starts threads ({', '.join(others)}), which do not exist in the "
                "workers that are forked afterwards: leave it out"
            )
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise SparkElasticError(
                f"{PRELOAD_VARIABLE} names {name}, whose import uses CUDA, which the workers that are forked afterwards then "
                "cannot: leave it out"
            )


def note_imports() -> None:
    """In a worker, note which modules it has imported."""
    for place, name in enumerate(MODULES):
        if name in sys.modules:
            _noted[place] = 1


def import_noted() -> None:
    """In the process that workers are forked from, import what any of them has noted. A module that fails is left to workers."""
    names = [name for place, name in enumerate(MODULES) if _noted[place] and name not in sys.modules]
    if not names:
        return
    _noted[:] = bytes(len(_noted))
    with importing():
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)


@contextmanager
def importing() -> Iterator[None]:
    """Switch the garbage collector off, which saves a quarter of the time: it would scan all new objects, and free nothing.

    What is there at the end is no longer scanned in forked processes either, which therefore share its memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
