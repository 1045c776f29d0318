"""What workers find imported: by the process that outlives their job, and from which they are forked.

Torch and what every worker needs are imported before the first job (``warm_parent.import_everything``). Modules that only some
jobs need would delay the others. So a worker notes at its end which of them it has imported, in memory that it shares with that
process, and the process imports them once it serves no job: the workers of later jobs find them.

Only modules are listed whose import takes long, and depends on nothing that user code may set just before it, as the import of
transformers depends on ``HF_HOME``.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MODULES = (
    "spark_elastic.data.parquet_loader",
    "spark_elastic.data.arrow_engine",
    "spark_elastic.estimator.training",
)

# A byte for each module, 1 if it was noted. Forked processes share it.
_noted = mmap.mmap(-1, len(MODULES))


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
