"""The backend of Keras."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import pytest

from spark_elastic.keras import _backend


def test_another_backend_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", other)
    with pytest.raises(ImportError, match="KERAS_BACKEND=torch, not jax"):
        runpy.run_path(_backend.__file__)
