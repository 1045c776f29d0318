"""Situation: what is known of a job at one moment. Pure functions judge it, and the machine acts on their judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_elastic.driver.generation import Generation
from spark_elastic.driver.hosts import HostManager
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.workers import Worker


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts on which judgements are based, and questions that several of them ask. Objects are the machine's, not copies."""

    # The machine's time, which stands still while the driver is paused, and the time at which it began.
    now: float
    started: float
    settings: JobSettings
    hosts: HostManager
    workers: Mapping[int, Worker]
    world: Generation | None
    # The number of the newest world; 0 before the first.
    generation: int
    # Whether the state that workers hold has been trained.
    has_trained: bool
    # How many workers may be in a world: ``max_np``, or fewer if more have been found to be slower.
    most: int

    @property
    def members(self) -> list[Worker]:
        """The workers that are left of the newest world, in rank order."""
        if self.world is None:
            return []
        return [self.workers[number] for number in self.world.ranks if number in self.workers]

    @property
    def newcomers(self) -> list[Worker]:
        """The workers that are ready, are in no world, and may stay."""
        return [
            worker
            for worker in self.workers.values()
            if worker.phase is WorkerPhase.READY and not self.is_member(worker.worker) and not self.is_draining(worker)
        ]

    @property
    def needed(self) -> int:
        """How many ready workers the next world needs to form."""
        if self.generation > 0 or self.now - self.started >= self.settings.start_timeout:
            return self.settings.min_np
        return self.settings.num_proc

    def is_member(self, number: int) -> bool:
        """Whether a worker belongs to the newest world."""
        return self.world is not None and number in self.world.ranks

    def rank_of(self, number: int) -> int | None:
        """The rank of a worker in the newest world; None if it is not a member."""
        return self.world.ranks.get(number) if self.world is not None else None

    def is_draining(self, worker: Worker) -> bool:
        """Whether the host of a worker is being taken away."""
        host = self.hosts.get(worker.host)
        return host is not None and host.draining

    def is_joining(self, worker: Worker) -> bool:
        """Whether a member has made no commit yet, although members that brought the state into its world have.

        Those may have received the state from members that made the commits and have been lost since.
        """
        if self.world is None or worker.worker not in self.world.ranks or worker.has_progressed:
            return False
        holders = {member.worker for member in self.world.members if member.commit is not None}
        left = [member for member in self.members if member.worker in holders]
        if any(member.has_progressed for member in left):
            return True
        return self.has_trained and bool(left) and worker.worker not in holders

    def speaks_of_the_job(self, number: int) -> bool:
        """Whether the end of a worker may be due to the user's code: the worker was training, or no worker was at that time.

        A newcomer that fails while the others train, or could train without it, only says something about its host.
        """
        worker = self.workers.get(number)
        if worker is not None and self.is_joining(worker):
            return sum(not self.is_joining(member) for member in self.members) < self.settings.min_np
        return self.world is None or self.world.phase is WorldPhase.BREAKING or self.is_member(number)
