"""A notebook shows the page of a run inline."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import story
from browser import Browser, find_chromium

from spark_elastic.cli import main
from spark_elastic.timeline import Timeline


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in story.killed()))
    return path


def test_what_a_cell_shows_is_the_page_in_a_frame_without_rights(log: Path) -> None:
    class Frame(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attributes)))

    found: list[tuple[str, dict[str, str | None]]] = []
    Frame().feed(Timeline(log, height=500)._repr_html_())
    ((tag, attributes),) = found
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert "height: 500px" in str(attributes["style"])
    assert main(["timeline", str(log), "-o", str(log.with_suffix(".html"))]) == 0
    assert attributes["srcdoc"] == log.with_suffix(".html").read_text()


def test_each_look_reads_the_log_anew(log: Path) -> None:
    shown = Timeline(str(log), "abcd")
    assert "The run finished." in shown._repr_html_()
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:8]))
    assert "The run is not over in this log." in shown._repr_html_()
    shown.save(log.with_suffix(".html"))
    assert "The run is not over in this log." in log.with_suffix(".html").read_text()


def test_the_log_and_the_saved_page_may_begin_with_a_tilde(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(log.parent))
    Timeline(f"~/{log.name}").save("~/page.html")
    assert "The run finished." in (log.parent / "page.html").read_text()


def test_elsewhere_it_is_the_summary_or_says_what_is_wrong(log: Path) -> None:
    assert "run abcd: finished" in repr(Timeline(log))
    assert repr(Timeline("nowhere")) == "Timeline: there is no file nowhere"
    assert "there is no run 'other' in this log" in repr(Timeline(log, "other"))
    with pytest.raises(FileNotFoundError):
        Timeline("nowhere")._repr_html_()


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium: make browser fetches one, with npm and node")
def test_a_browser_draws_the_page_in_the_frame(log: Path) -> None:
    page = log.with_name("cell.html")
    # The frame may be looked into here, which it does not allow elsewhere.
    frame = Timeline(log)._repr_html_().replace('sandbox="allow-scripts"', 'sandbox="allow-scripts allow-same-origin"')
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8>{frame}", encoding="utf-8")
    with Browser() as browser:
        browser.open(page.as_uri())
        assert "The run finished." in browser.evaluate("frames[0].document.body.innerText")
        assert all("escape its sandboxing" in complaint for complaint in browser.complaints)
