"""The model that chaos jobs are checked against notices what may go wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from chaos_model import History, Line, violations


def history() -> History:
    """Two workers take two steps of two rows; b dies in the third, and a goes on alone from step 2 to the epoch's end."""
    lines = []
    for worker, rank in (("a", 0), ("b", 1)):
        lines.append(Line(worker, "entered", 1, rank, 2, 0, "0"))
        for step in (1, 2):
            lines.append(Line(worker, "tried", 1, rank, 2, step, str(step - 1), (2 * step - 2 + rank,)))
            lines.append(Line(worker, "committed", 1, rank, 2, step, str(step)))
        lines.append(Line(worker, "tried", 1, rank, 2, 3, "2", (4 + rank,)))
        if worker == "a":
            lines.append(Line("a", "entered", 2, 0, 1, 2, "2"))
            lines.append(Line("a", "tried", 2, 0, 1, 3, "2", (4, 5)))
    formed = [
        {"event": "world_formed", "generation": 1, "size": 2},
        {"event": "world_formed", "generation": 2, "size": 1},
    ]
    result = {"rank": 0, "generation": 2, "epochs": 1, "step": 3, "seen": [1.0] * 6}
    return History(formed, lines, [result], rows=6, min_np=1, max_np=2)


def lines(change: Callable[[Line], Line | None]) -> History:
    good = history()
    return replace(good, lines=[new for line in good.lines if (new := change(line)) is not None])


def where(change: dict[str, Any], **fields: Any) -> History:
    """The history with a change to the lines that have these fields."""
    return lines(
        lambda line: (
            replace(line, **change) if all(getattr(line, name) == value for name, value in fields.items()) else line
        )
    )


def results(**change: Any) -> History:
    good = history()
    return replace(good, results=[{**good.results[0], **change}])


WRONG = {
    "worlds: generation 1 formed after 1": replace(history(), events=[history().events[0]] * 2),
    "worlds: generation 1 has 2 workers": replace(history(), max_np=1),
    "ranks: rank 0 of generation 1 is .* and another": where({"rank": 0}, worker="b"),
    "ranks: .* in a world of 2": where({"size": 3}, generation=1, rank=1),
    "weights: .* differs from": where({"digest": "other"}, worker="b", kind="committed", step=2),
    "weights: .* entered elsewhere": where({"step": 1}, worker="b", kind="entered"),
    "survivors: .* behind its own commit": where({"step": 1, "digest": "1"}, generation=2, kind="entered"),
    "rows: step 1 .* recorded by ranks": lines(
        lambda line: None if (line.worker, line.step, line.kind) == ("b", 1, "tried") else line
    ),
    "rows: .* read so often": where({"rows": (5, 5)}, generation=2, kind="tried"),
    "results: after 1 epochs rows count": results(seen=[1.0] * 5 + [2.0]),
    "results: results of ranks": results(rank=1),
}


def test_a_loss_without_consequences_is_no_violation() -> None:
    assert violations(history()) == []


@pytest.mark.parametrize("what", WRONG)
def test_a_violation_is_noticed(what: str) -> None:
    assert any(re.match(what, found) for found in violations(WRONG[what])), violations(WRONG[what])


def test_a_state_that_was_lost_with_all_who_held_it_may_go_back() -> None:
    back = where({"step": 1, "digest": "1"}, generation=2, kind="entered")
    events = [*back.events, {"event": "state_lost", "generation": 1}]
    assert not [found for found in violations(replace(back, events=events)) if found.startswith("survivors")]
