"""The picture of a run: what is drawn in it, and what is said where nothing can draw."""

from __future__ import annotations

import html
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import story
from story import entries

from spark_elastic.timeline import picture
from spark_elastic.timeline.history import Doing, History, read_history


def drawn(history: History, folder: Path) -> str:
    """Return the text of a picture whose labels are text."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture.save(history, folder / "run.svg")
    return (folder / "run.svg").read_text()


def test_workers_speed_metrics_and_the_headline_are_in_it(history: History, tmp_path: Path) -> None:
    text = drawn(history, tmp_path)
    for label in (
        "The run finished.",
        "worker 0",
        "worker 1",
        "worker 2",
        "rows/s",
        "loss",
        "seconds since the run began",
    ):
        assert label in text, label
    for doing in Doing:
        assert doing.value in text, "the legend has no color without a name"


@pytest.mark.parametrize(
    ("name", "shown"), [("p$_{90$", "p$_{90$"), (r"$\foo$", r"$\foo$"), ("\x1b[31mred", "red"), ("損失", "損失")]
)
def test_names_of_metrics_are_drawn_as_they_are_but_for_control_codes(
    name: str, shown: str, history: History, tmp_path: Path
) -> None:
    """Some were taken for formulas, of which others could not be drawn at all."""
    pytest.importorskip("matplotlib.figure")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = drawn(replace(history, metrics={name: next(iter(history.metrics.values()))}), tmp_path)
    assert html.escape(shown, quote=False) in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("unit", "is_drawn"), [("rows", False), ("steps", True)])
def test_the_epoch_takes_no_place_of_a_metric_where_rows_are_counted(
    unit: str, is_drawn: bool, history: History, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib.figure")
    points = next(iter(history.metrics.values()))
    text = drawn(replace(history, metrics={"epoch": points, "loss": points}, unit=unit), tmp_path)
    assert ("epoch" in text) == is_drawn
    assert "loss" in text


def test_the_ends_name_chooses_the_format(history: History, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.save(history, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_everything_that_a_worker_may_do_has_a_color_of_its_own() -> None:
    assert set(picture.COLORS) == set(Doing)
    assert len(set(picture.COLORS.values())) == len(Doing)


def test_a_run_that_never_trained_can_be_drawn(tmp_path: Path) -> None:
    start, *_ = story.killed()
    failed = story.event("job_failed", 5, error="NotEnoughHostsError", message="none")
    pytest.importorskip("matplotlib.figure")  # what its own import warns of does not matter
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a legend of nothing
        assert "NotEnoughHostsError" in drawn(read_history(entries([start, failed])), tmp_path)


@pytest.mark.parametrize("values", [(-1.7e308, 1.7e308), (sys.float_info.max, 0.1), (5e-324, -5e-324)])
def test_numbers_of_any_size_and_a_run_of_no_time_are_drawn_without_warnings(
    values: tuple[float, float], history: History, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib.figure")
    points = [(float(time), value) for time, value in enumerate(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "loss" in drawn(replace(history, metrics={"loss": points}, seconds=0.0), tmp_path)


def test_without_matplotlib_it_is_said_what_to_install(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'spark-elastic\[pictures\]', or write \.html"):
        picture.save(history, tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
