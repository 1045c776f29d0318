"""A worker's process before it runs user code."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import cloudpickle
import pytest

from spark_elastic.worker.process.main import _unpickle

RAISE_THE_LIMIT = """
import resource
from spark_elastic.worker.runtime import _allow_all_descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
_allow_all_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_of_a_module_that_is_not_there_all_ways_to_ship_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Spark Connect there is neither --py-files nor spark.submit.pyFiles."""
    module = ModuleType("module_of_the_user")
    exec("def train(): ...", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call = cloudpickle.dumps((module.train, (), {}, []))
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(
        ModuleNotFoundError, match="needs the module 'module_of_the_user', which this executor"
    ) as raised:
        _unpickle(call)
    for way in (
        "--py-files",
        "spark.submit.pyFiles",
        "sparkContext.addPyFile(path)",
        "spark.addArtifacts(path, pyfile=True)",
    ):
        assert way in str(raised.value)


def test_a_worker_may_open_as_many_files_as_its_host_allows() -> None:
    run = subprocess.run([sys.executable, "-c", RAISE_THE_LIMIT], capture_output=True, text=True, timeout=120)
    assert run.stdout == "(200, 200)\n", run.stderr[-2000:]
