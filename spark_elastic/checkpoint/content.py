"""Turns a snapshot into the files of a checkpoint, and the files back into objects; docs/formats.md describes the files.

``tree.json`` holds the state without its tensors, ``tensors.safetensors`` the tensors, and ``objects.pickle`` everything that
is neither a tensor nor plain data. Only a job that resumes from its own checkpoint unpickles that last file. If all ranks have
written a checkpoint, each has its own file of tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spark_elastic import _saved_names
from spark_elastic._json import Json
from spark_elastic.checkpoint import first_format
from spark_elastic.checkpoint.directory import CheckpointDirectory, CheckpointManifest, Progress
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.checkpoint.parts import EncodedPart
from spark_elastic.checkpoint.skeleton import Kept, Tree, pickled
from spark_elastic.checkpoint.strict_json import load_json
from spark_elastic.checkpoint.tensors import TensorRoom, file_pieces
from spark_elastic.checkpoint.tree import OpaqueObject, TreeDecoder, TreeEncoder
from spark_elastic.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OpaqueObject", "SavedState", "decode", "encode", "encode_joined"]

# What a commit says about places, as the keepers' ``Content`` names it, unless it is empty.
_PLACES: dict[str, object] = {"rebound": [], "same": {}}
TREE, TENSORS, OBJECTS = "tree.json", "tensors.safetensors", "objects.pickle"
_FILE_OF_TENSORS = re.compile(r"tensors(-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state as it was committed, by a world of ``size`` ranks. The values may hold ``StateDict``s."""

    name: CheckpointName
    steps: int
    size: int
    objects: dict[str, object]
    # What the keepers' ``Content`` says about places; an earlier release did not know it (``same`` is None).
    rebound: Sequence[str] = ()
    same: Mapping[str, str] | None = None
    steppers: Mapping[str, Any] = field(default_factory=dict)


def encode(snapshot: Kept) -> dict[str, Iterable[Buffer]]:
    """Return the files of a snapshot, in pieces. The tensors are not copied, so the snapshot must not change meanwhile."""
    encoder = TreeEncoder(snapshot.buffer.views, [spec.device for spec in snapshot.buffer.specs])
    objects = {name: encoder.encode(value, name) for name, value in snapshot.skeleton["objects"].items()}
    return {**_tree_files(objects, encoder.objects, snapshot.skeleton), TENSORS: file_pieces(encoder.tensors)}


def encode_joined(mine: EncodedPart, skeleton: Tree) -> dict[str, Iterable[Buffer]]:
    """Return rank 0's files besides its tensors, once the parts of all ranks are joined. ``skeleton`` is that of its part."""
    return _tree_files(mine.objects, mine.opaque, skeleton)


def _tree_files(objects: dict[str, Json], opaque: list[object], skeleton: Tree) -> dict[str, Iterable[Buffer]]:
    told = {name: skeleton.get(name, empty) for name, empty in _PLACES.items()}
    steppers = json.loads(skeleton.get("steppers", "{}"))
    tree = {"steps": skeleton["steps"], "size": skeleton["size"], "objects": objects, **told, "steppers": steppers}
    files: dict[str, Iterable[Buffer]] = {TREE: [json.dumps(tree).encode("ascii")]}
    if opaque:
        files[OBJECTS] = [pickled(opaque, skeleton, "written to a checkpoint")]
    return files


