"""Returns the memory of freed tensors to the machine at once, so that a memory limit can be used fully."""

from __future__ import annotations

import ctypes
import os

# Of <malloc.h>: the size from which on glibc maps memory for each block by itself, and unmaps it when the block is freed.
_M_MMAP_THRESHOLD = -3
THRESHOLD = 64 * 1024


def give_back_freed_tensors() -> None:
    """Make glibc map each tensor of 64 KiB and more separately. Does nothing with other C libraries.

    Left alone, glibc raises the threshold to the size of each mapped block that is freed, up to 32 MiB. Tensors then come from
    heaps, in which shards, gathered layers and gradients of many sizes leave gaps: a worker took up to four times the memory.
    ``MALLOC_MMAP_THRESHOLD_`` in the environment has the last word.
    """
    library = ctypes.CDLL(None)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, THRESHOLD)
