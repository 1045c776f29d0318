"""A checkpoint that can be tampered with, and an object that tells whether it was unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic import DamagedError, load_checkpoint
from spark_elastic.checkpoint.content import decode, encode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.worker.state.snapshot import Snapshot

OLDER, NEWER = CheckpointName(1, 1, 1), CheckpointName(1, 1, 2)
GIB = 2**30


class Saved:
    """A checkpoint that can be tampered with, and an older one that is good."""

    def __init__(self, folder: Path) -> None:
        self.directory = CheckpointDirectory(str(folder))
        self.newer = folder / str(NEWER)
        for name, epoch in ((OLDER, 1), (NEWER, 2)):
            snapshot = Snapshot()
            weights = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.complex128)}
            objects = {"epoch": epoch, "weights": weights, "odd": {(1, 2): {"x"}, "c": complex(1, 2)}, "own": NEWER}
            snapshot.take({"steps": epoch, "size": 1, "objects": objects}, None)
            self.directory.write(name, encode(snapshot))

    def replace(self, file: str, content: bytes) -> None:
        """Forge a file, with a manifest that says so."""
        (self.newer / file).write_bytes(content)
        self.change_manifest(file, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def change_manifest(self, file: str, **entry: Any) -> None:
        manifest = json.loads((self.newer / "manifest.json").read_bytes())
        manifest["files"].setdefault(file, {}).update(entry)
        (self.newer / "manifest.json").write_text(json.dumps(manifest))

    def change_tree(self, **entries: Any) -> None:
        tree = json.loads((self.newer / "tree.json").read_bytes())
        self.replace("tree.json", json.dumps({**tree, **entries}).encode())

    def change_header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        header, data = self.header()
        self.replace_header(json.dumps(change(header) or header).encode(), data)

    def header(self) -> tuple[dict[str, Any], bytes]:
        content = (self.newer / "tensors.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]

    def replace_header(self, text: bytes, data: bytes) -> None:
        self.replace("tensors.safetensors", len(text).to_bytes(8, "little") + text + data)

    def assert_damaged(self) -> None:
        with pytest.raises(DamagedError):
            decode(self.directory, NEWER, unpickle=True)
        with pytest.raises(DamagedError):
            decode(self.directory, NEWER, unpickle=False)
        assert load_checkpoint(self.directory.url)["epoch"] == 1


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __deepcopy__(self, memo: object) -> Trap:
        return self

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
