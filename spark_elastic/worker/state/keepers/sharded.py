"""Commits in slices: each rank copies a few slices of weights and optimizer state out of its own memory, and none all of them.

Replicas are equal after each step, so of N ranks each copies its own slice and the next one, in a ring that alternates between
hosts, and any one rank may be lost. Nothing is sent at a commit. Going back means gathering: each rank takes the slices that it
lacks from ranks that hold them. After a planned interrupt no rank has gone back, so none gathers.

No rank can go back alone, so a commit counts only if all of its slices exist. Each rank keeps its slices of the last two
commits, and begins the next commit, which overwrites the older of the two, only when all ranks have made the last one. So the
survivors of a loss always hold slices of a common commit; the driver knows who holds what, and decides which commit that is.

What differs between ranks (buffers of modules) or is small (counters, learning rates, positions) is copied whole by each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from spark_elastic.checkpoint.parts import Part
from spark_elastic.checkpoint.skeleton import Lender, PartOfDict, StateDict, TensorSpec, map_tree
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.messages import CommitId, Member, Slices
from spark_elastic.worker.checks.fingerprint import sums_of_bits
from spark_elastic.worker.job import present_world
from spark_elastic.worker.optimizers.zero import Division, ZeroRedundancyOptimizer, deal, divides, find_divisible
from spark_elastic.worker.state.gathering import Unsliced, gather, plan_gather
from spark_elastic.worker.state.inference import versions_of
from spark_elastic.worker.state.keepers.copies import WholeCopies, send_whole
from spark_elastic.worker.state.keepers.in_place import SmallOptimizer, SmallPart, small_part
from spark_elastic.worker.state.keepers.keeper import Content, Keeper, Tell
from spark_elastic.worker.state.optimizer_moves import KeptParts, move, numbers_by_rank, plan_moves
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.slices import SliceBuffer, choose_slices, slice_of
from spark_elastic.worker.state.snapshot import (
    Found,
    KeptPart,
    Snapshot,
    SnapshotPair,
    Stateful,
    TensorBuffer,
    as_state_dict,
    cloned,
    flatten,
)
from spark_elastic.worker.state.structure import note_structure
from spark_elastic.worker.state.templates import Template, Templates, template_of
from spark_elastic.worker.world import World


@dataclass(slots=True)
class SlicedSnapshot(Snapshot):
    """One commit: ``buffer`` has the tensors that are kept whole, ``slices`` this rank's slices of all others."""

    slices: SliceBuffer = field(default_factory=SliceBuffer)
    # Which tensors of the skeleton are sliced, in order.
    sliced: tuple[int, ...] = ()
    # None until the commit is complete on this rank.
    commit: CommitId | None = None
    # This rank's parts of the state of divided optimizers, and whether any optimizer was divided.
    parts: KeptParts = field(default_factory=KeptParts)
    is_divided: bool = False

    def with_tensors(self, sliced: Sequence[torch.Tensor]) -> Snapshot:
        """Return the whole commit, given its sliced tensors. They are not copied."""
        return whole_of(self, Unsliced(self.skeleton, self.sliced, self.slices.specs, self.buffer), sliced)


