"""Checkpoints that all ranks write: each its part of the tensors, rank 0 also the tree and the manifest that completes it.

Only facts about what has been written travel between ranks, as ``Written``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from spark_elastic._json import Json
from spark_elastic.checkpoint.directory import FileEntry
from spark_elastic.checkpoint.skeleton import KeptTensors, Leaf, PartOfDict, Tree, map_tree
from spark_elastic.checkpoint.tree import TreeEncoder
from spark_elastic.errors import CheckpointError


def file_of(rank: int, size: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"tensors-{rank + 1:05d}-of-{size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a commit.

    The skeleton is that of the whole state. ``tensors`` has copies of the tensors that this rank writes, and tensors without
    content, on the device "meta", in place of all others.
    """

    rank: int
    size: int
    skeleton: Tree
    tensors: KeptTensors

    @property
    def file(self) -> str:
        """The name of the file of tensors that this rank writes."""
        return file_of(self.rank, self.size)


class Written(msgspec.Struct, frozen=True):
    """What rank 0 is told about another rank's part: its file, the tensors in it, and the JSON entries of each ``PartOfDict``.

    ``checkpoint`` names the checkpoint. ``entry`` is None if the part could not be written; ``error`` then says why.
    """

    file: str
    checkpoint: str = ""
    entry: FileEntry | None = None
    names: tuple[str, ...] = ()
    dicts: tuple[list[Any], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part in the form in which it is written. Other ranks write the tree's tensors that are ``awaited``."""

    objects: dict[str, Json]
    tensors: dict[str, torch.Tensor]
    awaited: frozenset[str]
    # The entries of each ``PartOfDict``, which are also in the tree.
    dicts: list[list[Any]]
    # The content of ``objects.pickle``.
    opaque: list[object]


def encode_part(part: Part) -> EncodedPart:
    """Encode a part. Only rank 0 writes values in the tree itself, and objects that only code could bring back."""
    objects = part.skeleton["objects"] if part.rank == 0 else map_tree(_only_tensors, part.skeleton["objects"])
    encoder = TreeEncoder(part.tensors.views, [spec.device for spec in part.tensors.specs])
    tree = {name: encoder.encode(value, name) for name, value in objects.items()}
    if encoder.objects and part.rank != 0:
        kinds = ", ".join(sorted({type(value).__qualname__ for value in encoder.objects}))
        raise CheckpointError(f"the state of a divided optimizer holds objects that cannot be written: {kinds}")
    mine = {name: tensor for name, tensor in encoder.tensors.items() if not tensor.is_meta}
    return EncodedPart(tree, mine, frozenset(encoder.tensors) - mine.keys(), encoder.dicts, encoder.objects)


def join(mine: EncodedPart, others: Sequence[Written], checkpoint: str) -> None:
    """Enter what the other ranks have written into the tree of rank 0.

    Raises ``CheckpointError`` if a part could not be written, belongs to another checkpoint, or if the parts do not have each
    tensor exactly once.
    """
    for other in others:
        if other.entry is None:
            raise CheckpointError(f"{other.file} could not be written: {other.error}")
        if other.checkpoint != checkpoint:
            raise CheckpointError(f"{other.file} was written for {other.checkpoint}: ranks have made other commits")
        for entries, more in zip(mine.dicts, other.dicts, strict=True):
            entries.extend(more)
    for entries in mine.dicts:
        entries.sort(key=lambda entry: int(entry[0]))
    found = Counter(itertools.chain(mine.tensors, *(other.names for other in others)))
    _check_names("is in no rank's part", mine.awaited - found.keys())
    _check_names("is in the parts of several ranks", (name for name, count in found.items() if count > 1))


def _check_names(what: str, names: Iterable[str]) -> None:
    for name in sorted(names):
        raise CheckpointError(f"the tensor {name!r} {what}: the States of the ranks differ")


def _only_tensors(value: object) -> object:
    return value if isinstance(value, (Leaf, PartOfDict)) else None
