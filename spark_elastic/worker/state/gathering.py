"""Gathering: ranks that lack a sliced commit take its slices from the ranks that hold them, all at the same time.

The driver has told every rank who holds which slices, so the plan is a pure function of the members. A rank that holds nothing
of the commit also receives the unsliced part (skeleton and small tensors) from one that does; ``repair`` explains how that is
verified.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from spark_elastic.checkpoint.skeleton import TensorSpec, pickled
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import CommitId, Member
from spark_elastic.worker import faults
from spark_elastic.worker.state.repair import announce, receive_announced
from spark_elastic.worker.state.slices import places_of
from spark_elastic.worker.state.snapshot import TensorBuffer
from spark_elastic.worker.world import World, translated_errors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Which rank sends what to which other rank. The commit is cut into ``of`` slices."""

    of: int
    # By receiver and slice, the sender of the slice.
    sources: dict[tuple[int, int], int]
    # For each rank that holds nothing of the commit, the sender of the unsliced part.
    donors: dict[int, int]


def plan_gather(members: Sequence[Member], newest: CommitId) -> GatherPlan:
    """Plan from what the members hold, in rank order. The senders of each slice take turns."""
    holders = {member.rank: member.slices for member in members if member.commit == newest}
    whole = {rank for rank, slices in holders.items() if slices is None or slices.is_whole or slices.is_live}
    of = max((slices.of for rank, slices in holders.items() if slices and rank not in whole), default=len(whole))
    sources, newcomers = {}, []
    for rank in range(len(members)):
        if rank in whole:
            continue
        slices = holders.get(rank)
        if slices is None:
            newcomers.append(rank)
        for number in range(of):
            if slices is None or number not in slices.held:
                senders = [
                    holder for holder, kept in holders.items() if holder in whole or (kept and number in kept.held)
                ]
                sources[rank, number] = senders[(rank + number) % len(senders)]
    givers = sorted(holders)
    return GatherPlan(of, sources, {rank: givers[place % len(givers)] for place, rank in enumerate(newcomers)})


@dataclass(slots=True)
class Unsliced:
    """The part that travels beside the slices: the skeleton of a commit and its small tensors."""

    skeleton: object
    # Which tensors of the skeleton are sliced, and their specs.
    sliced: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    small: TensorBuffer
    told: bytes | None = None


def gather(
    world: World,
    plan: GatherPlan,
    mine: Unsliced | None,
    slice_here: Callable[[int], list[torch.Tensor]],
) -> tuple[Unsliced, TensorBuffer] | None:
    """Carry out the plan. Return the unsliced part and all sliced tensors; None on a rank that lacks nothing.

    ``mine`` is this rank's unsliced part, None if it holds nothing of the commit; ``slice_here`` returns a slice that it holds.
    Blocks only on the ranks involved. Raises ``WorkerLostError`` when one of them is lost.
    """
    if not plan.sources:
        return None
    faults.reached(Point.REPAIR, rank=world.rank, generation=world.generation)
    lacks = any(receiver == world.rank for receiver, _ in plan.sources)
    going = _going(world, plan, mine, slice_here)
    return exchange(world, going, lambda: _receive(world, plan, mine, slice_here) if lacks else None)


def exchange(world: World, going: Iterable[tuple[torch.Tensor, int]], receive: Callable[[], T]) -> T:
    """Begin to send each tensor to its receiver, call ``receive``, and return its result once everything is sent.

    Raises ``WorkerLostError`` when one of the other ranks is lost.
    """
    with translated_errors(world):
        # A tensor has to live until its work is done.
        sending = [(world.group.send(tensor, receiver), tensor) for tensor, receiver in going if tensor.numel()]
        received = receive()
        for work, _ in sending:
            work.wait()
    return received


def _going(
    world: World, plan: GatherPlan, mine: Unsliced | None, slice_here: Callable[[int], list[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, int]]:
    """All that others take from this rank, each tensor with its receiver."""
    receivers = [rank for rank, donor in plan.donors.items() if donor == world.rank]
    if receivers:
        assert mine is not None
        content = (mine.skeleton, mine.sliced, mine.specs, mine.small.specs, mine.told)
        packed = announce(world, world.newest_commit, pickled(content, mine.skeleton, "sent to another worker"))
        flats = [flat.cpu() for flat in mine.small.flats]
        for receiver in receivers:
            for tensor in (packed, *flats):
                yield tensor, receiver
    wanted: dict[int, list[int]] = {}
    for (receiver, number), source in plan.sources.items():
        if source == world.rank:
            wanted.setdefault(number, []).append(receiver)
    for number in sorted(wanted):
        flats = [flat.cpu() for flat in slice_here(number)]
        for receiver in wanted[number]:
            for tensor in flats:
                yield tensor, receiver


def _receive(
    world: World, plan: GatherPlan, mine: Unsliced | None, slice_here: Callable[[int], list[torch.Tensor]]
) -> tuple[Unsliced, TensorBuffer]:
    donor = plan.donors.get(world.rank)
    if donor is not None:
        small = TensorBuffer()
        skeleton, sliced, specs, small_specs, told = pickle.loads(
            receive_announced(world, world.newest_commit, donor, lambda tensor: world.group.receive(tensor, donor))
        )
        small.fit(small_specs)
        for flat in small.flats:
            receive_all(world, [(flat, donor)])
        mine = Unsliced(skeleton, sliced, specs, small, told)
    assert mine is not None
    room = TensorBuffer()
    room.fit(mine.specs)
    coming = []
    for number in range(plan.of):
        places = places_of(room, number, plan.of)
        source = plan.sources.get((world.rank, number))
        if source is None:
            for place, flat in zip(places, slice_here(number), strict=True):
                place.copy_(flat)
        else:
            coming += [(place, source) for place in places]
    receive_all(world, coming)
    return mine, room


def receive_all(world: World, coming: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Receive these tensors, each from its source, concurrently."""
    staged = [
        (place, place if place.device.type == "cpu" else torch.empty_like(place, device="cpu"), source)
        for place, source in coming
        if place.numel()
    ]
    for work in [world.group.begin_receive(tensor, source) for _, tensor, source in staged]:
        work.wait()
    for place, tensor, _ in staged:
        if tensor is not place:
            place.copy_(tensor)
