"""docs/clusters.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_cell_of_the_table_is_not_run_or_names_a_test() -> None:
    lines = [line for line in (ROOT / "docs" / "clusters.md").read_text().splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["Environment", "start", "grow", "shrink", "kill", "drain", "resume", "estimator"]
    assert len(rows) == 9
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^ *def (test_\w+)\(", sources, re.MULTILINE))
    for name, *cells in rows:
        assert len(cells) == len(head) - 1, name
        unknown = {cell for cell in cells if cell != "not run"} - {f"`{test}`" for test in tests}
        assert not unknown, name
