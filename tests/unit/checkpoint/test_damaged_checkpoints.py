"""Whatever has happened to the files of a checkpoint, reading it ends in ``DamagedError``, and the next older one is tried."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from spark_elastic import DamagedError, load_checkpoint
from spark_elastic.checkpoint.content import decode, encode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.errors import CheckpointError
from spark_elastic.worker.state.snapshot import Snapshot
from tests.unit.checkpoint.test_kept_files import FORMATS, kept

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


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "saved")


# ---------------------------------------------------------------- every file, at many places


def mutations(content: bytes) -> Iterator[bytes]:
    """The content with a bit flipped, cut off, doubled or gone: at 30 places, the same ones each time."""
    places = sorted({place * max(1, len(content) - 1) // 29 for place in range(30)} & set(range(len(content))))
    for number, place in enumerate(places):
        flipped = bytes([content[place] ^ 1 << number % 8])
        yield content[:place] + flipped + content[place + 1 :]
        yield content[:place] + b"\xff" * 8 + content[place + 8 :]
        yield content[:place]
        yield content[:place] + content[place // 2 :]


@pytest.mark.parametrize("with_digest", [False, True], ids=["damaged", "forged"])
@pytest.mark.parametrize("folder", FORMATS)
def test_no_change_of_any_file_lets_another_error_out(folder: str, with_digest: bool, tmp_path: Path) -> None:
    """Forged ones have the right digest in their manifest: what reads them has nothing to hold on to but itself."""
    url = shutil.copytree(kept(folder), tmp_path / "saved")
    (place,) = (path.parent for path in url.glob("*/manifest.json"))
    directory = CheckpointDirectory(str(url))
    (name,) = directory.list().complete
    manifest = json.loads((place / "manifest.json").read_bytes())
    refused = read = 0
    for path in sorted(place.iterdir()):
        if (path.name == "manifest.json") == with_digest or (with_digest and path.name == "objects.pickle"):
            continue  # code is trusted to be the job's own
        whole = path.read_bytes()
        for content in mutations(whole):
            if content == whole:
                continue
            path.write_bytes(content)
            if with_digest:
                entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                files = {**manifest["files"], path.name: entry}
                (place / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
            try:
                decode(directory, name, unpickle=not with_digest)
                read += 1
            except DamagedError:
                refused += 1
            except CheckpointError as error:
                assert "a later release wrote it" in str(error)  # noqa: PT017
        path.write_bytes(whole)
    assert refused > 100
    assert with_digest or not read


@pytest.mark.parametrize("how", ["missing", "folder", "pipe", "device", "loop", "dangling", "longer", "swapped"])
@pytest.mark.parametrize("file", ["tree.json", "tensors.safetensors", "objects.pickle"])
def test_what_has_taken_the_place_of_a_file_is_damage(saved: Saved, file: str, how: str) -> None:
    path = saved.newer / file
    content = path.read_bytes()
    path.unlink()
    changes: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
        "longer": lambda: path.write_bytes(content + b"\0"),
        "swapped": lambda: shutil.copy(saved.newer.parent / str(OLDER) / "manifest.json", path),
    }
    changes[how]()
    with pytest.raises(DamagedError):
        decode(saved.directory, NEWER, unpickle=True)
    if file != "objects.pickle":
        assert load_checkpoint(saved.directory.url)["epoch"] == 1


def test_a_name_that_is_no_text_a_link_to_its_own_folder_and_other_peoples_files_are_passed_over(saved: Saved) -> None:
    os.mkdir(os.fsencode(saved.newer.parent) + b"/\xff\xfe")
    with open(os.fsencode(saved.newer) + b"/\xff.bin", "wb"):
        pass
    (saved.newer / "loop").symlink_to(saved.newer.parent)
    (saved.newer.parent / "٠٠٠٠٠١-000001-000000009").mkdir()
    (saved.newer.parent / "٠٠٠٠٠١-000001-000000009" / "manifest.json").write_text("{}")
    (saved.newer.parent / "0000001-000001-000000009").mkdir()
    (saved.newer.parent / "0000001-000001-000000009" / "manifest.json").write_text("{}")
    assert load_checkpoint(saved.directory.url)["epoch"] == 2
    assert saved.directory.claim() == 2


def test_where_all_are_damaged_the_error_says_so_with_the_reason(saved: Saved) -> None:
    for name in (OLDER, NEWER):
        (saved.newer.parent / str(name) / "tree.json").write_bytes(b"")
    with pytest.raises(
        DamagedError, match=r"all 2 checkpoints .* are damaged; remove them to start over.*tree.json has 0"
    ):
        load_checkpoint(saved.directory.url)


# ---------------------------------------------------------------- what a manifest claims


@pytest.mark.parametrize("file", ["tree.json", "tensors.safetensors", "objects.pickle"])
@pytest.mark.parametrize("size", [6 * GIB, 2**63, -1, 1.5, "1", None])
def test_what_a_manifest_claims_is_not_believed_before_the_file_is_seen(saved: Saved, file: str, size: Any) -> None:
    saved.change_manifest(file, bytes=size)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            decode(saved.directory, NEWER, unpickle=True)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b'{"version":0,"files":{}}', b'{"version":-1}', b'{"version":"2"}', b"[" * 100_000,
     b'{"version":2,"files":[]}', b'{"version":2,"files":{"tree.json":{}}}', b"\xff\xfe{}", b'{"version":2}',
     b'{"version":2,"files":{}}', b'{"version":2,"files":{}}' + b" " * 2**21 + b"x"],
)  # fmt: skip
def test_a_manifest_that_is_none_is_damage(saved: Saved, text: bytes) -> None:
    (saved.newer / "manifest.json").write_bytes(text)
    saved.assert_damaged()


def test_a_format_of_the_future_is_an_error_that_names_both(saved: Saved) -> None:
    (saved.newer / "manifest.json").write_text('{"version": 99, "parts": [[["unknown"]]]}')
    with pytest.raises(
        CheckpointError, match="has format 99, and this release of spark_elastic reads formats 1 to 3"
    ) as error:
        load_checkpoint(saved.directory.url)
    assert not isinstance(error.value, DamagedError)


# ---------------------------------------------------------------- forged contents


@pytest.mark.parametrize(
    "node",
    [
        {"$tensor": "nothing"}, {"$tensor": 3}, {"$tensor": ["w"]}, {"$array": "weights.w", "dtype": "O", "shape": [1]},
        {"$array": "weights.w", "dtype": "<f4", "shape": [2**40]}, {"$array": "weights.w", "dtype": "<f4", "shape": [-6]},
        {"$array": "weights.w", "dtype": "<f4", "shape": [-2, -3]}, {"$array": "weights.w"}, {"$scalar": "", "dtype": "<f4"},
        {"$scalar": "AA==", "dtype": "V1"}, {"$unknown": 1}, {"$tuple": 3}, {"$tuple": None}, {"$dict": [[1]]}, {"$dict": 1},
        {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[[], 2]]}, {"$set": [[1]]}, {"$ordered_dict": [["a", 1]], "metadata": 3, "x": 1},
        {"$ordered_dict": [["a", 1], ["a", 2]]}, {"$bytes": "\ud800"}, {"$bytes": "a"}, {"$bytes": 3}, {"$complex": [1]},
        {"$complex": ["a", "b"]}, {"$float": "many"}, {"$float": 1.0}, {"$int": "x"}, {"$int": 1}, {"$dtype": "Tensor"},
        {"$dtype": "load"}, {"$device": "moon"}, {"$size": ["a"]}, {"$size": [1.5]}, {"$object": "x", "kind": 3, "more": 1},
        {"$object": 0, "kind": "a", "$int": "1"}, {"a": 1, "$int": "0x1"}, {"$state_dict": {"$tuple": 1}},
    ],
    ids=lambda node: json.dumps(node)[:60],
)  # fmt: skip
def test_a_forged_tree_is_damage(saved: Saved, node: Any) -> None:
    saved.change_tree(objects={"epoch": 2, "forged": [node]})
    saved.assert_damaged()


def test_an_object_that_is_not_in_its_file_is_damage(saved: Saved) -> None:
    for number in (1, -2, 2**70, "0"):
        saved.change_tree(objects={"own": {"$object": number, "kind": "x"}})
        with pytest.raises(DamagedError):
            decode(saved.directory, NEWER, unpickle=True)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"null", b"3", b"[]", b"{}", b'{"steps": 1}', b"[" * 200_000, b'{"a":' * 200_000, b"1" * 10_000,
     b'{"steps": "1", "size": 1, "objects": {}}', b'{"steps": 1, "size": true, "objects": {}}',
     b'{"steps": 1, "size": 1, "objects": []}', b'{"steps": 1, "size": 1, "objects": {"_job": 1}}',
     b'{"steps": 1, "steps": 2, "size": 1, "objects": {}}', b'{"steps": 1, "size": 1, "objects": {"a": NaN}}',
     b'{"steps": 1, "size": 1, "objects": {}, "rebound": [3]}', b'{"steps": 1, "size": 1, "objects": {}, "rebound": {}}',
     b'{"steps": 1, "size": 1, "objects": {}, "same": []}', b'{"steps": 1, "size": 1, "objects": {}, "same": {"a": 1}}',
     b'{"steps": 1, "size": 1, "objects": {"a": ' + b'{"$tuple": [' * 50_000 + b"]}" * 50_000 + b"}}"],
    ids=range(21),
)  # fmt: skip
def test_a_tree_that_is_none_is_damage(saved: Saved, text: bytes) -> None:
    saved.replace("tree.json", text)
    saved.assert_damaged()


def test_every_name_that_a_tree_knows_is_a_tensor_of_its_own_or_there(saved: Saved) -> None:
    saved.change_header(lambda header: {name: entry for name, entry in header.items() if name != "weights.w"})
    saved.assert_damaged()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.update(data_offsets=[-24, 0]), lambda w: w.update(data_offsets=[0, 24]),
        lambda w: w.update(data_offsets=[48]),
        lambda w: w.update(data_offsets=[48, 2**62]), lambda w: w.update(data_offsets=["48", "72"]),
        lambda w: w.update(shape=[7]),
        lambda w: w.update(data_offsets=None), lambda w: w.update(shape=None), lambda w: w.update(shape=[-2, -3]),
        lambda w: w.update(shape=[2**40, 2**40]), lambda w: w.update(shape=[2**70, 0], data_offsets=[48, 48]),
        lambda w: w.update(shape=[True, 6]), lambda w: w.update(shape=[2.0, 3.0]), lambda w: w.update(shape="23"),
        lambda w: w.update(dtype="F63"), lambda w: w.update(dtype=None), lambda w: w.update(dtype=["F32"]), lambda w: w.clear(),
        lambda w: w.update(shape=[2**62, 4, 0], data_offsets=[48, 48]), lambda w: w.update(shape=[1] * 5000),
    ],
    ids=range(20),
)  # fmt: skip
def test_a_forged_entry_of_a_tensor_is_damage(saved: Saved, change: Callable[[dict[str, Any]], Any]) -> None:
    assert saved.header()[0]["weights.w"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [48, 72]}
    saved.change_header(lambda header: change(header["weights.w"]))
    saved.assert_damaged()


@pytest.mark.parametrize(
    "dtypes", ['{"weights.b": ["load", [3]]}', '{"weights.b": ["complex128", [4]]}', '{"weights.b": 3}', "[]", "{", "3"]
)
def test_a_forged_table_of_dtypes_is_damage(saved: Saved, dtypes: str) -> None:
    saved.change_header(lambda header: header["__metadata__"].update(dtypes=dtypes))
    saved.assert_damaged()


def test_headers_that_are_none_or_claim_more_than_there_is_are_damage(saved: Saved) -> None:
    _, data = saved.header()
    for text in (b"", b"[]", b"null", b"{", b"[" * 100_000, b'{"__metadata__": 3}', b'{"a": {}, "a": {}}', b"\xff"):
        saved.replace_header(text, data)
        saved.assert_damaged()
    for content in (
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        (6 * GIB).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{",
    ):
        saved.replace("tensors.safetensors", content)
        saved.assert_damaged()


def test_tensors_that_overlap_or_leave_holes_are_damage(saved: Saved) -> None:
    for data in (b"", b"\0" * 71, b"\0" * 73):
        header, _ = saved.header()
        saved.replace_header(json.dumps(header).encode(), data)
        saved.assert_damaged()


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x05.", b"(" * 10_000, pickle.dumps(3), b"\x80\x05]q\xff."])
def test_objects_that_are_no_pickle_are_damage(saved: Saved, content: bytes) -> None:
    saved.replace("objects.pickle", content)
    with pytest.raises(DamagedError):
        decode(saved.directory, NEWER, unpickle=True)
    assert load_checkpoint(saved.directory.url)["epoch"] == 2


def test_objects_whose_class_is_not_here_are_an_error_that_names_it_and_no_damage(saved: Saved) -> None:
    saved.replace("objects.pickle", b"cnowhere_at_all\nThing\n.")
    with pytest.raises(CheckpointError, match="need code that is not here: No module named 'nowhere_at_all'") as error:
        decode(saved.directory, NEWER, unpickle=True)
    assert not isinstance(error.value, DamagedError)


# ---------------------------------------------------------------- the first format


def then(name: str, *fields: Any) -> Any:
    """An instance of a class under its name of then, with the state that a dataclass with slots has."""
    made = THEN[name]()
    made.fields = fields
    return made


THEN: dict[str, Any] = {
    name: type(
        name,
        (),
        {"__module__": "spark_elastic.snapshot", "__qualname__": name, "__getstate__": lambda self: list(self.fields)},
    )
    for name in ("Leaf", "StateDict", "TensorSpec")
}


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
