"""Commits as copies: the whole state is copied into one of two buffers, on its device or in the host's memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from spark_elastic.checkpoint.skeleton import Lender, StateDict
from spark_elastic.worker.state.keepers.keeper import Content, Keeper, Tell
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.repair import plan_repair, repair
from spark_elastic.worker.state.snapshot import KeptPart, Snapshot, SnapshotPair, Stateful, as_state_dict
from spark_elastic.worker.state.structure import note_structure
from spark_elastic.worker.state.templates import Make, Templates, template_of

if TYPE_CHECKING:
    from spark_elastic.worker.world import World


class OnDevice(Keeper):
    """Keeps a copy of each tensor on the tensor's own device."""

    name = "copy"
    is_on_host = False
    template_of: Make = staticmethod(template_of)

    def __init__(self) -> None:
        self.snapshots = SnapshotPair(on_host=self.is_on_host)
        self._templates = Templates(self.template_of)
        # Whether the spare snapshot holds the last commit and has yet to become the current one.
        self._is_taken = False

    def prepare(self, values: Mapping[str, object]) -> None:
        self.snapshots.make_room(values, self.part_of)

    def take(self, content: Content, places: Places, own: object) -> bool:
        self._is_taken = False
        snapshot = self.snapshots.spare
        specs, before = snapshot.buffer.specs, snapshot.outline
        snapshot.take(content, own, self.part_of, self._templates)
        snapshot.places = places
        note_structure(snapshot, self._templates.version)
        self._is_taken = True
        return snapshot.buffer.specs is not specs or snapshot.outline != before

    @property
    def pending(self) -> PendingCopy | None:
        return self.snapshots.spare.pending

    def settle(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self.snapshots.switch()

    @property
    def is_empty(self) -> bool:
        return self.snapshots.is_empty

    @property
    def current(self) -> Snapshot:
        return self.snapshots.current

    def lend(self, values: Mapping[str, object]) -> Lender:
        return self.snapshots

    def for_repair(self, values: Mapping[str, object], is_sender: bool) -> SnapshotPair:
        """Return the copy that a sender sends (``current``), or the room into which this rank receives one (``spare``)."""
        return self.snapshots

    def catch_up(self, world: World, values: Mapping[str, object], tell: Tell) -> Snapshot | None:
        return send_whole(world, partial(self.for_repair, values), tell, None if self.is_empty else self.current.own)

    def part_of(self, value: Stateful) -> StateDict | KeptPart:
        """Return the part of an object with a state dict that a commit copies, wherever in the state the object is."""
        return as_state_dict(value)


class OnHost(OnDevice):
    """Keeps copies in the host's memory, pinned if CUDA is in use, for states that leave a GPU too little room."""

    name = "host"
    is_on_host = True


def send_whole(world: World, for_repair: Callable[[bool], SnapshotPair], tell: Tell, own: object) -> Snapshot | None:
    """Bring whole copies of the newest commit to the ranks that lack it. Return the copy that arrived here, with ``own``.

    ``for_repair(True)`` returns the copies to send, ``for_repair(False)`` the room to receive into. A rank's own part is never
    sent.
    """
    is_sender = world.rank in plan_repair([member.commit for member in world.members]).source.values()
    copies = for_repair(is_sender)
    if is_sender:
        copies.current.told = tell()
    if not repair(world, copies):
        return None
    copies.current.own = own
    return copies.current


class Current(Protocol):
    """An object that holds the last commit."""

    @property
    def current(self) -> Snapshot:
        """The kept part of the last commit."""
        ...


class WholeCopies:
    """Lends a copy of the whole state, made on request: the training thread pays one memcpy for a durable checkpoint."""

    def __init__(self, small: Current, copy: Callable[[], Snapshot]) -> None:
        self._small = small
        self._copy = copy

    @property
    def current(self) -> Snapshot:
        return self._small.current

    def lend(self) -> Snapshot:
        whole = self._copy()
        whole.wait()
        return whole

    def take_back(self) -> None:
        """Do nothing: the copy is freed with its last reference."""


class PartlyCopied(OnDevice):
    """Base of keepers whose commits leave something out, or hold it in a form of their own.

    Other ranks and durable checkpoints get a copy of the whole state, which is made on request. A subclass implements
    ``copy_whole``, and ``part_of``, which decides what a commit keeps of an object.
    """

    @abstractmethod
    def copy_whole(self, values: Mapping[str, object]) -> Snapshot:
        """Copy the whole state as of the last commit; ``values`` are the live objects, still those of that commit."""

    def lend(self, values: Mapping[str, object]) -> Lender:
        return WholeCopies(self.snapshots, partial(self.copy_whole, values))

    def for_repair(self, values: Mapping[str, object], is_sender: bool) -> SnapshotPair:
        """Copy everything for the ranks that lack it. A receiver gets temporary room, which is freed once it has loaded."""
        return SnapshotPair(self.copy_whole(values)) if is_sender else SnapshotPair()
