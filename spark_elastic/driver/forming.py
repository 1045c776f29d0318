"""Who is taken out when the ranks of a world have not connected to each other.

In a full mesh one rank that cannot be reached keeps all others from connecting, and nothing tells which one it is. So blame
goes to those who have never been in a world that formed; among equals to who has failed most often, then to the youngest.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_elastic.driver.world import Worker

# Ranks that could not connect so many times in a row are replaced, one after the other.
FORM_ATTEMPTS = 3


def choose_replaced(members: Iterable[Worker], missing: Iterable[Worker], took_long: bool) -> list[Worker]:
    """Choose among the ``missing``, who have not connected, those to replace; ``members`` are all that are left.

    Newcomers to a world that others have been in go first, all of them, and at once if the others have stood still for long.
    Nobody else goes while a newcomer is missing. Never chosen is the last one that holds the newest commit.
    """
    members, missing = list(members), list(missing)
    newcomers = [worker for worker in missing if not worker.has_connected]
    if newcomers and any(worker.has_connected for worker in members):
        return [worker for worker in newcomers if took_long or worker.form_failures >= FORM_ATTEMPTS]
    newest = max((worker.commit for worker in members if worker.commit is not None), default=None)
    holders = [] if newest is None else [worker for worker in members if worker.commit == newest]
    suspects = [
        worker
        for worker in missing
        if worker.form_failures >= FORM_ATTEMPTS and (len(holders) > 1 or worker not in holders)
    ]
    suspects.sort(key=lambda worker: (worker in holders, -worker.form_failures, -worker.worker))
    return suspects[:1]
