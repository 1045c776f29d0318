"""Keeper: how this process keeps the last commit of a state, to restore it and to pass it on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

from spark_elastic.checkpoint.parts import Part
from spark_elastic.checkpoint.skeleton import Lender
from spark_elastic.protocol.messages import CommitId, Slices
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import Snapshot

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from spark_elastic.worker.world import World

# Describes to a newcomer how the structure of the State has changed since the job began. Called without arguments, it describes
# the live objects; called with the Places of a commit, the objects of that commit.
Tell = Callable[..., "bytes | None"]


class Content(TypedDict):
    """What a commit holds, and other ranks and durable checkpoints get."""

    # How many commits there have been.
    steps: int
    # The size of the world that made this one.
    size: int
    # The live objects that all ranks share, by name.
    objects: Mapping[str, object]
    # The places that hold other objects than when the job began, and those that hold the object of an earlier place, whose name
    # is beside them; see ``Places``. Missing if there are none: each entry makes commits a little slower.
    rebound: NotRequired[list[str]]
    same: NotRequired[Mapping[str, str]]
    # For durable checkpoints, a ``Stepper`` for each optimizer and scheduler, by their places, as JSON, which costs commits less.
    steppers: NotRequired[str]


class Keeper(ABC):
    """Keeps the last commit of one state. Used by the user's thread, except that a ``Lender`` ends its loan on another one.

    A commit takes two steps: ``take`` begins it, and ``settle`` makes it the one that counts. Until ``settle`` is called, the
    commit before remains in force. ``values`` are always the live objects that all ranks share, by name.
    """

    # The keeper's name in the table, which errors mention.
    name: str
    # The advice in errors about a lost commit.
    remedy = "there is no durable checkpoint (see checkpoint= of run, and commit= and redundancy= of TorchState)"
    # Whether each commit is awaited before the next step, because there is no earlier commit to go back to.
    is_waited_for = False
    # Whether ranks hold a commit only together. Then no rank begins a commit before all ranks hold the last one.
    is_joint = False
    # Whether the keeper hooks into the steps of torch's optimizers.
    watches_optimizers = False

    @abstractmethod
    def prepare(self, values: Mapping[str, object]) -> None:
        """Allocate room for commits of these values, while no other worker waits for this one."""

    def begin(self, values: Mapping[str, object]) -> None:
        """Get ready for a generation: the user's function is about to be entered with these values."""

    @abstractmethod
    def take(self, content: Content, places: Places, own: object) -> bool:
        """Copy the content, and keep ``own``, this rank's own part. A GPU may still be copying when this returns.

        An abort of the world can spoil what a GPU copies behind reductions, even if this method waits for it. ``pending`` is
        asked for afterwards, and a commit whose copy ended after the abort does not count.

        Returns whether the structure of the objects, or the shape of a tensor, differs from that of the commits before. An
        exception leaves the last commit untouched.
        """

    @property
    @abstractmethod
    def pending(self) -> PendingCopy | None:
        """The copy of the last ``take``, as long as aborting the world may spoil it; None if nothing can."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for the copy of the last ``take``, if there is one, and make it the commit that is held."""

    @property
    def has_stepped(self) -> bool:
        """Whether weights have been stepped since the last commit, of which there is no copy: only a commit can follow."""
        return False

    @property
    def can_restore(self) -> bool:
        """Whether the whole of the last commit can still be restored here. May be asked from any thread."""
        return True

    def can_go_back(self) -> bool:
        """Whether the last commit can still be restored here. Asked by the user's thread, so that a device may be waited for."""
        return self.can_restore

    def why_lost(self) -> str:
        """Say why a job in which nobody holds a commit cannot start from the live values; empty if it can."""
        return ""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing has been committed yet."""

    @property
    @abstractmethod
    def current(self) -> Snapshot:
        """The last commit, as far as it was copied. A restore loads this."""

    @abstractmethod
    def lend(self, values: Mapping[str, object]) -> Lender:
        """Return the lender from which a durable checkpoint is written; ``values`` are still those of the last commit."""

    def keep_live(self) -> None:
        """Note that the live values are those of the commit just taken, and that no code changes them."""

    def release_live(self) -> None:
        """Note that the user's function runs, so that live values may belong to no commit."""

    def to_restore(self) -> Snapshot | None:
        """Return the commit that a restore loads here and now; None if there is none, or the next sync brings it."""
        return None if self.is_empty else self.current

    def loaded(self, values: Mapping[str, object]) -> None:
        """Note that ``values`` are now those of ``current``: a restore or a sync has just loaded them."""

    def committed(self, commit: CommitId) -> None:
        """Note the name of the commit that ``settle`` has just completed."""

    @property
    def slices(self) -> tuple[Slices, ...] | None:
        """The slices that this rank holds of its commits; None where it holds the last one whole."""
        return None

    @abstractmethod
    def catch_up(self, world: World, values: Mapping[str, object], tell: Tell) -> Snapshot | None:
        """Bring the newest commit to the ranks of a world that lack it. Return what this rank has received and has to load.

        ``values`` are those of the newest commit on ranks that hold it; ``tell`` describes to a newcomer how their structure has
        changed. Blocks only on the ranks that this one exchanges data with. Raises ``WorkerLostError``; what was held still is.
        """

    def divide(self, world: World, values: Mapping[str, object]) -> None:
        """Divide divided objects again, among the ranks of this world. Called once ``values`` are those of the newest commit.

        Blocks only on the ranks that this one exchanges data with. Raises ``WorkerLostError``; what was held still is.
        """

    @property
    def is_in_parts(self) -> bool:
        """Whether all ranks write a durable checkpoint of the last commit together, each a part of it. The same on all ranks."""
        return False

    def part(self, world: World, values: Mapping[str, object]) -> Part:
        """Copy this rank's part of the last commit for a checkpoint in parts. ``values`` are still those of the commit."""
        raise NotImplementedError

    def holds(self, received: Snapshot) -> bool:
        """Whether this rank already keeps its part of a received commit. If not, the commit is taken again once it is loaded."""
        return not self.is_empty and received is self.current
