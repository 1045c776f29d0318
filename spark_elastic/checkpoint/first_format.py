"""Reads the first format of checkpoints, which named our classes by their modules at the time.

``skeleton.pt`` holds the tree, which ``torch.load(weights_only=True)`` reads without running code; ``tensors.bin`` holds the
tensors, one after the other. The classes here stand in for the classes that the tree names, wherever those are now.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from spark_elastic.checkpoint.skeleton import WRAPPER_MARK, StateDict, map_tree
from spark_elastic.checkpoint.tensors import raw, shaped
from spark_elastic.checkpoint.tree import OpaqueObject

SKELETON, TENSORS = "skeleton.pt", "tensors.bin"


class _Named:
    """An instance of a class of the first release, as the values of its fields in order."""

    fields: tuple[Any, ...] = ()

    def __setstate__(self, state: Iterable[object]) -> None:
        self.fields = tuple(state)


def _stand_in(path: str) -> type[_Named]:
    module, _, name = path.rpartition(".")
    return type(name, (_Named,), {"__module__": module, "__qualname__": name})


_StateDict = _stand_in("spark_elastic.snapshot.StateDict")
_Leaf = _stand_in("spark_elastic.snapshot.Leaf")
_TensorSpec = _stand_in("spark_elastic.snapshot.TensorSpec")
_OpaqueObject = _stand_in("spark_elastic.checkpoint.content.OpaqueObject")


def read_skeleton(data: bytes) -> tuple[object, list[tuple[torch.dtype, str, tuple[int, ...]]]]:
    """Return the tree, and (dtype, device, shape) of each of its tensors. Damage may raise any kind of error."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > len(data):
            raise ValueError(f"{SKELETON} claims more than it holds")
    with torch.serialization.safe_globals([_Leaf, _OpaqueObject, _StateDict, _TensorSpec]):
        skeleton, specs = torch.load(io.BytesIO(data), weights_only=True)
    return skeleton, [_spec(*spec.fields) for spec in specs]


class TensorRoom:
    """Room for tensors of these specs, allocated as they are read. Raises ``ValueError`` unless they fill ``size`` bytes."""

    def __init__(self, specs: Sequence[tuple[torch.dtype, str, tuple[int, ...]]], size: int) -> None:
        claimed = sum(math.prod(shape) * dtype.itemsize for dtype, _, shape in specs)
        if claimed != size:
            raise ValueError(f"{TENSORS} has {size:,} bytes and its tensors {claimed:,}")
        self.tensors: list[torch.Tensor] = []
        self._specs = specs

    def __iter__(self) -> Iterator[memoryview]:
        for dtype, _, shape in self._specs:
            flat = torch.empty(math.prod(shape), dtype=dtype)
            self.tensors.append(shaped(flat, shape))
            yield raw(flat).numpy().data


def rebuild(skeleton: object, tensors: Sequence[torch.Tensor], objects: Sequence[object] | None) -> object:
    """Put tensors and objects back into the tree."""

    def give(value: object) -> object:
        if type(value) is _StateDict:
            return StateDict(_marked(map_tree(give, *value.fields)))
        if type(value) is _Leaf:
            return tensors[_index(*value.fields)]
        if type(value) is _OpaqueObject:
            kind, number = value.fields
            return OpaqueObject(kind, number) if objects is None else objects[_index(number)]
        return value

    return map_tree(give, skeleton)


def _marked(content: Any) -> object:
    """Mark the weights of a wrapped model, which this format does not distinguish from a part named ``module``."""
    facts = getattr(content, "_metadata", {})
    if content and facts.get("module") and all(str(name).startswith("module.") for name in content):
        facts[""] = {**facts[""], WRAPPER_MARK: True}
    return content


def _spec(dtype: object, device: object, shape: Iterable[object]) -> tuple[torch.dtype, str, tuple[int, ...]]:
    if not isinstance(dtype, torch.dtype) or type(device) is not str:
        raise ValueError(f"a tensor has the dtype {dtype!r} and the device {device!r}")
    return dtype, device, tuple(map(_index, shape))


def _index(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size or a place")
    return number
