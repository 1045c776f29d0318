"""The tree of a state as JSON: everything except its tensors, in a form that any language can read.

Null, booleans, strings, finite floats, integers below 2**53, lists, and dicts whose keys are strings stand for themselves.
Anything else is an object with one name that begins with ``$``; docs/formats.md lists these. Tensors and NumPy arrays are
represented by their name in the file of tensors, and objects that only code could bring back by their place in
``objects.pickle``.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch

from spark_elastic._json import Json
from spark_elastic._text import as_utf8
from spark_elastic.checkpoint.skeleton import Leaf, PartOfDict, StateDict
from spark_elastic.checkpoint.tensors import dtype_of, raw

Dict = TypeVar("Dict", bound="dict[object, object]")

# Every reader of JSON returns integers below this unchanged.
_EXACT = 2**53
# Kinds of NumPy dtypes that their bytes represent fully: bool, integers, floats, complex numbers, times, bytes and text.
_NUMPY_KINDS = "biufcmMSU"


@dataclass(frozen=True, slots=True)
class OpaqueObject:
    """Stands for an object that only code could bring back: an instance of a class, or a generator."""

    kind: str
    number: int


class TreeEncoder:
    """Encodes a tree whose tensors are ``Leaf``s. ``tensors`` and ``objects`` collect what goes into separate files.

    ``dicts`` has the encoded entries of each ``PartOfDict``, to which more may be added.
    """

    def __init__(self, views: Sequence[torch.Tensor], devices: Sequence[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: list[object] = []
        self.dicts: list[list[Json]] = []
        self._views = views
        self._devices = devices

    def encode(self, value: object, path: str = "") -> Json:
        """Return the JSON that represents a value; ``path`` names the tensors in it."""
        kind = type(value)
        if value is None or type(value) is bool or type(value) is str:
            return value
        encode = _ENCODERS.get(kind)
        if encode is not None:
            return encode(self, value, path)
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
            return self._tensor(value.detach().contiguous(), str(value.device), path, False)
        if type(value) is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
            content = torch.empty(value.nbytes, dtype=torch.uint8)
            content.numpy().data[:] = value.tobytes()
            return {"$array": self._keep(content, path), "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS and kind is value.dtype.type:
            return {"$scalar": _text(value.tobytes()), "dtype": value.dtype.str}
        self.objects.append(value)
        return {"$object": len(self.objects) - 1, "kind": f"{kind.__module__}.{kind.__qualname__}"}

    def _leaf(self, leaf: Leaf, path: str) -> Json:
        return self._tensor(self._views[leaf.index], self._devices[leaf.index], path, leaf.is_learned)

    def _tensor(self, tensor: torch.Tensor, device: str, path: str, is_learned: bool) -> Json:
        name, kind = self._keep(tensor, path), device.partition(":")[0]
        place: dict[str, Json] = {} if kind == "cpu" else {"device": kind}
        return {"$tensor": name, **place, **({"requires_grad": True} if is_learned else {})}

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        """Name a tensor after its path, changed so that every JSON reader accepts the name and no other tensor has it."""
        plain = as_utf8(path)
        name, number = plain, 1
        while name in self.tensors or name.startswith("__"):
            number += 1
            name = f"{plain.lstrip('_')}~{number}"
        self.tensors[name] = tensor
        return name

    def _list(self, value: Sequence[object], path: str) -> list[Json]:
        return [self.encode(entry, f"{path}.{place}") for place, entry in enumerate(value)]

    def _pairs(self, value: Mapping[Any, object], path: str) -> list[Json]:
        return [[self.encode(key, path), self.encode(entry, _below(path, key))] for key, entry in value.items()]

    def _dict(self, value: Mapping[object, object], path: str) -> Json:
        names = [key for key in value if type(key) is str and not key.startswith("$")]
        if len(names) == len(value):
            return {name: self.encode(value[name], _below(path, name)) for name in names}
        return {"$dict": self._pairs(value, path)}

    def _part_of_dict(self, value: PartOfDict, path: str) -> Json:
        self.dicts.append(self._pairs(value.entries, path))
        return {"$dict": self.dicts[-1]}

    def _ordered(self, value: OrderedDict[object, object], path: str) -> Json:
        encoded: dict[str, Json] = {"$ordered_dict": self._pairs(value, path)}
        if hasattr(value, "_metadata"):  # torch keeps the versions of a module's parts there
            encoded["metadata"] = self.encode(value._metadata, _below(path, "_metadata"))
        return encoded


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _integer(encoder: TreeEncoder, value: int, path: str) -> Json:
    return value if -_EXACT < value < _EXACT else {"$int": hex(value)}


def _number(encoder: TreeEncoder, value: float, path: str) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


_ENCODERS: dict[type, Callable[[TreeEncoder, Any, str], Json]] = {
    int: _integer,
    float: _number,
    list: TreeEncoder._list,
    dict: TreeEncoder._dict,
    OrderedDict: TreeEncoder._ordered,
    Leaf: TreeEncoder._leaf,
    PartOfDict: TreeEncoder._part_of_dict,
    StateDict: lambda encoder, value, path: {"$state_dict": encoder.encode(value.content, path)},
    tuple: lambda encoder, value, path: {"$tuple": encoder._list(value, path)},
    set: lambda encoder, value, path: {"$set": encoder._list(tuple(value), path)},
    frozenset: lambda encoder, value, path: {"$frozenset": encoder._list(tuple(value), path)},
    bytes: lambda encoder, value, path: {"$bytes": _text(value)},
    complex: lambda encoder, value, path: {"$complex": encoder._list((value.real, value.imag), path)},
    torch.dtype: lambda encoder, value, path: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda encoder, value, path: {"$device": str(value)},
    torch.Size: lambda encoder, value, path: {"$size": list(value)},
}


class TreeDecoder:
    """Decodes what ``TreeEncoder`` has encoded. Any other tree may raise any kind of error.

    device: where to move tensors that were not on the CPU; None leaves them on the CPU. objects: the objects from
    ``objects.pickle``; None puts an ``OpaqueObject`` in place of each.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], objects: Sequence[object] | None, device: torch.device | None
    ) -> None:
        self._tensors = tensors
        self._objects = objects
        self._device = device

    def decode(self, node: object) -> Any:
        """Return the value that a node of the JSON tree represents."""
        if type(node) is list:
            return [self.decode(entry) for entry in node]
        if type(node) is not dict:
            return node
        tag = next((name for name in node if name.startswith("$")), None)
        if tag is None:
            return {key: self.decode(entry) for key, entry in node.items()}
        return _DECODERS[tag](self, node.pop(tag), **node)

    def _tensor(self, name: str, device: str = "cpu", requires_grad: bool = False) -> torch.Tensor:
        tensor = self._tensors[name]
        placed = tensor if device == "cpu" or self._device is None else tensor.to(self._device)
        return placed.requires_grad_() if requires_grad else placed

    def _array(self, name: str, dtype: str, shape: list[int]) -> numpy.ndarray:
        data, kind = raw(self._tensors[name]).numpy().tobytes(), _numpy_dtype(dtype)
        if len(data) != math.prod(shape) * kind.itemsize:
            raise ValueError(f"array {name!r} of {dtype} cannot have the shape {shape}")
        return numpy.frombuffer(data, kind).reshape(shape).copy() if data else numpy.empty(shape, kind)

    def _complex(self, parts: list[object]) -> complex:
        real, imaginary = (self.decode(part) for part in parts)
        return complex(real, imaginary)

    def _pairs(self, kind: type[Dict], pairs: list[tuple[object, object]]) -> Dict:
        found = kind((self.decode(key), self.decode(entry)) for key, entry in pairs)
        if len(found) != len(pairs):
            raise ValueError("a dict has the same key twice")
        return found

    def _ordered(self, pairs: list[tuple[object, object]], metadata: object = None) -> OrderedDict[object, object]:
        found = self._pairs(OrderedDict, pairs)
        if metadata is not None:
            vars(found)["_metadata"] = self.decode(metadata)
        return found

    def _object(self, number: int, kind: str) -> object:
        return OpaqueObject(kind, number) if self._objects is None else self._objects[number]


