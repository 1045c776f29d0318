"""What compiled code says about a function."""

from __future__ import annotations

import dis
import functools
import types


@functools.lru_cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that a function reads, and those that functions and classes within it read."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    nested = (globals_of(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(own.union(*nested))
