"""Memory that tensors share with the modules and optimizers of a State, which training changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy
import torch

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.reachable import LENGTH
from spark_elastic.worker.checks.unsupported import why_unsupported


def refuse_live(holder: object, addresses: Collection[int], objects: Iterable[object]) -> None:
    """Raise ``TrainingCodeError`` if memory that a copied object holds is that of what optimizers change in these objects.

    Buffers and frozen parameters may be constants that a module was made of.
    """
    for live in objects if addresses else ():
        trained = (
            entry for entry in live_tensors(live) if not isinstance(live, torch.nn.Module) or entry[1].requires_grad
        )
        part = next((part for part, tensor in trained if address_of(tensor) in addresses), None)
        if part is not None:
            raise TrainingCodeError(
                f"a {type(holder).__name__} in the State holds a tensor that shares its memory with {part} of a "
                f"{type(live).__name__}, as those of module.state_dict() do: it changes with every step, and is a copy on other "
                "ranks and after a reset. Copy it before you keep it: copy.deepcopy(…)"
            )


def memory_in(value: object, place: str) -> Iterator[tuple[int, str]]:
    """Yield the addresses of the tensors and arrays in a container, with their places."""
    if isinstance(value, torch.Tensor):
        yield address_of(value), place
    elif isinstance(value, numpy.ndarray):
        yield value.ctypes.data, place
    elif isinstance(value, (dict, list, tuple)) and len(value) <= LENGTH:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from memory_in(entry, f"{place}[{key!r}]")


def address_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none of its own."""
    return 0 if why_unsupported(tensor) is not None else tensor.untyped_storage().data_ptr()


def live_tensors(live: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module or an optimizer, with the names of their places."""
    if isinstance(live, torch.nn.Module):
        yield from live.named_parameters()
        yield from live.named_buffers()
    elif isinstance(live, torch.optim.Optimizer):
        for state in live.state.values():
            if isinstance(state, dict):  # users' optimizers keep other things there, too
                yield from ((str(key), entry) for key, entry in state.items() if isinstance(entry, torch.Tensor))
