"""Who sends which slices of a commit to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.protocol.messages import CommitId, Member, Slices
from spark_elastic.worker.state.gathering import plan_gather
from spark_elastic.worker.state.slices import choose_slices

NEW, OLD = CommitId(2, 5), CommitId(2, 4)


def member(rank: int, commit: CommitId | None, *held: int, of: int = 4) -> Member:
    return Member(rank, rank, 0, 1, 0, 1, commit, Slices(commit, held, of) if commit and held else None)


def test_survivors_of_a_loss_take_what_each_of_them_lacks() -> None:
    """Rank 1 of four was lost, whose own slice rank 0 holds, too. A newcomer has taken its place."""
    plan = plan_gather([member(0, NEW, 0, 1), member(1, NEW, 2, 3), member(2, NEW, 0, 3), member(3, None)], NEW)
    assert plan.of == 4
    assert plan.donors == {3: 0}
    assert plan.sources == {
        (0, 2): 1, (0, 3): 2,
        (1, 0): 2, (1, 1): 0,
        (2, 1): 0, (2, 2): 1,
        (3, 0): 2, (3, 1): 0, (3, 2): 1, (3, 3): 1,
    }  # fmt: skip


def test_nobody_gathers_after_a_planned_change_and_newcomers_take_from_all_others() -> None:
    plan = plan_gather([*(member(rank, NEW, 0, of=1) for rank in range(3)), member(3, None)], NEW)
    assert (plan.of, plan.donors) == (3, {3: 0})
    assert sorted(plan.sources) == [(3, 0), (3, 1), (3, 2)]
    assert sorted(plan.sources.values()) == [0, 1, 2]


def test_a_rank_one_behind_takes_everything() -> None:
    plan = plan_gather([member(0, NEW, 0, 1, of=3), member(1, NEW, 1, 2, of=3), member(2, OLD, 0, 2, of=3)], NEW)
    assert plan.donors == {2: 0}
    assert {number for receiver, number in plan.sources if receiver == 2} == {0, 1, 2}


@given(st.integers(2, 8), st.integers(1, 2), st.data())
def test_whatever_is_sent_is_held_and_everybody_gets_all(size: int, redundancy: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, size - 1))
    left = [rank for rank in range(size) if rank != lost]
    members = [member(place, NEW, *choose_slices(rank, size, redundancy), of=size) for place, rank in enumerate(left)]
    members.append(member(len(left), None))
    plan = plan_gather(members, NEW)
    for (_, number), source in plan.sources.items():
        slices = members[source].slices
        assert slices is not None
        assert number in slices.held
    for receiver in members:
        arriving = {number for rank, number in plan.sources if rank == receiver.rank}
        if receiver.slices is None or not receiver.slices.is_whole:
            assert arriving | set(receiver.slices.held if receiver.slices else ()) == set(range(plan.of))
        else:
            assert not arriving
