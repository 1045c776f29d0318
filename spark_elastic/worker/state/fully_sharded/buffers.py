"""Buffers of a model that is made again in each generation: they come back as they were at the commit.

Training may replace a buffer by one of another shape or dtype, set one that was None, register another one or delete one. So what
``build`` has made says nothing about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spark_elastic.worker.state.inference import writing_to
from spark_elastic.worker.state.loading import fits


def buffers_of(parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the buffers of a module's parts, uncopied, each once, with its places, also those that are not persistent."""
    numbers: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    places: dict[str, dict[str, tuple[int | None, bool]]] = {}
    for part_name, part in parts.items():
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in numbers:
                numbers[id(buffer)] = len(tensors)
                tensors.append(buffer)
            is_persistent = name not in part._non_persistent_buffers_set
            places.setdefault(part_name, {})[name] = (None if buffer is None else numbers[id(buffer)]), is_persistent
    return {"tensors": tensors, "places": places}


def put_buffers_back(module: nn.Module, kept: Mapping[str, Any]) -> None:
    """Give a module the buffers that ``buffers_of`` has found, as its own. Where a buffer fits, it stays the same object."""
    given: dict[int, torch.Tensor] = {}
    filled: set[int] = set()  # the ids of those that have been written to
    for part_name, part in module.named_modules():
        places = kept["places"].get(part_name, {})
        for name in part._buffers.keys() - places.keys():
            delattr(part, name)
        for name, (number, is_persistent) in places.items():
            present = part._buffers.get(name)
            if name not in part._buffers:
                _free_name(part, name)
            if number is None:
                part.register_buffer(name, None, is_persistent)
                continue
            if number not in given:
                given[number] = kept["tensors"][number]
                if fits(present, given[number]) and id(present) not in filled:
                    with writing_to([present]):
                        given[number] = present.copy_(given[number])
                    filled.add(id(present))
            if given[number] is not present:
                part.register_buffer(name, given[number], is_persistent)


def _free_name(part: nn.Module, name: str) -> None:
    """Delete the ordinary attribute or the parameter that is None in whose place training has registered a buffer."""
    vars(part).pop(name, None)
    if part._parameters.get(name) is None:
        part._parameters.pop(name, None)
