"""Keeper: how this process keeps the last commit of a state, so that it can go back to it and hand it on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from spark_elastic.checkpoint.skeleton import Lender
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair


class Keeper(ABC):
    """Keeps the last commit of one state. Used by the user's thread; only a ``Lender`` is given back on another one.

    A commit goes through two steps: ``take`` begins it, and ``settle`` makes it the one that counts. Until then, and if it is
    never called, the commit before stays as it is. ``values`` are everywhere the live objects that all ranks share, by name;
    ``steps`` and ``size`` are what a commit says of itself: how many there have been, and the size of the world that made it.
    """

    # What its commits are called in errors: its name in the table.
    name: str
    # Whether a commit is waited for before the next step, because there is no other one to go back to.
    is_waited_for = False
    # Whether it has to see the steps of torch's optimizers.
    watches_optimizers = False

    @abstractmethod
    def prepare(self, values: Mapping[str, object]) -> None:
        """Make room for commits of these values, while nobody waits for this worker."""

    def begin(self, values: Mapping[str, object]) -> None:
        """The user's function is about to be entered with these values."""

    @abstractmethod
    def take(self, steps: int, size: int, values: Mapping[str, object], own: object) -> bool:
        """Copy the present values, and keep ``own``, which is this rank's alone; a GPU may be at the copy when this returns.

        Returns whether the objects are made of other parts, or have other tensors, than those of the commits before. An
        exception leaves the last commit as it was.
        """

    @property
    @abstractmethod
    def pending(self) -> PendingCopy | None:
        """The copy of the last ``take``, as long as the abort of a world may spoil it; None where nothing can."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for the copy of the last ``take``, if there is one, and make that the commit that is held."""

    @property
    def can_restore(self) -> bool:
        """Whether all that the last commit holds can still be restored here. Asked from any thread."""
        return True

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing has been committed yet."""

    @property
    @abstractmethod
    def current(self) -> Snapshot:
        """The last commit, as far as it was copied: what a restore loads."""

    @abstractmethod
    def lend(self, values: Mapping[str, object]) -> Lender:
        """Return what a durable checkpoint of the last commit is made from; ``values`` are still those of the commit."""

    @abstractmethod
    def for_repair(self, values: Mapping[str, object], is_sender: bool) -> SnapshotPair:
        """Return what others get the last commit from (``current``), or the room in which this rank receives it (``spare``)."""

    @abstractmethod
    def holds(self, received: SnapshotPair) -> bool:
        """Whether a commit that has arrived in this room is the last one from now on; else it is taken when it is loaded."""
