"""summary: the same figures as text and as JSON; tests/unit/timeline/test_summary.py has what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import story

from spark_elastic.cli import main


@pytest.fixture
def log(tmp_path: Path) -> str:
    """The log of two runs: the later one is named "efgh"."""
    text = "".join(json.dumps(event) + "\n" for event in story.killed())
    path = tmp_path / "events.jsonl"
    path.write_text(text + text.replace("abcd", "efgh"))
    return str(path)


def test_the_figures_are_printed_as_json_where_a_program_reads_them(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", log, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["summary", log]) == 0
    text = capsys.readouterr().out
    assert f"availability {facts['availability']:.2%}" in text
    assert (facts["run_id"], facts["steps"], len(facts["resets"])) == ("efgh", 200, 2)


def test_of_several_runs_the_one_that_is_named_is_told(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", log, "--run", "abcd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "abcd"
    assert main(["summary", log, "--run", "other"]) == 2
    assert "abcd, efgh" in capsys.readouterr().err
