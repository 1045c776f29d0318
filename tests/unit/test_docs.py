"""The documentation agrees with the code where it is made from it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_settings_reference_is_that_of_the_code() -> None:
    made = runpy.run_path(str(DOCS / "make_reference.py"))["document"]()
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == made, (
        "run: python docs/make_reference.py > docs/reference.md"
    )


@pytest.mark.parametrize("name", ["rooms.svg", "phases.svg"])
def test_the_pictures_are_those_of_the_code(name: str) -> None:
    """That of the rooms cannot be drawn where two of them import each other."""
    made = runpy.run_path(str(DOCS / "make_pictures.py"))["PICTURES"][name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python docs/make_pictures.py"
