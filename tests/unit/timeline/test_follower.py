"""An event log that grows is read as it is written, and what is no event in it is counted and passed over."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import story

from spark_elastic.timeline import follower
from spark_elastic.timeline.follower import LogFollower, read_run
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html

BEGUN = {"min_np": 1, "num_proc": 2, "max_np": 3, "attempt": None, "application": "app"}


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def begun(run_id: str) -> bytes:
    return line(story.event("job_started", 0, run_id=run_id, **BEGUN))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_log_that_does_not_exist_yet_is_read_once_it_does(log: Path) -> None:
    followed = LogFollower(log)
    assert not followed.read()
    log.write_bytes(begun("one"))
    assert followed.read()
    assert len(followed.run()) == 1


@pytest.mark.parametrize("cut", range(1, 200, 13))
def test_a_line_that_is_still_being_written_waits_for_its_end(cut: int, log: Path) -> None:
    whole = begun("lauf-ü") + line(story.event("driver_paused", 1, seconds=1.5))
    log.write_bytes(whole[:cut])
    followed = LogFollower(log)
    followed.read()
    with log.open("ab") as file:
        file.write(whole[cut:])
    followed.read()
    assert [type(entry.record).__name__ for entry in followed.run()] == ["JobStarted", "DriverPaused"]
    assert followed.unread.count == 0


def test_a_log_that_was_replaced_or_cut_off_is_read_from_its_beginning(log: Path) -> None:
    log.write_bytes(begun("one") + line(story.event("driver_paused", 1, seconds=1.5)) + b"garbage\n")
    followed = LogFollower(log)
    followed.read()
    log.write_bytes(begun("two"))
    followed.read()
    assert (len(followed.entries), followed.unread.count) == (1, 0)
    other = log.with_name("other")
    other.write_bytes(begun("three") + begun("four") + begun("five"))
    other.rename(log)
    followed.read()
    assert len(followed.entries) == 3


@pytest.mark.parametrize("further", [0, 1], ids=["of the same length", "longer"])
def test_a_log_that_is_written_anew_in_its_place_is_read_from_its_beginning(further: int, log: Path) -> None:
    log.write_bytes(begun("one") + line(story.event("driver_paused", 1, seconds=1.5)))
    followed = LogFollower(log)
    followed.read()
    before, place = log.stat().st_ino, followed.place
    log.write_bytes(begun("two") + line(story.event("driver_paused", 2, seconds=1.5)) * (1 + further))
    assert log.stat().st_ino == before
    followed.read()
    assert followed.place != place
    assert (len(followed.entries), len(followed.run("one"))) == (2 + further, 0)


def test_a_pipe_is_refused_at_once_instead_of_waited_for(log: Path) -> None:
    os.mkfifo(log)
    with pytest.raises(OSError, match="it is not a regular file"):
        LogFollower(log).read()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"garbage", "line 2: not an event of spark_elastic: 'garbage'"),
        (b"\xff\xfe\x00", "line 2: not an event of spark_elastic"),
        (b'{"other": "tool"}', "line 2: no event of spark_elastic: Object missing required field"),
        (b"[1, 2]", "line 2: no event of spark_elastic"),
        (b"[" * 100_000, "line 2: not an event of spark_elastic"),
        (b'{"version": 1, "time": NaN, "event": "x"}', "line 2: no event of spark_elastic: its time is nan"),
        (b'{"version": 99, "time": 1, "event": "x"}', "line 2: it has version 99"),
        (b'{"version": 1, "time": 1' + b"0" * 5000 + b', "event": "x"}', "line 2: "),
        (
            b'{"version": 1, "time": 1000, "event": "world_broken", "generation": 1}',
            "line 2: no event of spark_elastic",
        ),
        (b"x" * 3000, "line 2: it is longer than"),
    ],
)
def test_what_is_no_event_is_counted_and_passed_over(
    bad: bytes, complaint: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bad.startswith(b"x"):
        monkeypatch.setattr(follower, "LINE_LIMIT", 2000)
        monkeypatch.setattr(follower, "READ_BYTES", 700)
    first, *rest = map(line, story.killed())
    log.write_bytes(first + bad + b"\n" + b"\n".join([b"", *rest, bad]) + b"\n")
    entries, unread = read_run(log)
    assert unread.count == 2
    assert unread.first.startswith(complaint)
    assert len(entries) == len(story.killed())
    assert "2 lines of the log could not be read" in html(read_history(entries), unread)


def test_a_file_without_a_run_is_refused_with_what_is_wrong_with_its_first_line(log: Path) -> None:
    log.write_bytes(b"garbage\n")
    with pytest.raises(ValueError, match=r"holds no run: line 1: not an event of spark_elastic: 'garbage'"):
        read_run(log)


def test_a_last_line_without_an_end_counts_if_it_is_whole(log: Path) -> None:
    """Editors and other tools leave the end of the last line out."""
    over = line(story.event("driver_paused", 1, seconds=1.5)).rstrip()
    log.write_bytes(begun("one") + over)
    assert len(read_run(log)[0]) == 2
    log.write_bytes(begun("one") + over[:-1])
    entries, unread = read_run(log)
    assert (len(entries), unread.count) == (1, 0)


def test_an_event_of_an_impossible_time_is_passed_over(log: Path) -> None:
    event = story.event("driver_paused", 1, seconds=1.5)
    log.write_bytes(begun("one") + line({**event, "time": -1e300}))
    entries, unread = read_run(log)
    assert len(entries) == 1
    assert unread.first == "line 2: no event of spark_elastic: a number in it is too large, or none"


def test_the_run_that_is_followed_is_the_last_or_the_one_that_was_asked_for(log: Path) -> None:
    followed = LogFollower(log)
    log.write_bytes(line(story.event("driver_paused", 0, seconds=1.5)) + begun("one"))
    followed.read()
    assert [len(followed.run()), len(followed.run("one")), len(followed.run("two"))] == [1, 1, 0]
    with log.open("ab") as file:
        file.write(line(story.event("driver_paused", 1, seconds=1.5)) + begun("two"))
    followed.read()
    assert [len(followed.run()), len(followed.run("one")), len(followed.run("two"))] == [1, 2, 1]


def numbers_in(value: Any) -> list[tuple[Any, Any]]:
    """Where a number stands in plain data: what holds it, and under which key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, each in pairs:
        found += [(value, key)] if isinstance(each, (int, float)) else numbers_in(each)
    return found


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -(10**400), 1e308, -7, 0, 2**62], ids=str)
def test_a_run_in_which_any_number_is_nonsense_is_still_drawn(nonsense: float, log: Path) -> None:
    change = story.told("shares_changed", 4, 0, 0, 1, step=9, before=[50, 50], after=[69, 31], seconds=[0.1, 0.3])
    sample = story.event("worker_sampled", 5, worker=0, cpu_seconds=1.5, memory=2**30, last_lines=["x"])
    first, *rest = [*story.killed()[:15], change, sample, *story.killed()[15:]]
    for event in rest:
        for holder, key in numbers_in(event):
            kept = holder[key]
            holder[key] = nonsense
            log.write_bytes(b"".join(map(line, (first, *rest))))
            entries, unread = read_run(log)
            page = html(read_history(entries), unread)
            assert "</html>" in page
            holder[key] = kept


@pytest.mark.parametrize("missing", range(1, len(story.killed())))
def test_a_run_of_which_any_event_is_missing_is_still_drawn(missing: int) -> None:
    entries = [follower.read_line(json.dumps(event)) for event in story.killed()]
    for left in ([*entries[:missing], *entries[missing + 1 :]], [entries[0], *entries[missing:]], entries[:missing]):
        assert "</html>" in html(read_history(left))
