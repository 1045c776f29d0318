"""Shortage: since when there have been too few hosts or workers to train, and what follows from that."""

from __future__ import annotations

from spark_elastic.driver.phases import WorkerPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.situation import Situation
from spark_elastic.errors import NotEnoughHostsError


class Shortage:
    """Follows one job. Hosts are counted before the job's first world, workers from then on.

    A job that cannot begin gives its slots back after ``yield_after``, and then again at ever longer intervals. Otherwise two
    runs that each hold a part of what they need would wait for each other. A job that has too few hosts or workers for too long
    fails.
    """

    def __init__(self, settings: JobSettings) -> None:
        self._since: float | None = None
        self._yield_after = settings.yield_after
        self._yield_at: float | None = None
        self._slot_trouble = ""

    def slot_given_up(self, reason: str) -> None:
        """Note why a slot was given up, which may explain the shortage."""
        self._slot_trouble = f" The last slot that was given up: {reason}"

    def note(self, seen: Situation) -> None:
        """Note since when there have been too few hosts, or workers."""
        if seen.generation == 0:
            served = {worker.host for worker in seen.workers.values() if worker.phase is WorkerPhase.DONE}
            have = len(served | {host.host for host in seen.hosts if not host.draining})
        else:
            have = len(seen.members) + len(seen.newcomers)
        if have >= seen.settings.min_np:
            self._since = self._yield_at = None
        elif self._since is None:
            self._since = seen.now

    def is_time_to_yield(self, seen: Situation) -> bool:
        """Return whether to give the slots back for now. If so, the next time comes after twice as long."""
        if seen.generation > 0 or self._since is None or not len(seen.hosts):
            return False
        if self._yield_at is None:
            self._yield_at = seen.now + self._yield_after
        if seen.now < self._yield_at:
            return False
        self._yield_at = None
        self._yield_after *= 2
        return True

    def verdict(self, seen: Situation, elastic_since: float | None) -> NotEnoughHostsError | None:
        """Return the error with which the job fails, or None. ``elastic_since``: when an elastic function was first reached."""
        if seen.generation == 0:
            return self._verdict_before_the_first_world(seen, elastic_since)
        settings = seen.settings
        if self._since is None or seen.now - self._since < settings.elastic_timeout:
            return None
        have = len(seen.members) + len(seen.newcomers)
        least, _ = _given(settings)
        return NotEnoughHostsError(
            f"only {have} of {least}={settings.min_np} workers were left {settings.elastic_timeout:g} s "
            f"(elastic_timeout) after {(seen.world and seen.world.broken_by) or 'the last change'}; "
            f"{len(seen.hosts)} hosts are registered"
        )

    def _verdict_before_the_first_world(
        self, seen: Situation, elastic_since: float | None
    ) -> NotEnoughHostsError | None:
        settings = seen.settings
        least, most = _given(settings)
        # A long function without an elastic part looks like one that never reaches it, so only hosts count until a worker has
        # reached an elastic function.
        since = self._since if self._since is not None else elastic_since
        if since is None or seen.now - since < settings.start_timeout:
            return None
        if self._since is not None:
            have = sum(not host.draining for host in seen.hosts)
            what = f"{have} of {least}={settings.min_np} hosts had registered"
        else:
            have = sum(worker.phase is WorkerPhase.READY for worker in seen.workers.values())
            if have >= settings.min_np:
                return None
            what = f"{have} of {least}={settings.min_np} workers had reached the elastic function"
        return NotEnoughHostsError(
            f"only {what} after {settings.start_timeout:g} s (start_timeout). Are there free cores "
            f"for {most}={settings.max_np} tasks? Lower {least}, or raise start_timeout.{self._slot_trouble}"
        )


def _given(settings: JobSettings) -> tuple[str, str]:
    """Return what the user gives for the least and the largest number of workers: a fixed world has one size."""
    return ("min_np", "max_np") if settings.elastic else ("num_proc", "num_proc")
