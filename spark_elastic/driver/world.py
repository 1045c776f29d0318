"""What the machine knows of workers and of the newest world."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.driver.hosts import Place
from spark_elastic.driver.phases import (
    WORKER,
    WORLD,
    IllegalTransition,
    WorkerChange,
    WorkerPhase,
    WorldChange,
    WorldPhase,
)
from spark_elastic.protocol.messages import Activity, CommitId, Member


@dataclass(slots=True)
class Worker:
    """What the driver knows of one training process."""

    worker: int
    host: int
    host_name: str
    place: Place
    # When its process was last known to run: by its own word, or, once it has connected, by its task's.
    heard: float
    phase: WorkerPhase = WorkerPhase.STARTING
    commit: CommitId | None = None
    activity: Activity = field(default_factory=Activity)
    beats: int = 0
    active_at: float = 0.0
    ready_at: float = 0.0
    # Since when it is waited for at its elastic function: since an abort, or its latest heartbeat() after one.
    awaited_since: float | None = None
    # Worlds in a row that did not form without it being known why, while it had not connected.
    form_failures: int = 0
    # Whether it has been in a world that formed, and whether it has made a commit there.
    has_connected: bool = False
    has_progressed: bool = False

    def enter(self, change: WorkerChange) -> None:
        """Go on to the phase that follows; raises ``IllegalTransition``. Nothing else sets ``phase``."""
        following = WORKER.get((self.phase, change))
        if following is None:
            raise IllegalTransition(f"worker {self.worker}", self.phase, change)
        self.phase = following


@dataclass(slots=True)
class World:
    """One generation: its members, and how far it has come."""

    generation: int
    members: tuple[Member, ...]
    since: float
    phase: WorldPhase = WorldPhase.FORMING
    acknowledged: set[int] = field(default_factory=set)
    # Who has answered the abort, and whether the device's group has been aborted after that.
    answered: set[int] = field(default_factory=set)
    # Of those, who can go back to their last commit.
    holding: set[int] = field(default_factory=set)
    device_aborted: bool = False
    raised: set[int] = field(default_factory=set)
    # Whether an explicit commit of this generation is known.
    progressed: bool = False
    was_formed: bool = False
    # Who is blamed for its not having formed, as long as nothing else explains that; and whether newcomers have broken it.
    blamed: set[int] = field(default_factory=set)
    newcomers_failed: bool = False
    broken_by: str = ""
    # Whether its end counts against reset_limit: not where newcomers alone have broken it.
    counts_as_reset: bool = False
    # The rank of each worker, in rank order.
    ranks: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {member.worker: member.rank for member in self.members}

    def enter(self, change: WorldChange) -> None:
        """Go on to the phase that follows; raises ``IllegalTransition``. Nothing else sets ``phase``."""
        following = WORLD.get((self.phase, change))
        if following is None:
            raise IllegalTransition(f"generation {self.generation}", self.phase, change)
        self.phase = following

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the members, in rank order."""
        return tuple(self.ranks)
