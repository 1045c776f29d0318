"""Adds up over all ranks what the shards of a global batch contributed, in the order of the tree, and gives every rank the sum.

Each rank has added its shards up to a few nodes. These are laid out flat and cut into as many chunks as there are ranks; an
all-to-all brings together all nodes of a chunk at the rank that owns the chunk, which adds them in the tree's order; an
all-gather hands out the sums. A rank sends its nodes once and receives the sum once, as in a ring reduction, whose order of
adding follows the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from spark_elastic.data.shards import Cut
from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends import HOST_BACKEND
from spark_elastic.worker.shards.tree import Node, nodes_of, total
from spark_elastic.worker.world import World, translated_errors

# The name that torch 2.13 has given to all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# What a shard, or a node, contributes to each item. None stands for zeros, which need no memory.
Values = list[torch.Tensor | None]


def add(left: Values, right: Values) -> Values:
    """Add the values of two nodes, and return those of ``left``, which are changed.

    Zeros are added where one of the two has none: that makes 0.0 of -0.0, as it does on a rank that received the zeros.
    """
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if pairs:
        torch._foreach_add_([one for one, _ in pairs], [other for _, other in pairs])
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        if (one is None) != (other is None):
            value = one if other is None else other
            assert value is not None
            left[place] = value.add_(0.0)
    return left


def add_over_ranks(
    cut: Cut, nodes: dict[Node, Values], like: Sequence[torch.Tensor], world: World | None
) -> list[torch.Tensor]:
    """Return the sum over all shards of a batch of each item, shaped as in ``like``. A collective; raises ``WorkerLostError``.

    ``nodes``: what this rank's shards contribute, which is not used again.
    """
    if world is None or world.size == 1:
        (values,) = nodes.values()
        return [torch.zeros_like(model) if value is None else value for value, model in zip(values, like, strict=True)]
    if world.is_broken():
        raise WorkerLostError(f"generation {world.generation} is broken")
    kinds = dict.fromkeys((model.device, model.dtype) for model in like)
    sums: list[torch.Tensor] = list(like)
    with translated_errors(world):
        for kind in kinds:
            places = [place for place, model in enumerate(like) if (model.device, model.dtype) == kind]
            chosen = {node: [values[place] for place in places] for node, values in nodes.items()}
            found = _add_flat(cut, chosen, [like[place] for place in places], world)
            for place, value in zip(places, found, strict=True):
                sums[place] = value
    return sums


def _add_flat(cut: Cut, nodes: dict[Node, Values], like: Sequence[torch.Tensor], world: World) -> list[torch.Tensor]:
    rank, size = world.rank, world.size
    lengths = [model.numel() for model in like]
    chunk = -(-sum(lengths) // size)
    sent = [nodes_of(cut.shards, cut.shards_of(each, size)) for each in range(size)]
    assert tuple(nodes) == sent[rank], (tuple(nodes), sent[rank])
    # Gloo has no all-to-all for tensors on GPUs.
    wire = like[0].device if world.backend != HOST_BACKEND else torch.device("cpu")
    flat = torch.zeros(len(nodes), size * chunk, dtype=like[0].dtype, device=wire)
    for row, values in zip(flat, nodes.values(), strict=True):
        for room, value in zip(row.split([*lengths, size * chunk - sum(lengths)]), values, strict=False):
            if value is not None:
                room.view(value.shape).copy_(value)
    given = flat.view(len(nodes), size, chunk).transpose(0, 1).reshape(-1)
    received = flat.new_empty(sum(map(len, sent)) * chunk)
    dist.all_to_all_single(received, given, [len(each) * chunk for each in sent], [len(nodes) * chunk] * size)
    everything = dict(zip((node for each in sent for node in each), received.split(chunk), strict=True))
    own = total(cut.shards, everything, torch.Tensor.add_)
    gathered = flat.new_empty(size * chunk)
    _all_gather(gathered, own)
    parts = gathered.split([*lengths, size * chunk - sum(lengths)])
    return [part.view(model.shape).to(model.device) for part, model in zip(parts, like, strict=False)]
