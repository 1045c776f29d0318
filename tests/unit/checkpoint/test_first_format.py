"""The first format of checkpoints, as a forger would write it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tampered_checkpoint import GIB, Saved, Trap

from spark_elastic import load_checkpoint
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.errors import DamagedError

THEN: dict[str, Any] = {
    name: type(
        name,
        (),
        {"__module__": "spark_elastic.snapshot", "__qualname__": name, "__getstate__": lambda self: list(self.fields)},
    )
    for name in ("Leaf", "StateDict", "TensorSpec")
}


def then(name: str, *fields: Any) -> Any:
    """An instance of a class under its name of then, with the state that a dataclass with slots has."""
    made = THEN[name]()
    made.fields = fields
    return made


def first(saved: Saved, skeleton: Any, specs: Any, data: bytes = b"") -> None:
    """Forge a checkpoint of the first format."""
    for file in ("tree.json", "tensors.safetensors", "objects.pickle"):
        (saved.newer / file).unlink()
    with mock.patch.dict(sys.modules, {"spark_elastic.snapshot": SimpleNamespace(**THEN)}):
        torch.save((skeleton, specs), saved.newer / "skeleton.pt")
    (saved.newer / "manifest.json").write_text('{"version": 1, "files": {}}')
    saved.replace("skeleton.pt", (saved.newer / "skeleton.pt").read_bytes())
    saved.replace("tensors.bin", data)


def test_what_is_forged_below_would_be_read_if_it_were_right(saved: Saved) -> None:
    tree = {"steps": 3, "size": 1, "objects": {"a": then("StateDict", {"w": then("Leaf", 0)})}}
    first(saved, tree, [then("TensorSpec", torch.uint8, "cpu", (1,))], b"x")
    assert load_checkpoint(saved.directory.url)["a"]["w"].tolist() == [120]


@pytest.mark.parametrize(
    ("objects", "specs", "data"),
    [
        ({"a": then("Leaf", 9)}, [], b""),
        ({"a": then("Leaf", -1)}, [then("TensorSpec", torch.uint8, "cpu", (1,))], b"x"),
        ({"a": then("Leaf")}, [], b""),
        ({"a": 1}, [then("TensorSpec", torch.uint8, "cpu", (6 * GIB,))], b"x"),
        ({"a": 1}, [then("TensorSpec", torch.uint8, "cpu", (-1, -1))], b"x"),
        ({"a": 1}, [then("TensorSpec", torch.uint8, "cpu", (2**62, 4, 0))], b""),
        ({"a": 1}, [then("TensorSpec", "uint8", "cpu", (1,))], b"x"),
        ({"a": 1}, [then("TensorSpec", torch.uint8)], b"x"),
        ({"a": 1}, None, b""),
        ({"a": then("StateDict")}, [], b""),
        ([], [], b""),
        ({3: 1}, [], b""),
    ],
    ids=range(12),
)
def test_a_forged_checkpoint_of_the_first_format_is_damage(saved: Saved, objects: Any, specs: Any, data: bytes) -> None:
    first(saved, {"steps": 1, "size": 1, "objects": objects}, specs, data)
    saved.assert_damaged()


def test_load_checkpoint_runs_no_code_out_of_a_forged_skeleton(tmp_path: Path) -> None:
    """Of the first format, whose tree was a torch pickle."""
    directory, name, sprung = CheckpointDirectory(str(tmp_path / "saved")), CheckpointName(1, 1, 1), tmp_path / "sprung"
    torch.save((Trap(sprung), ()), tmp_path / "forged")
    directory.write(name, {"skeleton.pt": [(tmp_path / "forged").read_bytes()], "tensors.bin": [b""]})
    manifest = Path(directory.url, str(name), "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":2', b'"version":1'))
    with pytest.raises(DamagedError, match="UnpicklingError"):
        load_checkpoint(directory.url)
    assert not sprung.exists()
