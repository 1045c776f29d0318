"""A warning names the line of the user's, however deep in ours, torch's and pyspark's it is given."""

from __future__ import annotations

import sys
import types
import warnings

from spark_elastic.worker.checks.user_frames import depth_of_user

CODE = """
def warn():
    warnings.warn("x", stacklevel=depth_of_user())

def call(it):
    it()
"""


def in_module(name: str) -> types.ModuleType:
    """Make a module that warns at the user's line, and one that calls what it is given."""
    module = types.ModuleType(name)
    module.__dict__.update(depth_of_user=depth_of_user, warnings=warnings)
    exec(compile(CODE, f"{name}.py", "exec"), module.__dict__)
    return module


def test_the_users_line_is_named_through_our_package_torch_and_pyspark() -> None:
    ours, torchs, sparks = (in_module(name) for name in ("spark_elastic.worker", "torch.nn", "pyspark"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno
        ours.warn()
        torchs.call(ours.warn)
        sparks.call(ours.warn)
    assert [(each.filename, each.lineno - line) for each in told] == [(__file__, 1), (__file__, 2), (__file__, 3)]


def test_a_package_whose_name_begins_as_ours_does_is_the_users() -> None:
    ours, other = in_module("spark_elastic"), in_module("spark_elasticity.loops")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other.call(ours.warn)
    assert [each.filename for each in told] == ["spark_elasticity.loops.py"]
