"""Repair: a rank that lacks the newest commit receives it from a rank that holds it, into staging memory.

The driver has told every rank which commits the others hold, so no rank has to ask. Receivers are spread over the holders; a
holder without receivers sends nothing. Where a single rank holds the state and all others lack it, that rank broadcasts it.

Tensors travel as flat buffers over Gloo. Everything else travels pickled, over Gloo as well, and is unpickled only after its
SHA-256 agrees with the one that came through the control store, whose connections are authenticated; Gloo's are not.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from spark_elastic.checkpoint.skeleton import pickled
from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker import faults
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair
from spark_elastic.worker.state.staging import fill, pieces_of
from spark_elastic.worker.world import World, translated_errors


class _Header(msgspec.Struct, frozen=True):
    """What a receiver has to know before the data arrives."""

    commit: CommitId | None
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Which rank sends to which. ``source`` maps each rank that lacks the commit to the holder that sends it."""

    newest: CommitId | None
    source: dict[int, int]
    is_broadcast: bool


def plan_repair(commits: list[CommitId | None]) -> RepairPlan:
    """Plan from the commits that the ranks hold, in rank order. If no rank holds any, rank 0's state becomes the first."""
    newest = max((commit for commit in commits if commit is not None), default=None)
    holders = [0] if newest is None else [rank for rank, commit in enumerate(commits) if commit == newest]
    lacking = [rank for rank in range(len(commits)) if rank not in holders]
    source = {rank: holders[place % len(holders)] for place, rank in enumerate(lacking)}
    return RepairPlan(newest, source, is_broadcast=len(holders) == 1 and len(lacking) > 1)


class Transport(Protocol):
    """Brings tensors on the CPU from one rank to others. Created for each repair, on all ranks that take part.

    ``send`` blocks until the tensor has left, ``receive`` until it has arrived. Both raise ``RuntimeError`` when a rank concerned
    is lost.
    """

    def send(self, tensor: torch.Tensor, receivers: Sequence[int]) -> None:
        """Send a tensor to these ranks, each of which receives it."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor, whose size is known, with the next one that ``source`` sends."""


class OverGloo:
    """Sends through the generation's process group: point to point, or as a broadcast if one rank serves all others."""

    def __init__(self, world: World, plan: RepairPlan) -> None:
        self._group = world.group
        self._rank = world.rank
        self._is_broadcast = plan.is_broadcast

    def send(self, tensor: torch.Tensor, receivers: Sequence[int]) -> None:
        """Send a tensor to these ranks."""
        if self._is_broadcast:
            self._group.broadcast(tensor, self._rank)
            return
        for work in [self._group.send(tensor, receiver) for receiver in receivers]:
            work.wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with what ``source`` sends."""
        if self._is_broadcast:
            self._group.broadcast(tensor, source)
        else:
            self._group.receive(tensor, source)


# By the backends of the worlds that use them; all others use ``OverGloo``.
TRANSPORTS: Mapping[str, Callable[[World, RepairPlan], Transport]] = {"gloo": OverGloo}


def _transport(world: World, plan: RepairPlan) -> Transport:
    return TRANSPORTS.get(world.backend, OverGloo)(world, plan)


def repair(world: World, snapshots: SnapshotPair) -> bool:
    """Carry out the plan for this world. Return whether this rank has received a state, into ``snapshots.current``.

    Blocks only on the ranks that this one exchanges data with. Raises ``WorkerLostError`` when one of them is lost;
    ``snapshots.current`` is then unchanged.
    """
    plan = plan_repair([member.commit for member in world.members])
    if not plan.source:
        return False
    faults.reached(Point.REPAIR, rank=world.rank, generation=world.generation)
    way = _transport(world, plan)
    receivers = [rank for rank, holder in plan.source.items() if holder == world.rank]
    with translated_errors(world):
        if world.rank in plan.source:
            _receive(world, plan, way, snapshots.spare)
            snapshots.switch()
            return True
        if receivers:
            _send(world, plan, way, snapshots.current, receivers)
    return False


def hand_out(world: World, source: int, copy: Snapshot, name: str) -> bool:
    """Bring rank ``source``'s ``copy`` to all other ranks, into theirs. Return whether this rank has received it.

    ``name`` distinguishes it from what else is sent in this world. All ranks call this, and it blocks until the copy has left or
    arrived. Raises ``WorkerLostError`` when a rank is lost.
    """
    others = [rank for rank in range(world.size) if rank != source]
    plan = RepairPlan(world.newest_commit, dict.fromkeys(others, source), is_broadcast=True)
    way = _transport(world, plan)
    with translated_errors(world):
        if world.rank == source:
            _send(world, plan, way, copy, others, name)
            return False
        _receive(world, plan, way, copy, name)
        return True


def announce(world: World, newest: CommitId | None, packed: bytes, name: str = "state") -> torch.Tensor:
    """Tell the other ranks, over the control store, what this rank is about to send. Return it as a tensor.

    ``name`` distinguishes the things that a rank sends in one world.
    """
    header = _Header(newest, len(packed), hashlib.sha256(packed).digest())
    world.store.set(f"{name}/{world.rank}", msgspec.msgpack.encode(header))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def receive_announced(
    world: World, newest: CommitId | None, source: int, receive: Callable[[torch.Tensor], None], name: str = "state"
) -> bytes:
    """Receive the data that a rank has announced, and verify it."""
    header = msgspec.msgpack.decode(world.store.get(f"{name}/{source}"), type=_Header)
    if header.commit != newest:
        raise WorkerLostError(f"rank {source} offers commit {header.commit}, expected {newest}")
    packed = torch.empty(header.length, dtype=torch.uint8)
    receive(packed)
    data = packed.numpy().tobytes()
    if hashlib.sha256(data).digest() != header.digest:
        raise WorkerLostError(f"what rank {source} sent is not what it announced")
    return data


def _send(
    world: World, plan: RepairPlan, way: Transport, snapshot: Snapshot, receivers: Sequence[int], name: str = "state"
) -> None:
    content = (snapshot.skeleton, snapshot.buffer.specs, snapshot.told)
    packed = announce(world, plan.newest, pickled(content, snapshot.skeleton, "sent to another worker"), name)
    for flat in (packed, *snapshot.buffer.flats):
        for piece in pieces_of(flat):
            way.send(piece, receivers)


def _receive(world: World, plan: RepairPlan, way: Transport, staging: Snapshot, name: str = "state") -> None:
    source = plan.source[world.rank]
    data = receive_announced(world, plan.newest, source, lambda tensor: way.receive(tensor, source), name)
    skeleton, specs, staging.told = pickle.loads(data)
    staging.buffer.fit(specs)
    for flat in staging.buffer.flats:
        fill(flat, lambda piece: way.receive(piece, source))
    staging.skeleton, staging.objects, staging.places, staging.put_back = skeleton, None, None, None
