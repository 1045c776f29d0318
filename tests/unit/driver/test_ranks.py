"""Rank assignment and the choice of members, over any set of candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.driver.ranks import assign_ranks, choose_members
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId


def worker(number: int, host_name: str, commit: CommitId | None) -> Worker:
    return Worker(number, number, host_name, host_name, started_at=0.0, heard=0.0, commit=commit)


commits = st.none() | st.builds(CommitId, st.integers(1, 3), st.integers(0, 3))
candidates = st.lists(
    st.builds(worker, st.integers(0, 99), st.sampled_from("abcd"), commits),
    unique_by=lambda c: c.worker,
    max_size=12,
)


@given(candidates)
def test_ranks_are_dense_and_the_oldest_is_rank_0(given_candidates: list[Worker]) -> None:
    members = assign_ranks(given_candidates)
    assert [member.rank for member in members] == list(range(len(given_candidates)))
    if members:
        assert members[0].worker == min(candidate.worker for candidate in given_candidates)


@given(candidates)
def test_workers_of_a_machine_have_consecutive_ranks_by_age(given_candidates: list[Worker]) -> None:
    names = {candidate.worker: candidate.host_name for candidate in given_candidates}
    members = assign_ranks(given_candidates)
    order = [names[member.worker] for member in members]
    for name in set(order):
        first = order.index(name)
        mine = members[first : first + order.count(name)]
        assert {names[member.worker] for member in mine} == {name}
        assert [member.local_rank for member in mine] == list(range(len(mine)))
        assert {member.local_size for member in mine} == {len(mine)}
        assert [member.worker for member in mine] == sorted(member.worker for member in mine)


@given(candidates)
def test_cross_ranks_count_the_machines_that_have_the_local_rank(given_candidates: list[Worker]) -> None:
    members = assign_ranks(given_candidates)
    for local_rank in {member.local_rank for member in members}:
        row = [member for member in members if member.local_rank == local_rank]
        assert [member.cross_rank for member in row] == list(range(len(row)))
        assert {member.cross_size for member in row} == {len(row)}


@given(candidates)
def test_the_order_in_which_candidates_are_named_does_not_matter(given_candidates: list[Worker]) -> None:
    assert assign_ranks(given_candidates) == assign_ranks(reversed(given_candidates))


@given(candidates, st.integers(1, 6), st.sets(st.integers(0, 99)))
def test_the_chosen_hold_the_newest_commit_and_are_no_more_than_max_np(
    given_candidates: list[Worker], max_np: int, leaving: set[int]
) -> None:
    newest = max((c.commit for c in given_candidates if c.commit is not None), default=None)
    chosen = choose_members(given_candidates, max_np, newest, leaving)
    assert len(chosen) <= max_np
    assert chosen == sorted(chosen, key=lambda candidate: candidate.worker)
    if newest is not None:
        assert any(candidate.commit == newest for candidate in chosen)
    assert sum(candidate.worker in leaving for candidate in chosen) <= 1


def test_nobody_is_chosen_when_the_newest_commit_is_nowhere() -> None:
    assert choose_members([worker(0, "a", CommitId(1, 1))], 4, CommitId(1, 2), ()) == []


def test_a_leaving_worker_is_kept_only_as_the_last_holder() -> None:
    old, new = CommitId(1, 1), CommitId(1, 2)
    both = [worker(0, "a", old), worker(1, "b", new)]
    assert choose_members(both, 4, new, {1}) == both
    assert choose_members([worker(0, "a", new), worker(1, "b", new)], 4, new, {1})[0].worker == 0


def test_the_holder_displaces_the_youngest_where_the_world_is_full() -> None:
    old, new = CommitId(1, 1), CommitId(1, 2)
    given_candidates = [worker(0, "a", old), worker(1, "b", old), worker(2, "c", new)]
    assert [candidate.worker for candidate in choose_members(given_candidates, 2, new, ())] == [0, 2]
