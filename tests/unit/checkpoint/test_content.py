"""Whatever has happened to the files of a checkpoint, reading it ends in ``DamagedError``, and the next older one is tried."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tampered_checkpoint import GIB, NEWER, OLDER, Saved

from spark_elastic import DamagedError, load_checkpoint
from spark_elastic.checkpoint.content import decode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.errors import CheckpointError
from tests.unit.checkpoint.test_kept_files import FORMATS, kept

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
