"""The page as a headless browser shows it: drawn, harmless, alive. Skipped without one, which ``make browser`` fetches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import story
from browser import Browser, find_chromium
from serving import serving

from spark_elastic.protocol.event_format import read_event
from spark_elastic.timeline.follower import Unread
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium: make browser fetches one, with npm and node"
)

ATTACK = "</script><img src=x onerror='document.title=1'><script>document.title=2</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def put(log: Path, *events: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def show(browser: Browser, folder: Path, events: list[dict[str, Any]], unread: Unread = Unread()) -> str:  # noqa: B008
    page = folder / "page.html"
    page.write_text(html(read_history([read_event(event) for event in events]), unread), encoding="utf-8")
    browser.complaints.clear()
    browser.open(page.as_uri())
    assert browser.complaints == []
    return browser.text()


def test_the_page_shows_the_run_without_any_complaint_of_the_browser(browser: Browser, tmp_path: Path) -> None:
    text = show(browser, tmp_path, story.killed())
    assert "The run finished. It trained 92.9% of the time" in text
    assert "The start took 3.1 s" in text
    assert "start workers, which import torch 1.50 s" in text
    assert "rank 1 on west was lost: killed by SIGKILL" in text
    lanes = browser.evaluate(
        "[...document.querySelectorAll('#charts svg')].map(chart => chart.querySelectorAll('rect').length)"
    )
    spans = [line.spans for line in read_history([read_event(event) for event in story.killed()]).workers]
    assert lanes == [sum(map(len, spans)), 3, 3]
    assert "worker 1 was lost: killed by SIGKILL" in browser.evaluate(
        "[...document.querySelectorAll('[data-tip]')].map(element => element.dataset.tip).join('; ')"
    )


def test_all_metrics_are_drawn(browser: Browser, tmp_path: Path) -> None:
    reports = [
        story.told("metrics", 15 + step, 0, 0, 3, step=step, **{f"metric_{n}": n * step for n in range(12)})
        for step in range(3)
    ]
    text = show(browser, tmp_path, [*story.killed()[:-1], *reports])
    assert all(f"metric_{n}" in text for n in range(12))
    assert browser.evaluate("document.querySelectorAll('#metrics polyline').length") == 12


def test_a_metric_that_is_reported_once_is_shown_with_its_value(browser: Browser, tmp_path: Path) -> None:
    events = story.killed()
    text = show(
        browser, tmp_path, [*events[:-1], story.told("metrics", 15, 0, 0, 3, step=9, final_auc=0.75), events[-1]]
    )
    assert "final_auc: 0.75" in text


def test_what_workers_use_and_say_is_shown(browser: Browser, tmp_path: Path) -> None:
    samples = [
        story.event(
            "worker_sampled", 3 + n, worker=n % 2, cpu_seconds=n * 0.7, memory=2**30 + n, last_lines=["\x1b[1mhello"]
        )
        for n in range(6)
    ]
    events = story.killed()
    text = show(browser, tmp_path, [*events[:15], *samples, *events[15:]])
    assert "CPU, in cores" in text
    assert browser.evaluate("document.querySelectorAll('#use polyline').length") == 4
    assert "rank 1 (worker 1) on west: its last lines" in text
    browser.evaluate("document.querySelectorAll('#words details').forEach(each => each.open = true)")
    assert "\nhello" in browser.text()


def test_gpus_are_drawn_where_workers_use_any(browser: Browser, tmp_path: Path) -> None:
    events = story.killed()
    assert "GPU" not in show(browser, tmp_path, events)
    used = [story.told("gpu_used", 4 + n, 0, 0, 1, memory=2**30 * n, utilization=90 + n) for n in range(3)]
    memory_alone = [story.told("gpu_used", 4.5 + n, 1, 1, 1, memory=2**30 * n) for n in range(2)]
    text = show(browser, tmp_path, [*events[:15], *used, *memory_alone, *events[15:]])
    assert "GPU, in percent" in text
    assert "GPU memory, in GiB" in text
    assert browser.evaluate("document.querySelectorAll('#use polyline').length") == 3
    tips = browser.evaluate("[...document.querySelectorAll('#use [data-tip]')].map(line => line.dataset.tip)")
    assert tips == ["worker 0 on east: 92 at 0:06.0", "worker 0 on east: 2 at 0:06.0", "worker 1 on west: 1 at 0:05.5"]


def test_a_slow_worker_is_marked_and_named(browser: Browser, tmp_path: Path) -> None:
    change = story.told("shares_changed", 4, 0, 0, 1, step=9, before=[50, 50], after=[69, 31], seconds=[0.1, 0.3])
    events = story.killed()
    text = show(browser, tmp_path, [*events[:15], change, *events[15:]])
    assert "Slow workers" in text
    assert "31 of 100 rows" in text
    slow = {**change, "event": "worker_slow", "host": "west", "times": 3.0, "rank": 1, "worker": 1}
    text = show(browser, tmp_path, [*events[:15], slow, *events[15:]])
    assert "Slow workers" in text
    assert "an even one" in text


def test_what_a_log_holds_is_text_and_never_code(browser: Browser, tmp_path: Path) -> None:
    events = json.loads(json.dumps(story.killed()).replace('"west"', json.dumps(ATTACK)))
    for event in events:
        for name in ("reason", "cause", "meaning", "run_id"):
            event |= {name: ATTACK} if name in event else {}
        event |= {"values": {**event["values"], ATTACK: 1.0, "text": ATTACK}} if event["event"] == "metrics" else {}
    events[-1] = story.event("job_failed", 20, error=ATTACK, message=f"{ATTACK}\n{ATTACK}")
    text = show(browser, tmp_path, events, Unread(1, ATTACK))
    assert text.count("</script><img src=x") > 5
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.title").startswith("run </script>")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 2


def test_the_policy_of_the_page_runs_no_other_script(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, story.killed())
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<p onclick=\"document.title = 1\" id=mine>x</p>')")
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), { text: 'document.title = 2' }))"
    )
    browser.evaluate("document.getElementById('mine').click()")
    assert browser.evaluate("document.title") == "run abcd · spark_elastic"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_dragging_looks_closer_and_a_double_click_shows_all_again(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, story.killed())
    script = """(() => {
      const chart = document.querySelector("#charts svg"), box = chart.getBoundingClientRect();
      const at = share => ({ bubbles: true, clientX: box.left + box.width * share, clientY: box.top + 30 });
      chart.dispatchEvent(new MouseEvent("mousedown", at(.4)));
      dispatchEvent(new MouseEvent("mousemove", at(.6)));
      dispatchEvent(new MouseEvent("mouseup", at(.6)));
    })()"""
    labels = (
        "[...document.querySelectorAll('#charts svg')[1].querySelectorAll('.axis text')].map(each => each.textContent)"
    )
    assert "0:20" in browser.evaluate(labels)
    browser.evaluate(script)
    assert "0:20" not in browser.evaluate(labels)
    browser.evaluate("document.querySelector('#charts svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert "0:20" in browser.evaluate(labels)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_browsers_dark_and_light(dark: bool, tmp_path: Path) -> None:
    with Browser(dark=dark) as one:
        show(one, tmp_path, story.killed())
        background = one.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 23, 29)" if dark else "rgb(255, 255, 255)")


def test_a_page_that_is_served_lives(browser: Browser, tmp_path: Path) -> None:
    log, events = tmp_path / "events.jsonl", story.killed()
    with serving(log) as server:
        browser.complaints.clear()
        browser.open(server.address)
        assert f"Waiting for {log}: there is no such file yet." in browser.text()
        put(log, *events[:3])
        browser.wait_for("document.body.innerText.includes('At present: start workers')")
        assert browser.evaluate("document.getElementById('state').textContent") == "live"
        put(log, *events[3:12])
        browser.wait_for("document.querySelectorAll('#charts svg rect').length > 4")
        put(log, *events[12:])
        browser.wait_for("document.getElementById('state').textContent === 'over'")
        assert "The run finished." in browser.text()
        put(log, {**events[0], "run_id": "efgh"})
        browser.wait_for("document.title.startsWith('run efgh')")
        assert browser.complaints == []
    browser.wait_for("document.getElementById('state').className === 'gone'")
    assert "has ended, or cannot be reached" in browser.text()
