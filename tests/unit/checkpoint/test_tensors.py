"""Files of tensors: what is written comes back, and a header that does not agree with the bytes behind it is damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tampered_checkpoint import GIB, Saved

from spark_elastic.checkpoint.tensors import file_pieces, load_file, raw


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


def test_tensors_of_any_dtype_come_back_from_a_file_that_safetensors_reads_too(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "narrow": torch.ones(2, 2).to(torch.float8_e5m2),
        "none": torch.zeros(0, 4, dtype=torch.int16),
        "number": torch.tensor(2**62),
        "wide": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
    }
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(b"".join(bytes(piece) for piece in file_pieces(tensors)))
    found = load_file(str(path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(found[name]), raw(tensor))
    theirs = safetensors.torch.load_file(path)
    assert torch.equal(theirs["half"], tensors["half"])
    assert theirs["wide"].tolist() == raw(tensors["wide"]).tolist(), "it has no such dtype, and gets the bytes"


def test_a_file_that_ends_early_is_no_file_of_tensors(tmp_path: Path) -> None:
    content = b"".join(bytes(piece) for piece in file_pieces({"a": torch.ones(4)}))
    (tmp_path / "cut").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="its tensors have 16 bytes, and the file 15"):
        load_file(str(tmp_path / "cut"))
