"""Who is in a world, and with which rank: pure functions of who is there and how old they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count

from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId, Member


def assign_ranks(candidates: Iterable[Worker]) -> tuple[Member, ...]:
    """Rank the candidates: the oldest is rank 0, and the workers of a machine get consecutive ranks.

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
            commit=candidate.commit,
        )
        for workers in machines.values()
        for local_rank, candidate in enumerate(workers)
    )


def choose_members(
    candidates: Iterable[Worker], max_np: int, newest: CommitId | None, leaving: Collection[int]
) -> list[Worker]:
    """Choose who is in the next world: the oldest that stay, at most ``max_np``, with a holder of the newest commit.

    ``leaving`` are the workers whose host drains. One of them is kept only when nobody else holds the newest commit:
    it hands the state on, and leaves at the next planned change.
    """
    by_age = sorted(candidates, key=lambda candidate: candidate.worker)
    staying = [candidate for candidate in by_age if candidate.worker not in leaving]
    chosen = staying[:max_np]
    if newest is not None and not any(candidate.commit == newest for candidate in chosen):
        holder = next((candidate for candidate in by_age if candidate.commit == newest), None)
        if holder is None:
            return []
        chosen = sorted([*chosen[: max_np - 1], holder], key=lambda candidate: candidate.worker)
    return chosen
