"""The open loop over parts of a process: how it ends, and what is refused within and after it."""

from __future__ import annotations

import threading

import pytest

from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.shards.loops import HOW, Loops


class Loop:
    """Counts how often it was put back."""

    def __init__(self) -> None:
        self.put_back_times = 0

    def put_back(self) -> None:
        self.put_back_times += 1


@pytest.fixture
def loops() -> Loops:
    return Loops()


def test_within_a_loop_everything_is_refused_with_the_lines_to_write_and_after_its_end_nothing(loops: Loops) -> None:
    loop = Loop()
    loops.begin(loop)
    for refuse in (loops.refuse, loops.refuse_within):
        with pytest.raises(TrainingCodeError, match=r"^a commit came inside a loop") as raised:
            refuse("a commit came")
        assert str(raised.value).endswith(HOW)
    with pytest.raises(TrainingCodeError, match="began inside a loop"):
        loops.begin(Loop())
    loops.end(loop)
    loops.refuse("a commit came")
    loops.begin(Loop())
    assert loop.put_back_times == 0


def test_once_a_loop_adds_up_its_parts_ranks_may_meet_until_the_next_loop(loops: Loops) -> None:
    loop = Loop()
    loops.begin(loop)
    loops.add_up()
    loops.refuse_within("a collective came")
    loops.end(loop)
    loops.begin(Loop())
    with pytest.raises(TrainingCodeError, match=r"^a collective came inside a loop"):
        loops.refuse_within("a collective came")


def test_a_loop_that_is_left_is_put_back_and_only_what_counts_on_its_sums_is_refused(loops: Loops) -> None:
    loop = Loop()
    loops.begin(loop)
    loops.leave(loop)
    assert loop.put_back_times == 1
    loops.refuse_within("validation came")
    with pytest.raises(TrainingCodeError, match=r"a commit came after a loop .* had been left before its end"):
        loops.refuse("a commit came")


def test_a_loop_that_was_abandoned_is_put_back_once_and_forgotten(loops: Loops) -> None:
    loop = Loop()
    loops.begin(loop)
    loops.abandon()
    loops.refuse("a commit came")
    loops.leave(loop)  # as late as the garbage collector may do it
    assert loop.put_back_times == 1
    loops.refuse("a commit came")


def test_a_loop_of_before_ends_no_other_one(loops: Loops) -> None:
    old, new = Loop(), Loop()
    loops.begin(old)
    loops.abandon()
    loops.begin(new)
    loops.end(old)
    loops.leave(old)
    assert loops.open is new
    assert (old.put_back_times, new.put_back_times) == (1, 0)


def test_a_loop_that_has_ended_leaves_no_trace(loops: Loops) -> None:
    loop = Loop()
    loops.begin(loop)
    loops.add_up()
    loops.end(loop)
    assert vars(loops) == vars(Loops()) | {"_thread": threading.get_ident()}
    assert not deliveries.is_in_loop