def decode(
    directory: CheckpointDirectory,
    name: CheckpointName,
    *,
    unpickle: bool,
    device: torch.device | None = None,
    progress: Progress = lambda: None,
) -> SavedState:
    """Read a checkpoint of any release. Raises ``DamagedError``. Nothing is unpickled unless ``unpickle`` is true.

    Tensors that were not on the CPU are moved to ``device``, if one is given.
    """
    manifest = directory.manifest(name)
    reader = _Reader(directory, name, manifest, unpickle, device, progress)
    tree = reader.read_first_format() if manifest.version == 1 else reader.read_tree()
    with _damage(directory, name):
        steps, size, objects = tree["steps"], tree["size"], tree["objects"]
        if not (type(steps) is int and type(size) is int and type(objects) is dict and all(map(_is_name, objects))):
            raise ValueError("it is not the tree of a state")
        rebound, same, steppers = tree.get("rebound", []), tree.get("same"), tree.get("steppers", {})
        if not (_are_names(rebound) and (same is None or _maps_names(same)) and _describes_steppers(steppers)):
            raise ValueError("it does not name places of a state")
    return SavedState(name, steps, size, objects, rebound, same, steppers)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the files of one checkpoint, with the options of ``decode``."""

    directory: CheckpointDirectory
    name: CheckpointName
    manifest: CheckpointManifest
    unpickle: bool
    device: torch.device | None
    progress: Progress

    def read_tree(self) -> Any:
        """Return the tree of a checkpoint in the present format."""
        text = self._bytes(TREE)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(filter(_FILE_OF_TENSORS.fullmatch, self.manifest.files)) or [TENSORS]:
            room = TensorRoom(self._size(file))
            self._fill(file, room)
            tensors.update(room.tensors)
        opaque = self._objects()
        with _damage(self.directory, self.name, TREE):
            tree = load_json(text)
            decoder = TreeDecoder(tensors, opaque, self.device)
            return {**tree, "objects": {key: decoder.decode(node) for key, node in tree["objects"].items()}}

    def read_first_format(self) -> Any:
        """Return the tree of a checkpoint in the first format."""
        packed = self._bytes(first_format.SKELETON)
        with _damage(self.directory, self.name, first_format.SKELETON):
            skeleton, specs = first_format.read_skeleton(packed)
            room = first_format.TensorRoom(specs, self._size(first_format.TENSORS))
        self._fill(first_format.TENSORS, room)
        tensors = [
            tensor if self.device is None or spec[1] == "cpu" else tensor.to(self.device)
            for tensor, spec in zip(room.tensors, specs, strict=True)
        ]
        opaque = self._objects()
        with _damage(self.directory, self.name, first_format.SKELETON):
            return first_format.rebuild(skeleton, tensors, opaque)

    def _bytes(self, file: str) -> bytes:
        return self.directory.read_bytes(self.name, file, self.manifest.files.get(file))

    def _size(self, file: str) -> int:
        entry = self.manifest.files.get(file)
        return 0 if entry is None else entry.bytes

    def _fill(self, file: str, room: Iterable[memoryview]) -> None:
        """Read a file of tensors into the room that was allocated for it."""
        checked = _checked(room, self.directory, self.name, file)
        self.directory.read(self.name, file, self.manifest.files.get(file), checked, self.progress)

    def _objects(self) -> list[object] | None:
        """Return the pickled objects; None if nothing is to be unpickled."""
        if not self.unpickle:
            return None
        if OBJECTS not in self.manifest.files:
            return []
        packed = self._bytes(OBJECTS)
        with _damage(self.directory, self.name, OBJECTS):
            try:
                objects: list[object] = _saved_names.loads(packed)
            except (ImportError, AttributeError) as error:
                raise CheckpointError(
                    f"the objects of checkpoint {self.name} of {self.directory.name} need code that is not here: {error}. Make "
                    "it importable on the workers, or give another checkpoint= to start over"
                ) from error
            except (TypeError, ValueError) as error:
                # The bytes are those that were written: ``_bytes`` has compared their digest.
                raise CheckpointError(
                    f"the objects of checkpoint {self.name} of {self.directory.name} do not fit the classes here: "
                    f"{type(error).__name__}: {error}. Restore the classes, or give another checkpoint= to start over"
                ) from error
            return objects


def _checked(
    room: Iterable[memoryview], directory: CheckpointDirectory, name: CheckpointName, file: str
) -> Iterator[memoryview]:
    """Yield the room for tensors. A header that makes no sense counts as damage; a lack of memory does not."""
    try:
        yield from room
    except ValueError as error:
        raise DamagedError(
            f"checkpoint {name} of {directory.name} is damaged: the header of {file}: {error}"
        ) from error


def _is_name(name: object) -> bool:
    return type(name) is str and not name.startswith("_")


def _are_names(names: object) -> bool:
    return isinstance(names, list) and all(map(_is_name, names))


def _maps_names(names: object) -> bool:
    return isinstance(names, dict) and _are_names([*names, *names.values()])


def _describes_steppers(steppers: dict[str, Any]) -> bool:
    groups = [group for each in steppers.values() for group in each.get("parameters", [])]
    kinds = [kind for each in steppers.values() for kind in (each["kind"], *each.get("parts", []))]
    return all(isinstance(kind, str) for kind in kinds) and all(
        name is None or isinstance(name, str) for group in groups for name in group
    )


@contextmanager
def _damage(directory: CheckpointDirectory, name: CheckpointName, file: str = "its tree") -> Iterator[None]:
    """Turn the many kinds of errors that damage, or malice, causes in readers into a ``DamagedError``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedError(
            f"checkpoint {name} of {directory.name} is damaged: {file} cannot be read: {type(error).__name__}: {error}"
        ) from error
