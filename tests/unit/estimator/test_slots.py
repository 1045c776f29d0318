"""Concurrent fits of one process take turns where slots are few."""

from __future__ import annotations

import threading

from spark_elastic.estimator.slots import SlotLedger


def test_a_lonely_fit_gets_all_that_it_asks_for() -> None:
    with SlotLedger().slots(1, 8, 4) as granted:
        assert granted == 8


def test_fits_share_slots_where_these_suffice_and_wait_in_line_where_not() -> None:
    ledger, order = SlotLedger(), []
    done = threading.Event()

    def fit(name: str, least: int) -> None:
        with ledger.slots(least, 4, 4) as granted:
            order.append((name, granted))

    with ledger.slots(2, 2, 4):
        with ledger.slots(1, 4, 4) as granted:
            assert granted == 2
            big = threading.Thread(target=fit, args=("big", 3))
            big.start()
            ledger._changed.acquire()
            while len(ledger._line) < 1:
                ledger._changed.wait(5)
            ledger._changed.release()
            small = threading.Thread(target=lambda: (fit("small", 1), done.set()))
            small.start()
        assert not order, "the first in line waits for three, and nobody passes it"
    big.join(60)
    small.join(60)
    assert [name for name, _ in order] == ["big", "small"]
    assert done.is_set()
