"""Voting: returning from the elastic function is a vote for the end of the job. After the last vote, results are awaited."""

from __future__ import annotations

from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.workers import Worker


def have_all_voted(seen: Situation) -> bool:
    """Whether no rank of the running world is lost and all have returned from the elastic function."""
    if seen.world is None or seen.world.phase not in (WorldPhase.RUNNING, WorldPhase.INTERRUPTING):
        return False
    members = [seen.workers.get(number) for number in seen.world.workers]
    return all(worker is not None and worker.phase is WorkerPhase.VOTED for worker in members)


def find_to_call_back(seen: Situation) -> list[Worker]:
    """Find ranks that have returned from the function but have to enter it again, because others have left the world."""
    if seen.world is None or seen.world.phase is not WorldPhase.INTERRUPTING:
        return []
    members = seen.members
    voted = [worker for worker in members if worker.phase is WorkerPhase.VOTED]
    return voted if any(worker.phase is WorkerPhase.READY for worker in members) else []


def have_all_delivered(seen: Situation) -> bool:
    """Whether the results of all ranks of the finishing world have arrived."""
    if seen.world is None or seen.world.phase is not WorldPhase.FINISHING:
        return False
    members = [seen.workers.get(number) for number in seen.world.workers]
    return all(worker is not None and worker.phase is WorkerPhase.DONE for worker in members)