class Sharded(Keeper):
    """Keeps slices of parameters and of their optimizer state, and copies of everything else.

    ``redundancy`` is how many neighbours in the ring may be lost at once.
    """

    name = "sharded"
    is_joint = True
    # Whether copies are in the host's memory.
    is_on_host = False

    def __init__(self, redundancy: int = 1) -> None:
        self._redundancy = redundancy
        self._templates = Templates(_template_of)
        self._current, self._spare = (
            SlicedSnapshot(TensorBuffer(self.is_on_host), parts=KeptParts(TensorBuffer(self.is_on_host)))
            for _ in range(2)
        )
        self._is_empty = True
        self._is_taken = False
        # Which tensors of a commit are sliced, and the version of the templates for which this was determined.
        self._sliced: tuple[int, ...] = ()
        self._version: int | None = None
        # The live tensors that had the values of the current commit when it was made or loaded, and their versions then; None
        # if the commit loaded last is another one.
        self._live: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        # Whether the next load is of the current commit.
        self._loads_current = False
        # The sums of these tensors' bits when the generation was sealed or ended as planned, or when they were loaded; None if
        # the user's function has run since, which may have been anywhere in a step when a worker was lost.
        self._bits: list[int] | None = None
        # Whether the live values are those of the current commit, so that this rank can serve as a holder of the whole commit.
        self._live_is_current = False
        # The optimizers' whole state when the job began, uncopied, until a generation has been sealed.
        self._unsealed: list[dict[int, dict[str, object]]] | None = None
        # How optimizers are divided in this generation.
        self._division: Division | None = None

    # ------------------------------------------------------------------ commits

    def prepare(self, values: Mapping[str, object]) -> None:
        """Check that the values can be copied. The room that commits need depends on the size of the world."""
        flatten(values, Found(), _part_of)

    def begin(self, values: Mapping[str, object]) -> None:
        """Without a commit, give optimizers back the state from before they were divided; else drop their parts."""
        self._division = None
        world = present_world()
        if world is None or world.newest_commit is not None:
            return
        for place, optimizer in enumerate(find_divisible(values)):
            if optimizer.division is not None:
                optimizer.divide(None, {} if self._unsealed is None else self._unsealed[place])

    def take(self, content: Content, places: Places, own: object) -> bool:
        self._is_taken = False
        snapshot = self._spare
        snapshot.commit = None
        skeleton, tensors = self._find(content)
        sliced = [tensors.tensors[number] for number in self._sliced]
        is_sliced = set(self._sliced)
        rest = [number for number in range(len(tensors.tensors)) if number not in is_sliced]
        constants = set(tensors.constants)
        before = snapshot.buffer.specs, snapshot.slices.specs, snapshot.outline
        specs = tuple(TensorSpec(t.dtype, str(t.device), tuple(t.shape)) for t in sliced)
        divisible = find_divisible(content["objects"])
        for optimizer in divisible:
            if optimizer.division is None and self._division is not None:
                # The optimizer is new since the last commit, and each rank has had its whole state.
                optimizer.divide(self._division)
        snapshot.is_divided = any(optimizer.division is not None for optimizer in divisible)
        # The copies below follow those of the parts on the stream, and are waited for.
        snapshot.parts.take({n: o.held_state() for n, o in enumerate(divisible) if o.division is not None})
        snapshot.slices.fit(specs, *_slices_here(self._redundancy))
        snapshot.slices.copy_from(sliced)
        snapshot.pending = snapshot.buffer.copy_from(
            [tensors.tensors[number] for number in rest],
            [place for place, number in enumerate(rest) if number in constants],
        )
        snapshot.skeleton, snapshot.objects, snapshot.own = skeleton, tensors.objects, own
        snapshot.places = places
        snapshot.sliced = self._sliced
        note_structure(snapshot, self._templates.version)
        self._note_live(sliced)
        self._live_is_current = False
        self._is_taken = True
        return before != (snapshot.buffer.specs, specs, snapshot.outline)

    @property
    def pending(self) -> PendingCopy | None:
        return self._spare.pending

    def settle(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._spare.wait()
            self._switch()
            self._is_empty = False

    def committed(self, commit: CommitId) -> None:
        self._current.commit = commit

    @property
    def is_empty(self) -> bool:
        return self._is_empty

    @property
    def current(self) -> SlicedSnapshot:
        assert not self._is_empty, "nothing has been saved yet"
        return self._current

    @property
    def slices(self) -> tuple[Slices, ...]:
        """The slices that this rank holds: all of the last commit if its live values are that commit, else its own."""
        found = []
        for snapshot in (self._current, self._spare):
            if snapshot.commit is not None:
                kept, is_live = snapshot.slices, snapshot is self._current and self._live_is_current
                if is_live and not snapshot.is_divided:
                    found.append(Slices(snapshot.commit, (0,), 1))
                else:
                    found.append(Slices(snapshot.commit, kept.held, kept.of, is_live))
        return tuple(found)

    # ------------------------------------------------------------------ going back

    def keep_live(self) -> None:
        assert self._live is not None, "the commit was taken from them"
        self._bits = sums_of_bits(self._live)

    def release_live(self) -> None:
        self._bits = self._unsealed = None

    def why_lost(self) -> str:
        # Before the first generation is sealed, the live values are still those with which the job began.
        is_begun = self._unsealed is None
        has_committed = is_begun and (self._current.commit is not None or self._spare.commit is not None)
        return "slices of the newest commit were lost with all ranks that held them" if has_committed else ""

    def to_restore(self) -> Snapshot | None:
        if self._is_empty:
            return None
        self._live_is_current = self._holds_all or self._is_unchanged()
        self._loads_current = True
        return self._whole() if self._live_is_current else None

    def loaded(self, values: Mapping[str, object]) -> None:
        self._live = self._bits = None
        if not self._loads_current:
            return  # a newcomer holds nothing before its first commit, and a rank that was behind holds an older one
        _, found = self._find({"steps": 0, "size": 0, "objects": values})
        self._note_live([found.tensors[number] for number in self._sliced])
        self.keep_live()

    def catch_up(self, world: World, values: Mapping[str, object], tell: Tell) -> Snapshot | None:
        newest = world.newest_commit
        if newest is not None and self._spare.commit == newest:
            self._switch()
            self._live_is_current = False
        is_holder = self._loads_current = newest is not None and self._current.commit == newest
        if is_holder and not self._live_is_current:
            # The live values are those of the following commit, which may have other parts and other objects.
            assert self._current.put_back is not None, "the commit was made here"
            self._current.put_back()
            self._live = self._bits = None
            tell = partial(tell, self._current.places)
        own = None if self._is_empty else self._current.own
        if newest is None or sum(member.commit == newest for member in world.members) == 1:
            # One rank has everything.
            arrived = send_whole(world, partial(self.for_repair, values), tell, own)
        else:
            arrived = self._gather(world, newest, tell() if is_holder else None)
        if arrived is None and is_holder and not self._live_is_current:
            arrived = self._whole()  # all slices are here
        if arrived is not None:
            arrived.own = own
        return arrived

    def _gather(self, world: World, newest: CommitId, told: bytes | None) -> Snapshot | None:
        """Send others what they lack of the newest commit. Return the commit if this rank lacked and received something."""
        kept = self._current if self._loads_current else None
        mine = None if kept is None else Unsliced(kept.skeleton, kept.sliced, kept.slices.specs, kept.buffer, told)
        plan = plan_gather(world.members, newest)
        received = gather(world, plan, mine, lambda number: self._slice(number, plan.of))
        if received is None:
            return None
        unsliced, room = received
        return whole_of(kept, unsliced, room.views)

    def divide(self, world: World, values: Mapping[str, object]) -> None:
        newest, division = world.newest_commit, division_of(world.members, world.rank, self._redundancy)
        # If the newest commit was divided, nobody holds the whole of it; otherwise every rank has it by now.
        holders = {m.rank: m.slices for m in world.members if newest is not None and m.commit == newest and m.slices}
        before = {rank: slices.held for rank, slices in holders.items() if not slices.is_whole}
        kept = self._current.parts.for_training() if before and self._loads_current else {}
        divisible = find_divisible(values)
        self._division = division
        if newest is None:
            self._unsealed = [optimizer.held_state() for optimizer in divisible]
        for place, optimizer in enumerate(divisible):
            if not before:
                optimizer.divide(division)
                continue
            wanted = numbers_by_rank(optimizer.sizes, division, world.size)
            moves = plan_moves(optimizer.sizes, before, next(iter(holders.values())).of, wanted)
            mine = kept.get(place, {})
            received = move(world, moves, mine, f"optimizer {place}")
            stays = {number: cloned(state) for number, state in mine.items() if number in wanted[world.rank]}
            optimizer.divide(division, {**stays, **received})

    @property
    def is_in_parts(self) -> bool:
        world = present_world()
        return world is not None and world.size > 1 and (self._current.is_divided or bool(self._current.sliced))

    def part(self, world: World, values: Mapping[str, object]) -> Part:
        whole, sliced = self._live_whole(), self._current.sliced
        dicts = iter(list(self._parts_of_optimizers(world, values)))  # copied now, before the wait below

        def complete(value: object) -> object:
            if not isinstance(value, SmallPart):
                return value
            content = next(dicts)
            for group, settings in zip(content["param_groups"], value.content, strict=True):
                group.update(settings)
            return StateDict(content)

        views, kept = whole.buffer.views, TensorBuffer()
        # The last rank gets the largest part: rank 0 also writes the unsliced tensors, and the first parts of optimizers.
        dealt = deal([views[number].nbytes for number in sliced], world.size)
        owners = {number: world.size - 1 - part for number, part in zip(sliced, dealt, strict=True)}
        mine = [number for number in range(len(views)) if owners.get(number, 0) == world.rank]
        pending = kept.copy_from([views[number] for number in mine])
        if pending is not None:
            pending.wait()
        tensors = TensorBuffer(specs=whole.buffer.specs, views=[view.to("meta") for view in views])
        for number, copy in zip(mine, kept.views, strict=True):
            tensors.views[number] = copy
        return Part(world.rank, world.size, map_tree(complete, whole.skeleton), tensors)

    def _parts_of_optimizers(self, world: World, values: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Yield the state dict of each divided optimizer, with a copy of the state that this rank writes."""
        kept = self._current.parts.view()
        for place, optimizer in enumerate(find_divisible(values)):
            division = optimizer.division
            if division is None:
                continue
            owners = [division.owners[part] for part in deal(optimizer.sizes, division.of)]
            mine = {number: cloned(state) for number, state in kept[place].items() if owners[number] == world.rank}
            yield {**optimizer.whole_state_dict({}), "state": PartOfDict(mine)}

    def for_repair(self, values: Mapping[str, object], is_sender: bool) -> SnapshotPair:
        """Copy everything for the ranks that lack it. A receiver gets temporary room, which is freed once it has loaded."""
        return SnapshotPair(self._copy() if is_sender else None)

    def holds(self, received: Snapshot) -> bool:
        """Return True: a rank keeps what it held, and takes its slices when the generation is sealed."""
        return True

    def lend(self, values: Mapping[str, object]) -> Lender:
        return WholeCopies(self, self._copy)

    # ------------------------------------------------------------------ inside

    def _find(self, tree: Mapping[str, object]) -> tuple[object, Found]:
        found = Found()
        skeleton = flatten(tree, found, _part_of, self._templates)
        if self._version != self._templates.version:
            self._sliced = self._find_sliced(found)
            self._version = self._templates.version
        return skeleton, found

    def _find_sliced(self, found: Found) -> tuple[int, ...]:
        """Choose the tensors that are copied in slices; all others are copied whole."""
        return find_sliced(found)

    def _note_live(self, tensors: list[torch.Tensor]) -> None:
        self._live, self._bits = tensors, None
        self._versions = versions_of(tensors)

    def _switch(self) -> None:
        self._current, self._spare = self._spare, self._current

    @property
    def _holds_all(self) -> bool:
        """Whether all slices of the current commit are here."""
        kept = self._current.slices
        return not kept.specs or len(kept.held) == kept.of

    def _is_unchanged(self) -> bool:
        """Whether the live tensors have exactly the bits of the current commit. Code may have changed them through ``.data``."""
        live = self._live
        return live is not None and self._bits is not None and self._bits == sums_of_bits(live)

    def _is_live(self) -> bool:
        """Whether the live tensors are those of the current commit, as far as this rank's slices tell. Others have the rest."""
        live = self._live  # versions do not show changes through ``.data``
        return live is not None and self._versions == versions_of(live) and self._current.slices.match(live)

    def _slice(self, number: int, of: int) -> list[torch.Tensor]:
        """Return a slice of the current commit. This rank has to hold it."""
        kept = self._current.slices
        if kept.of == of and number in kept.held:
            return kept.flats[number]
        return slice_of(self._tensors(), kept.specs, number, of)

    def _tensors(self) -> Sequence[torch.Tensor]:
        """Return the sliced tensors of the current commit, all of which are here. Live ones must not be changed."""
        if not self._holds_all:
            assert self._live is not None, "a rank that is taken for a holder of the whole has it"
            return self._live
        kept, room = self._current.slices, TensorBuffer()
        room.fit(kept.specs)
        kept.copy_to(room)
        return room.views

    def _whole(self) -> Snapshot:
        whole = self._current.with_tensors(self._tensors())
        whole.own = self._current.own
        return whole

    def _live_whole(self) -> Snapshot:
        """Return the whole current commit, uncopied. Raises ``SparkElasticError`` if it is no longer here."""
        if not self._holds_all and not self._is_live():
            raise SparkElasticError(
                f'commit="{self.name}": weights have changed since the last commit(), which this rank has no whole copy of to '
                "write to a durable checkpoint; commit after the last change"
            )
        return self._whole()

    def _copy(self) -> Snapshot:
        """Copy the whole current commit."""
        whole = self._live_whole()
        kept = TensorBuffer()
        whole.pending = kept.copy_from(whole.buffer.views)
        whole.buffer = kept
        return whole


def _slices_here(redundancy: int) -> tuple[tuple[int, ...], int]:
    """Return which slices this rank keeps, and of how many."""
    world = present_world()
    if world is None:
        return (0,), 1
    return choose_slices(place_in_ring(world.members, world.rank), world.size, redundancy), world.size


def _part_of(value: Stateful) -> StateDict | KeptPart:
    """Return the part of an object with a state dict that is copied whole: for a divided optimizer, its settings."""
    if isinstance(value, ZeroRedundancyOptimizer) and value.division is not None:
        return small_part(value)
    return as_state_dict(value)


class _DividedOptimizer(SmallOptimizer):
    """The template of a divided optimizer's settings, which ends with the division."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer, part: SmallPart, start: int) -> None:
        super().__init__(optimizer, part, start)
        self._of, self._division = optimizer, optimizer.division

    def _is_current(self) -> bool:
        return self._of.division is self._division and super()._is_current()


def _template_of(value: Stateful, written: object, tensors: Sequence[torch.Tensor], start: int) -> Template | None:
    if isinstance(value, ZeroRedundancyOptimizer) and isinstance(written, SmallPart):
        return _DividedOptimizer(value, written, start) if SmallOptimizer.fits(written) else None
    return template_of(value, written, tensors, start)


def division_of(members: Sequence[Member], rank: int, redundancy: int) -> Division | None:
    """Return how optimizers are divided in a world; None if each rank keeps everything, as in small worlds."""
    size = len(members)
    if not divides(size, redundancy):
        return None
    places = [place_in_ring(members, number) for number in range(size)]
    return Division(
        rank,
        tuple(choose_slices(place, size, redundancy) for place in places),
        tuple(places.index(part) for part in range(size)),
    )


def place_in_ring(members: Sequence[Member], rank: int) -> int:
    """Return the place of a rank in a ring whose neighbours are on different hosts, as far as possible."""
    ring = sorted(members, key=lambda member: (member.local_rank, member.cross_rank))
    return [member.rank for member in ring].index(rank)


def find_sliced(found: Found) -> tuple[int, ...]:
    """Find the tensors that are equal on all ranks: parameters of modules, and what optimizers keep of them."""
    equal: set[tuple[object, ...]] = set()
    for value in found.objects:
        tensors: list[object] = []
        if isinstance(value, torch.nn.Module):
            tensors += value.parameters()
        elif isinstance(value, torch.optim.Optimizer):
            tensors += [entry for state in value.state.values() for entry in state.values()]
        equal.update(_place(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel())
    return tuple(number for number, tensor in enumerate(found.tensors) if _place(tensor) in equal)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape


def whole_of(held: Snapshot | None, unsliced: Unsliced, sliced: Sequence[torch.Tensor]) -> Snapshot:
    """Put a whole commit together. ``held`` is this rank's snapshot of it, which also has the objects it was taken from."""
    small, large, is_sliced = iter(unsliced.small.views), iter(sliced), set(unsliced.sliced)
    total = len(unsliced.small.views) + len(sliced)
    whole = Snapshot()
    whole.buffer.views = [next(large if number in is_sliced else small) for number in range(total)]
    whole.buffer.specs = tuple(
        TensorSpec(view.dtype, str(view.device), tuple(view.shape)) for view in whole.buffer.views
    )
    whole.skeleton, whole.told = unsliced.skeleton, unsliced.told
    if held is not None:
        whole.objects, whole.places = held.objects, held.places
        whole.put_back, whole.told = held.put_back, None
    return whole
