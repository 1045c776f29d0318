"""Memory of freed tensors goes back to the machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_elastic.worker.state.fully_sharded import memory


@pytest.mark.parametrize("is_set", [False, True])
def test_glibcs_threshold_is_fixed_unless_the_environment_has_set_it(
    monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    called: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: called.append(given))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    if is_set:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    memory.give_back_freed_tensors()
    assert called == ([] if is_set else [(-3, 65536)])
    del library.mallopt
    memory.give_back_freed_tensors()
