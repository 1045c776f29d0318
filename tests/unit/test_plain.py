"""Text of a log is shown without what would command a terminal or mislead a reader."""

from __future__ import annotations

import json

import pytest
import story

from spark_elastic._plain import TEXT_LIMIT, all_plain, plain
from spark_elastic.protocol.event_format import read_event
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html
from spark_elastic.timeline.summary import summary_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m and \x1b[1;4mloud\x1b[m", "red and loud"),
        ("\x1b[2J\x1b[10;10Hcleared", "cleared"),
        ("\x1b]0;title\x07named, \x1b]8;;http://x\x1b\\linked\x1b]8;;\x1b\\", "named, linked"),
        ("a string without an end \x1b]0;title", "a string without an end "),
        ("\n".join(["first", ("\x1b]8;;file:///" + "p" * 250 + "\x1b\\x")[:200], "the reason"]), "first\n\nthe reason"),
        ("\x1bP cut\r\nthe reason", "\nthe reason"),
        ("reset \x1bc, and an escape at the end \x1b", "reset , and an escape at the end �"),
        ("bell \x07, backspace \x08, carriage\rreturn", "bell �, backspace �, carriage�return"),
        ("Windows\r\nlines\tand tabs\n", "Windows\nlines\tand tabs\n"),
        ("half \ud800 of a pair", "half � of a pair"),
        ("turned \u202e around", "turned � around"),
        ("Ünïcödé 日本 🙂 <b>&", "Ünïcödé 日本 🙂 <b>&"),
    ],
)
def test_escapes_are_left_out_and_other_controls_are_replaced(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_long_text_is_shown_up_to_a_limit_that_says_what_is_left_out() -> None:
    assert plain("x" * (TEXT_LIMIT + 1234)).endswith("x\n… 1,234 more characters")


def test_escapes_neither_count_nor_are_cut_in_two_at_the_limit() -> None:
    coloured = "x" * (TEXT_LIMIT - 1) + "\x1b[31m" + "y"
    assert plain(coloured) == "x" * (TEXT_LIMIT - 1) + "y"
    assert plain(coloured + "z").endswith("xy\n… 1 more characters")


def test_all_of_plain_data_becomes_plain() -> None:
    assert all_plain({"\x1b[1ma": ["\x1b[0m", {"b": ("\x07", 1, None, float("nan"))}]}) == {
        "a": ["", {"b": ["�", 1, None, None]}]
    }


def test_neither_page_nor_summary_hands_on_what_a_log_holds_for_a_terminal() -> None:
    events = story.killed()
    events[0]["run_id"] = "ab\x1b[31mcd\ud800"
    for event in events:
        if event["event"] == "worker_exited":
            event["meaning"] = "\x1b]0;owned\x07told by its exit code"
        if event["event"] == "metrics":
            event["values"] |= {"\x1b[1mloss": 1.0, "huge": 10**400, "nan": float("nan"), "text": "\x1b[1mx"}
    history = read_history([read_event(json.loads(json.dumps(event))) for event in events])
    assert set(history.metrics) == {"loss", "\x1b[1mloss"}
    for text in (html(history), summary_text(history)):
        text.encode()
        assert "\x1b" not in text
        assert "u001b" not in text
        assert "abcd" in text
        assert "rank 1 on west was lost: told by its exit code" in text
