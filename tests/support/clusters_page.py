"""The tests that docs/clusters.md names. As a program it prints those of tests/integration, for ``make test-clusters``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def table() -> list[list[str]]:
    """Return the rows of the page's table, the head first, as what their cells say."""
    lines = [line for line in (ROOT / "docs" / "clusters.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def defined(file: Path) -> set[str]:
    """Return the names of a file's tests."""
    return set(re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE))


def integration_tests() -> list[str]:
    """Return those that the table names, as pytest takes them."""
    named = {cell for _, *cells in table()[1:] for cell in cells}
    files = sorted((ROOT / "tests" / "integration").glob("test_*.py"))
    return [f"{file.relative_to(ROOT)}::{test}" for file in files for test in sorted(defined(file) & named)]


if __name__ == "__main__":
    print(*integration_tests(), sep="\n")
