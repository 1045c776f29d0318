"""ControlClient: what a worker tells the driver of its world."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.protocol.messages import Activity, FormWorld
from spark_elastic.worker.control import ControlClient, ControlledWorld


class Old(ControlledWorld):
    def activity(self) -> Activity:
        return Activity(collectives=100)


def test_what_was_done_in_the_old_world_is_never_told_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat may be due before the user's thread has left the old world."""
    ticket: Any = None
    client = ControlClient(ticket, worker=1, token="")
    monkeypatch.setattr(client, "_send", lambda message: None)
    client.enter(Old())
    client._form = FormWorld(2, (), 0, "gloo")
    client.ready("")
    assert (client.generation, client._world.activity()) == (2, Activity())


def test_an_exception_is_told_of_by_its_type_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket: Any = None
    client = ControlClient(ticket, worker=1, token="")
    sent: list[Any] = []
    monkeypatch.setattr(client, "_send", sent.append)
    broken = SyntaxError("'(' was never closed", ("train.py", 7, 5, "def g(", 7, 6))
    broken.__notes__ = ["in the second file"]  # type: ignore[attr-defined]
    client.failed(broken)
    client.failed(ValueError("bad row"))
    assert [message.error for message in sent] == [
        "SyntaxError: '(' was never closed\nin the second file",
        "ValueError: bad row",
    ]
