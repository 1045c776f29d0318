"""Optimizer moves: the state of a ``ZeroRedundancyOptimizer`` goes from a commit's holders to its keepers in a new world.

Each parameter's state travels point to point, all at the same time. A rank that already holds what it is to keep receives
nothing. The plan is a pure function of the members, which all ranks know.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import cloudpickle
import torch

from spark_elastic.checkpoint.skeleton import TensorSpec
from spark_elastic.worker.optimizers.zero import Division, deal
from spark_elastic.worker.state.gathering import exchange, receive_all
from spark_elastic.worker.state.repair import announce, receive_announced
from spark_elastic.worker.state.snapshot import Found, TensorBuffer, flatten, unflatten
from spark_elastic.worker.world import World

# The state of parameters, by their numbers.
States = Mapping[int, dict[str, object]]
# By receiver and parameter, the sender of the parameter's state.
Moves = dict[tuple[int, int], int]


@dataclass(slots=True)
class KeptParts:
    """A copy of this rank's parts of divided optimizers, by the optimizers' places in the State."""

    buffer: TensorBuffer = field(default_factory=TensorBuffer)
    _skeleton: object = field(default_factory=dict)
    # The devices on which training has the tensors. The copies may be in the host's memory.
    _devices: list[torch.device] = field(default_factory=list)

    def take(self, states: Mapping[int, States]) -> None:
        """Copy the states in. A GPU may still be copying when this returns."""
        found = Found()
        self._skeleton = flatten(states, found)
        self._devices = [tensor.device for tensor in found.tensors]
        self.buffer.copy_from(found.tensors)

    def view(self) -> dict[int, States]:
        """Return the kept states on whichever device they are. Their tensors must not be changed."""
        return cast(dict[int, States], unflatten(self._skeleton, self.buffer.views))

    def for_training(self) -> dict[int, States]:
        """Return the kept states on the devices that they were taken from. Their tensors must not be changed."""
        tensors = [view.to(device) for view, device in zip(self.buffer.views, self._devices, strict=True)]
        return cast(dict[int, States], unflatten(self._skeleton, tensors))


def plan_moves(
    sizes: Sequence[int], before: Mapping[int, tuple[int, ...]], of: int, wanted: Mapping[int, Sequence[int]]
) -> Moves:
    """Plan from the holders of the ``of`` parts ``before`` and the parameters that each rank is to have. Senders take turns."""
    parts = deal(sizes, of)
    moves: Moves = {}
    for rank, numbers in wanted.items():
        for number in numbers:
            if parts[number] in before.get(rank, ()):
                continue
            senders = [sender for sender, held in sorted(before.items()) if parts[number] in held]
            moves[rank, number] = senders[(rank + number) % len(senders)]
    return moves


def numbers_by_rank(sizes: Sequence[int], division: Division | None, size: int) -> dict[int, list[int]]:
    """Return the numbers of the parameters whose state each rank keeps."""
    if division is None:
        return {rank: list(range(len(sizes))) for rank in range(size)}
    parts = deal(sizes, division.of)
    return {rank: [n for n, part in enumerate(parts) if part in division.held[rank]] for rank in range(size)}


def move(world: World, moves: Moves, mine: States, name: str) -> dict[int, dict[str, object]]:
    """Carry out the plan; return the states that have arrived here. ``mine`` is what this rank holds of the commit.

    ``name`` distinguishes the exchanges of one world. Blocks only on the ranks involved. Raises ``WorkerLostError`` when one of
    them is lost.
    """
    return exchange(world, _going(world, moves, mine, name), lambda: _receive(world, moves, name))


def _going(world: World, moves: Moves, mine: States, name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """All that others take from this rank, each tensor with its receiver."""
    receivers = sorted({receiver for (receiver, _), sender in moves.items() if sender == world.rank})
    if receivers:
        contents, tensors = {}, {}
        for number, state in mine.items():
            found = Found()
            skeleton = flatten(state, found)
            tensors[number] = [tensor.cpu().contiguous() for tensor in found.tensors]
            contents[number] = skeleton, [TensorSpec(t.dtype, str(t.device), tuple(t.shape)) for t in found.tensors]
        packed = announce(world, world.newest_commit, cloudpickle.dumps(contents), name)
        for receiver in receivers:
            yield packed, receiver
            for number in _numbers(moves, receiver, world.rank):
                for tensor in tensors.get(number, ()):
                    yield tensor, receiver


def _receive(world: World, moves: Moves, name: str) -> dict[int, dict[str, object]]:
    rooms, skeletons, coming = {}, {}, []
    for sender in sorted({sender for (receiver, _), sender in moves.items() if receiver == world.rank}):
        receive = partial(world.group.receive, source=sender)
        contents = pickle.loads(receive_announced(world, world.newest_commit, sender, receive, name))
        for number in _numbers(moves, world.rank, sender):
            if number not in contents:
                continue  # a parameter that no step has updated yet has no state
            skeletons[number], specs = contents[number]
            rooms[number] = [torch.empty(spec.shape, dtype=spec.dtype, device=spec.device) for spec in specs]
            coming += [(room, sender) for room in rooms[number]]
    receive_all(world, coming)
    return {number: cast(dict[str, object], unflatten(skeletons[number], rooms[number])) for number in skeletons}


def _numbers(moves: Moves, receiver: int, sender: int) -> list[int]:
    """The parameters whose state goes from one rank to another, in the order in which it travels."""
    return sorted(number for (to, number), source in moves.items() if (to, source) == (receiver, sender))
