"""Who holds a commit: one worker the whole of it, or several workers together all of its slices.

These are pure functions of what workers have reported. A job cannot go back to a commit that no worker holds whole and of which
a slice is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spark_elastic.driver.workers import Worker
from spark_elastic.protocol.messages import CommitId, Slices


def newest_held(workers: Sequence[Worker]) -> CommitId | None:
    """Return the newest commit that these workers hold, one alone or several together; None if they hold none."""
    commits = {worker.commit for worker in workers if worker.commit is not None}
    commits |= {slices.commit for worker in workers for slices in worker.slices or ()}
    return next((commit for commit in sorted(commits, reverse=True) if find_holders(workers, commit)), None)


def find_holders(workers: Iterable[Worker], commit: CommitId) -> list[Worker]:
    """Return workers that together hold a commit, the first ones where possible; an empty list if a slice is missing."""
    holders: list[Worker] = []
    found: set[int] = set()
    for worker in workers:
        slices = worker.slices_of(commit)
        if slices is None:
            continue
        if slices.is_whole:
            return [worker]
        if not found.issuperset(slices.held):
            holders.append(worker)
            found.update(slices.held)
        if len(found) == slices.of:
            return holders
    return []


def tell_slices(workers: Iterable[Worker], ranks: Mapping[int, int]) -> str:
    """Say which rank holds which slices of which commits; empty if commits are kept whole."""
    return "; ".join(
        f"rank {ranks[worker.worker]} holds " + " and ".join(map(_tell, worker.slices))
        for worker in workers
        if worker.slices and worker.worker in ranks
    )


def _tell(slices: Slices) -> str:
    numbers = ", ".join(map(str, slices.held))
    return f"slice{'s' * (len(slices.held) > 1)} {numbers} of {slices.of} of commit {slices.commit}"
