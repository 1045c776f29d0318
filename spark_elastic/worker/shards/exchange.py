"""Adds up the contributions of a global batch's shards over all ranks, in the tree's order, and gives every rank the sum.

Each rank has already added its shards up to a few nodes, which are flat tensors. These are cut into as many chunks as there are
ranks. An all-to-all brings all nodes of a chunk to the rank that owns the chunk, which adds them in the tree's order; another
hands out the sums. A rank sends its nodes once and receives the sum once, as in a ring reduction, which however adds in the
order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from spark_elastic.data.shards import Cut
from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends import HOST_BACKEND
from spark_elastic.worker.shards.tree import Node, nodes_of, total
from spark_elastic.worker.world import World, translated_errors

# Takes the number of a flat tensor, a tensor on the wanted device, and a length. Returns memory that later calls may reuse.
Room = Callable[[int, torch.Tensor, int], torch.Tensor]


def add_over_ranks(
    cut: Cut, nodes: Mapping[Node, list[torch.Tensor]], room: Room, world: World | None
) -> list[torch.Tensor]:
    """Return the sum over all shards of a batch, for each flat tensor. A collective; raises ``WorkerLostError``.

    ``nodes``: the contributions of this rank's shards, which are overwritten; the length of each tensor is a multiple of the
    number of ranks. The sums may lie in memory of ``nodes`` or ``room``.
    """
    if world is None or world.size == 1:
        (flat,) = nodes.values()
        return flat
    if world.is_broken():
        raise WorkerLostError(f"generation {world.generation} is broken")
    sums = []
    with translated_errors(world):
        for number, tensors in enumerate(zip(*nodes.values(), strict=True)):
            sums.append(_add_flat(cut, dict(zip(nodes, tensors, strict=True)), functools.partial(room, number), world))
    return sums


def _add_flat(
    cut: Cut, nodes: dict[Node, torch.Tensor], room: Callable[[torch.Tensor, int], torch.Tensor], world: World
) -> torch.Tensor:
    rank, size = world.rank, world.size
    sent = [nodes_of(cut.shards, cut.shards_of(each, size)) for each in range(size)]
    assert tuple(nodes) == sent[rank], (tuple(nodes), sent[rank])
    device = next(iter(nodes.values())).device
    # Gloo has no all-to-all for tensors on GPUs.
    wire = device if world.backend != HOST_BACKEND else torch.device("cpu")
    own = [flat.to(wire) for flat in nodes.values()]
    chunk = own[0].numel() // size
    received = room(own[0], sum(map(len, sent)) * chunk)
    everything: dict[Node, torch.Tensor] = {}
    # First the first node of each rank, then the second of those that have two.
    for number in range(max(map(len, sent))):
        senders = [each for each in range(size) if number < len(sent[each])]
        start = len(everything) * chunk
        into = received[start : start + len(senders) * chunk]
        given = own[number] if rank in senders else own[0][:0]
        dist.all_to_all_single(
            into, given, [chunk * (each in senders) for each in range(size)], [chunk * (rank in senders)] * size
        )
        everything |= {sent[each][number]: part for each, part in zip(senders, into.split(chunk), strict=True)}
    # Gloo's all-gather copies everything once more. Nobody needs this rank's first node any longer.
    own[0].view(size, chunk).copy_(total(cut.shards, everything, torch.Tensor.add_))
    summed = received[: size * chunk]
    dist.all_to_all_single(summed, own[0])
    return summed.to(device)
