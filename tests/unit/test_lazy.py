"""Packages whose names are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_elastic._lazy import lazily


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """The ``__getattr__`` of a package, one of whose modules needs what is not installed."""
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("value = object()\n")
    (package / "bad.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_package", "lazy_package.good", "lazy_package.bad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lazily("lazy_package", {"value": "good", "gone": "good", "other": "bad"})


def test_a_module_is_imported_when_one_of_its_names_is_used_and_no_other_one_is(find: Callable[[str], object]) -> None:
    assert "lazy_package.good" not in sys.modules
    value = find("value")
    assert sys.modules["lazy_package.good"].value is value is find("value")
    assert "lazy_package.bad" not in sys.modules


def test_what_a_module_lacks_is_an_error_of_that_module(find: Callable[[str], object]) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        find("other")
    with pytest.raises(AttributeError, match=r"module 'lazy_package\.good' has no attribute 'gone'"):
        find("gone")


def test_a_name_that_the_package_does_not_have_is_no_attribute(find: Callable[[str], object]) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'unknown'"):
        find("unknown")
