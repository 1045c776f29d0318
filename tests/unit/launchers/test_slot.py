"""When the end of a slot's task is told as a failure."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.slot import Slot
from spark_elastic.launchers.slot_reason import GAVE_UP

UNHEARD = "its task ended without registering"


def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("was_known", "is_registered", "error", "given_up"),
    [
        (False, False, "", UNHEARD),
        (False, False, "ValueError", "ValueError"),
        (True, True, "", None),
        (True, True, "the executor was lost", None),
        # The driver that an earlier task has reached does not listen any more.
        (True, False, "", None),
        (True, False, "the executor was lost", "the executor was lost"),
    ],
)
def test_a_slot_was_given_up_if_its_task_has_failed_before_it_reached_the_driver(
    was_known: bool, is_registered: bool, error: str, given_up: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    slot = Slot(0)
    if was_known:
        slot.register()
        slot.registered = is_registered
    with caplog.at_level(logging.INFO):
        slot.ended(
            GAVE_UP, error, SlotListener(nothing, nothing, nothing, lambda _, reason: told.append(reason)), UNHEARD
        )
    assert told == ([] if given_up is None else [given_up])
    assert [record.levelname for record in caplog.records] == ["INFO" if given_up is None else "WARNING"]
    assert not slot.registered