def _numpy_dtype(name: object) -> numpy.dtype[numpy.generic]:
    dtype = numpy.dtype(str(name))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"{name!r} is not among the dtypes that checkpoints store")
    return dtype


def _scalar(data: bytes, dtype: numpy.dtype[numpy.generic]) -> object:
    return numpy.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()  # an empty text has no bytes


# Each NaN is one of its own, as a dict may have several as keys.
_FLOATS = dict.fromkeys(("nan", "inf", "-inf"), float)

_DECODERS: dict[str, Callable[..., object]] = {
    "$tensor": TreeDecoder._tensor,
    "$array": TreeDecoder._array,
    "$scalar": lambda decoder, text, dtype: _scalar(base64.b64decode(text), _numpy_dtype(dtype)),
    "$state_dict": lambda decoder, node: StateDict(decoder.decode(node)),
    "$dict": lambda decoder, pairs: decoder._pairs(dict, pairs),
    "$ordered_dict": TreeDecoder._ordered,
    "$tuple": lambda decoder, nodes: tuple(decoder.decode(node) for node in nodes),
    "$set": lambda decoder, nodes: {decoder.decode(node) for node in nodes},
    "$frozenset": lambda decoder, nodes: frozenset(decoder.decode(node) for node in nodes),
    "$bytes": lambda decoder, text: base64.b64decode(text, validate=True),
    "$complex": TreeDecoder._complex,
    "$float": lambda decoder, text: _FLOATS[text](text),
    "$int": lambda decoder, text: int(text, 16),
    "$dtype": lambda decoder, name: dtype_of(name),
    "$device": lambda decoder, name: torch.device(name),
    "$size": lambda decoder, sizes: torch.Size(sizes),
    "$object": TreeDecoder._object,
}
