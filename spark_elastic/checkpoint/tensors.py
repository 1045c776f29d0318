"""Files of tensors in the layout of safetensors, which many libraries read: a JSON header, then the bytes of each tensor.

The files are written and read in pieces, so that no second copy of a state is needed in memory. A tensor of a dtype that
safetensors does not have is stored as bytes (``U8``); ``__metadata__`` then gives its dtype and shape under ``dtypes``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from spark_elastic._json import Json
from spark_elastic.checkpoint.directory import PIECE_BYTES
from spark_elastic.checkpoint.strict_json import load_json

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The dtypes of the oldest release of safetensors still in use; a reader refuses a file with a dtype that it does not know.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {**{code: dtype for dtype, code in _CODES.items()}, "C64": torch.complex64}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
# The limit that safetensors itself sets.
_MOST_HEADER_BYTES = 100_000_000


def file_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[Buffer]:
    """Yield the bytes of a file of contiguous tensors. Tensors on a GPU are copied on a separate stream, beside its work."""
    # The widest dtypes come first, so that every tensor is aligned to the size of its elements.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    yield _header(ordered)
    for _, tensor in ordered:
        aside = torch.cuda.stream(torch.cuda.Stream(tensor.device)) if tensor.is_cuda else nullcontext()
        for piece in raw(tensor).split(PIECE_BYTES):
            with aside:
                host = piece.cpu()
            yield host.numpy()


class TensorRoom:
    """Room for a file of tensors, allocated as the file is read; afterwards ``tensors`` holds them by name.

    size: the size of the file. Raises ``ValueError``, before any room is allocated, if the header does not agree with it.
    """

    def __init__(self, size: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._size = size

    def __iter__(self) -> Iterator[memoryview]:
        length = bytearray(_LENGTH_BYTES)
        yield memoryview(length)
        size = int.from_bytes(length, "little")
        room = self._size - _LENGTH_BYTES - size
        if room < 0 or size > _MOST_HEADER_BYTES:
            raise ValueError(f"a file of {self._size:,} bytes cannot have a header of {size:,}")
        header = bytearray(size)
        yield memoryview(header)
        for name, dtype, shape in _parse(bytes(header), room):
            flat = torch.empty(math.prod(shape), dtype=dtype)
            self.tensors[name] = shaped(flat, shape)
            yield raw(flat).numpy().data


def load_file(path: str) -> dict[str, torch.Tensor]:
    """Read a file on this machine. Raises ``ValueError`` if it is not a file of tensors."""
    room = TensorRoom(os.path.getsize(path))
    with open(path, "rb") as file:
        for piece in room:
            if file.readinto(piece) != len(piece):
                raise ValueError("the file ends early")
    return room.tensors


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8)


def _header(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, Json] = {}
    others, end = {}, 0
    for name, tensor in tensors:
        code, shape, start = _CODES.get(tensor.dtype), list(tensor.shape), end
        end += tensor.numel() * tensor.element_size()
        if code is None:
            others[name] = [str(tensor.dtype).removeprefix("torch."), shape]
            code, shape = "U8", [end - start]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    metadata = {"format": "pt", **({"dtypes": json.dumps(others)} if others else {})}
    text = json.dumps({_METADATA: metadata, **entries}).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _parse(header: bytes, room: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return (name, dtype, shape) of the tensors in the order of their bytes.

    Raises ``ValueError`` unless the tensors fill exactly ``room`` bytes.
    """
    try:
        return _entries(header, room)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _entries(header: bytes, room: int) -> list[tuple[str, torch.dtype, list[int]]]:
    entries = load_json(header)
    others = load_json(entries.pop(_METADATA, {}).get("dtypes", "{}").encode())
    if type(others) is not dict:
        raise ValueError(f"its table of dtypes is {others!r}")
    found, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if name in others:
            dtype, shape = dtype_of(others[name][0]), others[name][1]
        start, stop = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
            raise ValueError(f"tensor {name!r} has the offsets {start!r} and {stop!r} and the shape {shape!r}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes {start:,} to {stop:,} are not those of tensor {name!r}")
        found.append((name, dtype, shape))
        end = stop
    if end != room:
        raise ValueError(f"its tensors have {end:,} bytes, and the file {room:,}")
    return found


def dtype_of(name: object) -> torch.dtype:
    """Return torch's dtype with this name. Raises ``ValueError`` if there is none."""
    dtype = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch ({torch.__version__})")
    return dtype


def shaped(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """View a tensor in a shape with the same number of elements. Raises ``ValueError`` if torch refuses the shape."""
    try:
        return flat.view(tuple(shape))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"a tensor cannot have the shape {list(shape)}") from error
