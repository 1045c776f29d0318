"""Who holds a commit: one worker the whole of it, or several workers together all of its slices.

These are pure functions of what workers have reported. A job cannot go back to a commit that no worker holds whole and of which
a slice is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spark_elastic.driver.workers import Worker
from spark_elastic.errors import name_worker
from spark_elastic.protocol.messages import CommitId


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


def tell_loss(workers: Sequence[Worker], ranks: Mapping[int, int], commit: CommitId) -> str:
    """Say what was lost of a commit that these workers do not hold, and if commits are kept in slices, which rank holds which."""
    held = [slices for worker in workers if (slices := worker.slices_of(commit)) is not None]
    missing = sorted(set(range(held[0].of)).difference(*(slices.held for slices in held))) if held else []
    lost = f"{_tell(missing, held[0].of)} of the newest commit" if missing else "the newest commit"
    rest = "; ".join(
        f"{name_worker(worker.worker, ranks[worker.worker])} holds "
        + " and ".join(f"{_tell(slices.held, slices.of)} of commit {slices.commit}" for slices in worker.slices)
        for worker in workers
        if worker.slices and worker.worker in ranks
    )
    return f"all workers that held {lost} were lost" + (f" ({rest})" if rest else "")


def _tell(slices: Sequence[int], of: int) -> str:
    return f"slice{'s' * (len(slices) > 1)} {', '.join(map(str, slices))} of {of}"
