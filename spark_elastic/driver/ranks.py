"""Rank assignment: a pure function of who is there and how old they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from spark_elastic.messages import CommitId, Member


class Candidate(msgspec.Struct, frozen=True):
    """A worker that is ready for the next world. Workers are numbered by age: the smallest is the oldest."""

    worker: int
    host_name: str
    commit: CommitId | None


def assign_ranks(candidates: Iterable[Candidate]) -> tuple[Member, ...]:
    """Rank the candidates: the oldest is rank 0, and the workers of a machine get consecutive ranks.

    Machines are ordered by their oldest worker, workers of a machine by age. ``cross_rank`` is a worker's place among
    those with the same ``local_rank`` on all machines, as in MPI.
    """
    machines: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.worker):
        machines.setdefault(candidate.host_name, []).append(candidate)
    cross_sizes = Counter(local_rank for workers in machines.values() for local_rank in range(len(workers)))
    before: Counter[int] = Counter()
    members: list[Member] = []
    for workers in machines.values():
        for local_rank, candidate in enumerate(workers):
            members.append(
                Member(
                    worker=candidate.worker,
                    rank=len(members),
                    local_rank=local_rank,
                    local_size=len(workers),
                    cross_rank=before[local_rank],
                    cross_size=cross_sizes[local_rank],
                    commit=candidate.commit,
                )
            )
            before[local_rank] += 1
    return tuple(members)


def choose_members(
    candidates: Iterable[Candidate], max_np: int, newest: CommitId | None, leaving: Mapping[int, bool]
) -> list[Candidate]:
    """Choose who is in the next world: the oldest that stay, at most ``max_np``, with a holder of the newest commit.

    ``leaving`` tells of workers whose host drains. One of them is kept only when nobody else holds the newest commit:
    it hands the state on, and leaves at the next planned change.
    """
    by_age = sorted(candidates, key=lambda candidate: candidate.worker)
    staying = [candidate for candidate in by_age if not leaving.get(candidate.worker, False)]
    chosen = staying[:max_np]
    if newest is not None and not any(candidate.commit == newest for candidate in chosen):
        holder = next((candidate for candidate in by_age if candidate.commit == newest), None)
        if holder is None:
            return []
        chosen = sorted([*chosen[: max_np - 1], holder], key=lambda candidate: candidate.worker)
    return chosen
