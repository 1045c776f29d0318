"""Who holds a commit, alone or together, and what follows where nobody does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from machine_script import Script, running

from spark_elastic.driver.holders import find_holders, newest_held, tell_loss
from spark_elastic.driver.ranks import assign_ranks, choose_members
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import StateLostError
from spark_elastic.protocol.messages import CommitId, Slices
from spark_elastic.worker.state.slices import choose_slices

LAST, BEFORE = CommitId(1, 8), CommitId(1, 7)


def worker(number: int, *slices: Slices) -> Worker:
    commit = max((entry.commit for entry in slices), default=None)
    return Worker(number, number, f"host{number}", number, started_at=0.0, heard=0.0, commit=commit, slices=slices)


def in_slices(rank: int, size: int, *commits: CommitId, redundancy: int = 1) -> Worker:
    """Return the worker of a rank that holds its slices of these commits."""
    return worker(rank, *(Slices(commit, choose_slices(rank, size, redundancy), size) for commit in commits))


@given(st.integers(1, 9), st.integers(1, 2), st.data())
def test_losses_that_are_no_neighbours_and_as_many_neighbours_as_the_redundancy_leave_a_commit(
    size: int, redundancy: int, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    left = [in_slices(rank, size, LAST, redundancy=redundancy) for rank in range(size) if rank not in lost]
    in_a_row = any(all((rank + step) % size in lost for step in range(redundancy + 1)) for rank in range(size))
    assert newest_held(left) == (None if in_a_row else LAST)
    if not in_a_row:
        held = {
            number for holder in find_holders(left, LAST) for slices in holder.slices or () for number in slices.held
        }
        assert held == set(range(size))


def test_survivors_go_back_to_the_commit_before_where_slices_of_the_last_one_are_missing() -> None:
    """Rank 1 of four is lost; rank 2 has made the last commit alone."""
    left = [in_slices(0, 4, BEFORE), in_slices(2, 4, LAST, BEFORE), in_slices(3, 4, BEFORE)]
    assert newest_held(left) == BEFORE
    assert [(member.commit, member.slices) for member in assign_ranks(left, BEFORE)] == [
        (BEFORE, Slices(BEFORE, held, 4)) for held in ((0, 1), (2, 3), (0, 3))
    ]


def test_a_rank_whose_values_are_the_last_commit_holds_it_alone() -> None:
    alone = worker(2, Slices(LAST, (0,), 1), Slices(BEFORE, (2, 3), 4))
    left = [in_slices(0, 4, BEFORE), alone]
    assert newest_held(left) == LAST
    assert find_holders(left, LAST) == [alone]
    assert [member.commit for member in assign_ranks(left, LAST)] == [BEFORE, LAST]


def test_leaving_workers_are_kept_as_long_as_the_others_lack_slices() -> None:
    ranks = [in_slices(rank, 4, LAST) for rank in range(4)]
    chosen = choose_members(ranks, 4, LAST, leaving={1, 2})
    assert [candidate.worker for candidate in chosen] == [0, 1, 3]
    assert [candidate.worker for candidate in choose_members(ranks, 4, LAST, leaving={0, 2})] == [1, 3]


def test_holders_displace_newcomers_where_the_world_is_full() -> None:
    ranks = [worker(0), in_slices(1, 3, LAST), in_slices(2, 3, LAST)]
    assert [candidate.worker for candidate in choose_members(ranks, 2, LAST, leaving={2})] == [1, 2]


def lose_neighbours(**settings: bool) -> Script:
    """Two of four ranks are lost, and nobody holds slice 2 any more."""
    script = running("a", "b", "c", "d", min_np=2, **settings)
    script.commit()
    script.kill(1, 2)
    for rank in (0, 3):
        script.processes[rank].slices = in_slices(rank, 4, CommitId(1, 1)).slices
    script.come_back()
    return script


def test_a_job_whose_survivors_lack_a_slice_fails_and_says_which_rank_holds_what() -> None:
    error = lose_neighbours().error
    assert isinstance(error, StateLostError)
    told = "all workers that held slice 2 of 4 of the newest commit were lost (rank 0 (worker 0) holds slices 0, 1 of 4 of "
    assert str(error).startswith(told + "commit 1.1; rank 3 (worker 3) holds slices 0, 3 of 4 of commit 1.1)")


def test_with_a_durable_checkpoint_what_is_left_of_the_slices_is_forgotten() -> None:
    script = lose_neighbours(durable=True)
    members = script.worlds[-1].members
    assert [(member.worker, member.commit, member.slices) for member in members] == [(0, None, None), (3, None, None)]


def test_nothing_is_told_of_slices_where_commits_are_kept_whole() -> None:
    whole = Worker(0, 0, "a", 0, started_at=0.0, heard=0.0, commit=LAST)
    assert (
        tell_loss([whole, worker(1)], {0: 0, 1: 1}, CommitId(2, 1))
        == "all workers that held the newest commit were lost"
    )


def test_slices_of_an_earlier_commit_are_told_of_where_nobody_is_left_that_holds_one_of_the_newest() -> None:
    told = tell_loss([in_slices(1, 3, LAST)], {1: 0}, CommitId(9, 1))
    holder = f"rank 0 (worker 1) holds slices 1, 2 of 3 of commit {LAST}"
    assert told == f"all workers that held the newest commit were lost ({holder})"
