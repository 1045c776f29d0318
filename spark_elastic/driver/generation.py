"""Generation: what the driver knows of a world that it has formed."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.driver.phases import WORLD, IllegalTransition, WorldChange, WorldPhase
from spark_elastic.protocol.messages import Member


@dataclass(slots=True)
class Generation:
    """One generation of the world: its members, and how far it has come."""

    generation: int
    members: tuple[Member, ...]
    since: float
    phase: WorldPhase = WorldPhase.FORMING
    acknowledged: set[int] = field(default_factory=set)
    # The workers that have answered the abort, and among them those that can go back to their last commit.
    answered: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)
    # The workers that are called back once it is ``abort_at``: until then, ranks that are about to raise may do so.
    to_abort: list[int] = field(default_factory=list)
    abort_at: float = 0.0
    # Whether the device's group has been aborted, which comes after all answers.
    device_aborted: bool = False
    raised: set[int] = field(default_factory=set)
    # The workers of which a commit that user code made in this generation is known, and whether all ranks have made one.
    committed: set[int] = field(default_factory=set)
    progressed: bool = False
    was_formed: bool = False
    # The workers that are blamed for keeping the world from forming, as long as nothing else explains it.
    blamed: set[int] = field(default_factory=set)
    # The workers that have been recorded as too slow.
    recorded_slow: set[int] = field(default_factory=set)
    # Whether a newcomer has broken the world.
    newcomers_failed: bool = False
    broken_by: str = ""
    # The last loss that is known to have broken the world.
    broken_by_loss: str = ""
    # When a rank's report that the world cannot continue counts without a loss that explains it.
    explained_by: float = 0.0
    # Whether the end of the world counts against reset_limit: it does unless only newcomers have broken the world.
    counts_as_reset: bool = False
    # The rank of each worker, in rank order.
    ranks: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {member.worker: member.rank for member in self.members}

    def enter(self, change: WorldChange) -> None:
        """Move on to the phase that follows a change. Raises ``IllegalTransition``. Nothing else sets ``phase``."""
        following = WORLD.get((self.phase, change))
        if following is None:
            raise IllegalTransition(f"generation {self.generation}", self.phase, change)
        self.phase = following

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the members, in rank order."""
        return tuple(self.ranks)
