"""docs/clusters.md names tests that there are, and that ``make test-clusters`` runs."""

from __future__ import annotations

from clusters_page import ROOT, defined, integration_tests, table


def test_each_cell_of_the_table_is_not_run_or_names_a_test() -> None:
    head, *rows = table()
    assert head == ["Environment", "start", "grow", "shrink", "kill", "drain", "resume", "estimator"]
    assert len(rows) == 9
    run = {test for file in (ROOT / "tests" / "clusters").rglob("test_*.py") for test in defined(file)}
    run |= {test.partition("::")[2] for test in integration_tests()}
    for name, *cells in rows:
        assert len(cells) == len(head) - 1, name
        assert set(cells) <= run | {"not run"}, name
