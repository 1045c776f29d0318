"""Commits of a model that is divided among ranks: each rank keeps its own shards, and those of its neighbours in the ring.

At a commit each rank sends its shards to ``redundancy`` neighbours, and then all ranks meet. Only then does a rank overwrite
its copy of the previous commit: until all ranks hold the new commit, no rank has given up the old one. A rank that fails before
they have met keeps both, its live tensors serving as its copy of the new one, and the driver decides to which of the two all go
back.

Once the world has changed, the rows of each new shard travel point to point from ranks that hold them, straight to where they
belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from spark_elastic.checkpoint.skeleton import Lender
from spark_elastic.errors import SparkElasticError, WorkerLostError
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import CommitId, Slices
from spark_elastic.worker import faults
from spark_elastic.worker.checks.fingerprint import sums_of_bits
from spark_elastic.worker.job import present_world
from spark_elastic.worker.state.fully_sharded.model import Divided, ShardedModel
from spark_elastic.worker.state.fully_sharded.rows import choose_giver, choose_kept, pieces
from spark_elastic.worker.state.gathering import exchange, receive_all
from spark_elastic.worker.state.keepers.copies import send_whole
from spark_elastic.worker.state.keepers.keeper import Content, Keeper
from spark_elastic.worker.state.keepers.sharded import place_in_ring
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import Found, Snapshot, SnapshotPair, flatten
from spark_elastic.worker.state.structure import note_structure
from spark_elastic.worker.world import World

# Of one shard, the tensors in the order of the commit's ``divided``.
Shard = list[torch.Tensor]


@dataclass(slots=True)
class ShardedCommit:
    """This rank's part of one commit. ``commit`` is None before a job's first generation."""

    # Everything that is not divided.
    small: Snapshot
    commit: CommitId | None = None
    divided: Sequence[Divided] = ()
    # The shards of these ranks of the world that made the commit, and how many ranks that had.
    held: dict[int, Shard] = field(default_factory=dict)
    of: int = 0


class FullySharded(Keeper):
    """Keeps this rank's shards and those of its neighbours. ``redundancy`` neighbours in the ring may be lost at once."""

    name = "fully sharded"
    remedy = (
        "a ShardedState has no checkpoint= (see redundancy=); run the job again, which goes on from what the function has last "
        "written by torch.distributed.checkpoint, as docs/howto/fully-sharded.md shows"
    )
    is_joint = True

    def __init__(self, make: Callable[[World], ShardedModel], redundancy: int = 1) -> None:
        self._make, self._redundancy = make, redundancy
        # The model of this generation; None as soon as that has ended.
        self.model: ShardedModel | None = None
        self._current: ShardedCommit | None = None
        # The previous commit, until it is certain that all ranks hold the current one.
        self._older: ShardedCommit | None = None
        # The live tensors that serve as a copy of the current commit because not all have met, with the sums of their bits.
        # Their version counters tell nothing: operations on DTensors do not count.
        self._unmet: tuple[Shard, list[int]] = [], []
        # The undivided part of the commit with which the generation begins.
        self._small: Snapshot | None = None
        self._is_sealed = False

    # ------------------------------------------------------------------ commits

    def prepare(self, values: Mapping[str, object]) -> None:
        flatten(values, Found())

    def take(self, content: Content, places: Places, own: object) -> bool:
        world, model = present_world(), self.model
        if world is None or model is None:
            small = _snapshot(content, places, own)
            self._current = ShardedCommit(small)
            return True
        mine = model.divided()
        divided, live = list(mine), list(mine.values())
        small = _snapshot({**content, "model": model.small(), "divided": divided}, places, own)
        before, commit = self._current, self._next(world)
        received = self._swap(world, divided, live)
        self._older = before
        self._current = ShardedCommit(small, commit, divided, {world.rank: live, **received}, world.size)
        try:
            world.meet()
        except WorkerLostError:
            self._unmet = live, sums_of_bits(live)
            raise
        # All ranks hold the commit, so nobody goes back further, and the room of the previous one is free.
        self._older = None
        has_changed = before is None or _shape_of(before.small) != _shape_of(small)
        room = [] if before is None else before.held.get(world.rank, [])
        del before
        self._current.held[world.rank] = _copied(live, room)
        return has_changed

    @property
    def pending(self) -> PendingCopy | None:
        return None

    def settle(self) -> None:
        """Do nothing: a commit has been completed when ``take`` returns."""

    def committed(self, commit: CommitId) -> None:
        assert self._current is not None, "it has just been taken"
        assert self._current.commit == commit, f"{self._current.commit} was taken, and {commit} counted"

    @property
    def is_empty(self) -> bool:
        return self._current is None

    @property
    def current(self) -> Snapshot:
        assert self._current is not None, "nothing has been saved yet"
        return self._current.small

    def lend(self, values: Mapping[str, object]) -> Lender:
        raise SparkElasticError("a ShardedState cannot be written to a durable checkpoint")

    @property
    def slices(self) -> tuple[Slices, ...]:
        return tuple(
            Slices(kept.commit, tuple(sorted(kept.held)), kept.of)
            for kept in (self._current, self._older)
            if kept is not None and kept.commit is not None
        )

    # ------------------------------------------------------------------ going back

    def release_live(self) -> None:
        self._is_sealed = True

    def why_lost(self) -> str:
        return "shards of the newest commit were lost with all ranks that held them" if self._is_sealed else ""

    def to_restore(self) -> Snapshot | None:
        """Return None: the next generation makes the model again, and its sync fills it."""
        live, bits = self._unmet
        if sums_of_bits(live) != bits:
            self._current, self._older = self._older, None  # code continued after a failed commit
        self._unmet = [], []
        return None

    def catch_up(self, world: World, values: Mapping[str, object], tell: Callable[[], bytes | None]) -> Snapshot | None:
        newest = world.newest_commit
        own = None if self._current is None else self._current.small.own
        if newest is not None:
            held = (kept for kept in (self._current, self._older) if kept is not None and kept.commit == newest)
            self._current = next(held, None)
        self._older = None
        kept = None if self._current is None else self._current.small

        def for_repair(is_sender: bool) -> SnapshotPair:
            return SnapshotPair(replace(kept) if kept is not None and is_sender else None)

        arrived = send_whole(world, for_repair, tell, own)
        self._small = kept if arrived is None else arrived
        return None if newest is None and arrived is None else self._small

    def divide(self, world: World, values: Mapping[str, object]) -> None:
        self.model = self._make(world)
        if world.newest_commit is None:
            return
        assert self._small is not None, "a rank has the commit that the generation begins with by now"
        content = self._small.view()
        self.model.prepare(content["model"], content["divided"])
        self._reshard(world, content["divided"], list(self.model.divided().values()))

    def holds(self, received: Snapshot) -> bool:
        """Return True: a rank keeps what it held, and takes its shards when the generation is sealed."""
        return True

    # ------------------------------------------------------------------ inside

    def _next(self, world: World) -> CommitId:
        """Return the name of the commit that is being made."""
        last = None if self._current is None else self._current.commit
        is_first = last is None or last.generation != world.generation
        return CommitId(world.generation, 0 if is_first or last is None else last.index + 1)

    def _swap(self, world: World, divided: Sequence[Divided], mine: Shard) -> dict[int, Shard]:
        """Send this rank's shards to the ranks that keep copies; return those that this rank keeps for others."""
        ring = sorted(range(world.size), key=lambda rank: place_in_ring(world.members, rank))
        kept = choose_kept(ring, self._redundancy)
        rooms = {
            rank: [part.room(rank, world.size) for part in divided] for rank in kept[world.rank] if rank != world.rank
        }
        going = ((tensor, rank) for rank in kept if rank != world.rank and world.rank in kept[rank] for tensor in mine)
        coming = [(room, rank) for rank, shard in rooms.items() for room in shard]
        exchange(world, going, lambda: receive_all(world, coming))
        return rooms

    def _reshard(self, world: World, divided: Sequence[Divided], mine: Shard) -> None:
        """Fill this rank's new shards with the rows of the newest commit, and send others the rows that they take from here."""
        faults.reached(Point.REPAIR, rank=world.rank, generation=world.generation)
        members = [member for member in world.members if member.slices and member.commit == world.newest_commit]
        holders = {member.rank: member.slices.held for member in members if member.slices}
        of = next(member.slices.of for member in members if member.slices)
        held = {} if self._current is None else self._current.held

        def going() -> Iterator[tuple[torch.Tensor, int]]:
            for rank in range(world.size):
                for number, part in enumerate(divided):
                    for piece in pieces(part.shape[0], rank, world.size, of):
                        if rank != world.rank and choose_giver(holders, piece.old, rank) == world.rank:
                            yield held[piece.old][number][piece.start : piece.end], rank

        coming = []
        with torch.no_grad():
            for number, part in enumerate(divided):
                for piece in pieces(part.shape[0], world.rank, world.size, of):
                    place = mine[number][piece.place : piece.place + piece.end - piece.start]
                    giver = choose_giver(holders, piece.old, world.rank)
                    if giver == world.rank:
                        place.copy_(held[piece.old][number][piece.start : piece.end])
                    else:
                        coming.append((place, giver))
            exchange(world, going(), lambda: receive_all(world, coming))


def _snapshot(content: Mapping[str, object], places: Places, own: object) -> Snapshot:
    small = Snapshot()
    small.take(content, own)
    small.places = places
    note_structure(small, version=0)
    return small


def _shape_of(small: Snapshot) -> tuple[object, ...]:
    return small.outline, small.buffer.specs


def _copied(live: Shard, room: Shard) -> Shard:
    """Copy this rank's own shards into their room in the last commit, or into new room if the shards have changed."""
    if [(t.shape, t.dtype) for t in room] != [(t.shape, t.dtype) for t in live]:
        room.clear()
        room = [torch.empty_like(tensor) for tensor in live]
    with torch.no_grad():
        for kept, tensor in zip(room, live, strict=True):
            kept.copy_(tensor)
    return room
