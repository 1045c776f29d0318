"""Which workers are in a world, and with which rank: pure functions of the candidates and their age."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count

from spark_elastic.driver.holders import find_holders
from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId, Member


def assign_ranks(candidates: Iterable[Worker], newest: CommitId | None = None) -> tuple[Member, ...]:
    """Rank the candidates: the oldest is rank 0, and the workers of a machine get consecutive ranks.

    The members continue from the commit ``newest``, which some of them hold whole or in slices.

    Workers are numbered by age. Machines are ordered by their oldest worker, workers of a machine by age. ``cross_rank``
    is a worker's place among those with the same ``local_rank`` on all machines, as in MPI.
    """
    machines: defaultdict[str, list[Worker]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda candidate: candidate.worker):
        machines[candidate.host_name].append(candidate)
    cross_sizes = Counter(chain.from_iterable(range(len(workers)) for workers in machines.values()))
    ranks, cross_ranks = count(), defaultdict[int, Iterator[int]](count)
    return tuple(
        Member(
            worker=candidate.worker,
            rank=next(ranks),
            local_rank=local_rank,
            local_size=len(workers),
            cross_rank=next(cross_ranks[local_rank]),
            cross_size=cross_sizes[local_rank],
            commit=_commit_of(candidate, newest),
            slices=None if candidate.slices is None or newest is None else candidate.slices_of(newest),
        )
        for workers in machines.values()
        for local_rank, candidate in enumerate(workers)
    )


def _commit_of(candidate: Worker, newest: CommitId | None) -> CommitId | None:
    """Return ``newest`` if a candidate holds any part of it, else the older commit that it holds."""
    if newest is None or candidate.commit is None:
        return None
    if candidate.slices_of(newest) is not None:
        return newest
    return candidate.commit if candidate.commit < newest else None


def choose_members(
    candidates: Iterable[Worker], max_np: int, newest: CommitId | None, leaving: Collection[int]
) -> list[Worker]:
    """Choose the members of the next world: the oldest that stay, at most ``max_np``, with holders of the newest commit.

    If commits are held in slices and more than ``max_np`` workers are needed to put the newest one together, all of these are
    chosen. ``leaving`` are the workers whose host drains. One of them is kept only if the others, alone or together, do not
    hold the newest commit: it hands the state on, and leaves at the next planned change.
    """
    by_age = sorted(candidates, key=lambda candidate: candidate.worker)
    staying = [candidate for candidate in by_age if candidate.worker not in leaving]
    chosen = staying[:max_np]
    if newest is not None and not find_holders(chosen, newest):
        others = [candidate for candidate in by_age if candidate not in chosen]
        holders = find_holders([*chosen, *others], newest)
        if not holders:
            return []
        spare = [candidate for candidate in chosen if candidate not in holders]
        chosen = sorted([*holders, *spare[: max(0, max_np - len(holders))]], key=lambda candidate: candidate.worker)
    return chosen
