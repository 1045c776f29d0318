"""Turns a snapshot into the files of a checkpoint, and these into objects again.

``skeleton.pt`` holds the tree of the state without its tensors, as ``torch.load(weights_only=True)`` reads it, which runs no
code; ``tensors.bin`` the tensors, one after the other; ``objects.pickle`` what is neither a tensor nor plain data. That file
is unpickled by a job that goes on from its own checkpoint, and by nobody else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from spark_elastic.checkpoint.directory import PIECE_BYTES, CheckpointDirectory, Progress
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.snapshot import PLAIN, Leaf, Snapshot, StateDict, TensorSpec, map_tree

SKELETON, TENSORS, OBJECTS = "skeleton.pt", "tensors.bin", "objects.pickle"


@dataclass(frozen=True, slots=True)
class OpaqueObject:
    """Stands for an object that only code could bring back: a class instance, a NumPy value, a set …"""

    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state as it was committed. ``size`` is that of the world that committed it; values hold ``StateDict``s."""

    name: CheckpointName
    steps: int
    size: int
    objects: dict[str, Any]


def encode(snapshot: Snapshot) -> dict[str, Iterable[Any]]:
    """Return the files of a snapshot, in pieces. Holds no second copy of the tensors; the snapshot must stay as it is."""
    opaque: list[Any] = []

    def set_apart(value: Any) -> Any:
        if type(value) is Leaf or type(value) in PLAIN:
            return value
        opaque.append(value)
        return OpaqueObject(f"{type(value).__module__}.{type(value).__qualname__}", len(opaque) - 1)

    skeleton = io.BytesIO()
    torch.save((map_tree(set_apart, snapshot.skeleton), snapshot.buffer.specs), skeleton)
    files: dict[str, Iterable[Any]] = {SKELETON: [skeleton.getvalue()], TENSORS: _pieces(snapshot.buffer.views)}
    if opaque:
        files[OBJECTS] = [cloudpickle.dumps(opaque)]
    return files


def decode(
    directory: CheckpointDirectory,
    name: CheckpointName,
    *,
    unpickle: bool,
    device: torch.device | None = None,
    progress: Progress = lambda: None,
) -> SavedState:
    """Read a checkpoint. Raises ``DamagedError``; nothing is unpickled unless ``unpickle`` says so.

    Tensors that were not on the CPU go to ``device``, if one is given.
    """
    files = directory.manifest(name).files
    with torch.serialization.safe_globals([Leaf, OpaqueObject, StateDict, TensorSpec]):
        packed = io.BytesIO(directory.read_bytes(name, SKELETON, files.get(SKELETON)))
        skeleton, specs = torch.load(packed, weights_only=True)
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    room = (memoryview(_raw(tensor).numpy()) for tensor in tensors)
    directory.read(name, TENSORS, files.get(TENSORS), room, progress)
    if device is not None:
        tensors = [t if spec.device == "cpu" else t.to(device) for t, spec in zip(tensors, specs, strict=True)]
    opaque: list[Any] | None = None
    if unpickle and OBJECTS in files:
        opaque = pickle.loads(directory.read_bytes(name, OBJECTS, files[OBJECTS]))

    def give(value: Any) -> Any:
        if type(value) is Leaf:
            return tensors[value.index]
        return opaque[value.number] if opaque is not None and type(value) is OpaqueObject else value

    return SavedState(name, **map_tree(give, skeleton))


def _pieces(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """Yield the bytes of the tensors. From a GPU they come beside its work, on a stream of their own."""
    for tensor in tensors:
        aside = torch.cuda.stream(torch.cuda.Stream(tensor.device)) if tensor.is_cuda else nullcontext()
        for piece in _raw(tensor).split(PIECE_BYTES):
            with aside:
                host = piece.cpu()
            yield host.numpy()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uncopied."""
    return tensor.reshape(-1).view(torch.uint8)
