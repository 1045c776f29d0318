"""Files of tensors: a header that does not agree with the bytes behind it is damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tampered_checkpoint import GIB, Saved


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
