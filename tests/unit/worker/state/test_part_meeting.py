"""Ranks tell rank 0 of their parts by the control store, and rank 0 hears all of it, in order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from spark_elastic.worker.state.part_meeting import StoreMeeting


class Store:
    """Has what a meeting asks of the control store, for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.refuses = 0

    def set(self, key: str, value: bytes | str) -> None:
        with self.changed:
            if self.refuses:
                self.refuses -= 1
                raise ValueError("the store is full")
            self.values[key] = value.encode() if isinstance(value, str) else value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def meetings(store: Any, **settings: Any) -> list[StoreMeeting]:
    return [StoreMeeting(store, "part 1", rank, 3, **settings) for rank in range(3)]


def test_rank_0_gets_what_all_others_bring_in_rank_order_and_the_store_forgets_it() -> None:
    store, heard = Store(), []
    first, one, two = meetings(store)
    two.bring(b"two")
    one.tell()
    one.tell()
    one.bring(b"one")
    assert first.collect(lambda: heard.append(1)) == [b"one", b"two"]
    assert len(heard) == 4, "progress, and the end"
    assert store.values == {}


def test_what_the_store_has_refused_is_not_waited_for() -> None:
    store = Store()
    first, one, two = meetings(store)
    store.refuses = 2
    for say in (one.tell, lambda: one.bring(b"more than the store takes")):
        with pytest.raises(ValueError, match="the store is full"):
            say()
    one.bring(b"why")
    two.bring(b"two")
    assert first.collect(lambda: None) == [b"why", b"two"]


@pytest.mark.parametrize("wanted", [True, False])
def test_where_ranks_ask_they_wait_for_the_wish_of_rank_0(wanted: bool) -> None:
    store, seen = Store(), []
    first, one, _ = meetings(store, asks=True)
    asking = threading.Thread(target=lambda: seen.append(one.is_wanted()))
    asking.start()
    first.wish(wanted)
    asking.join(60)
    assert seen == [wanted]
    assert meetings(store)[1].is_wanted(), "without a wish parts are wanted"
