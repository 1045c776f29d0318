"""What a fit returns of a trained network: its state dict, its other buffers, and the names of other changed attributes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from spark_elastic.worker.module_registers import non_persistent_buffers, same_values

if TYPE_CHECKING:
    from spark_elastic.estimator.plan import Trained

# Attributes that torch itself changes.
_TORCHS = {"training"}
# Larger attributes are not compared.
NUMBERS = 1_000_000


def weights_of(network: torch.nn.Module) -> dict[str, object]:
    """Return the state dict, and the buffers that are left out of it (``persistent=False``)."""
    return {**non_persistent_buffers(network), **network.state_dict()}


def parted_weights(
    network: torch.nn.Module, weights: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Part weights of ``weights_of`` into the state dict and the other buffers, for ``load_weights``. Copies them to the CPU."""
    state = {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }
    others = {name: state.pop(name) for name in non_persistent_buffers(network) if name in state}
    return state, {name: value for name, value in others.items() if isinstance(value, torch.Tensor)}


def load_weights(network: torch.nn.Module, weights: Mapping[str, object], buffers: Mapping[str, torch.Tensor]) -> None:
    """Load a state dict, and the other buffers, which forward may have registered in the meantime."""
    network.load_state_dict(weights)
    for name, value in buffers.items():
        place, _, leaf = name.rpartition(".")
        part = network.get_submodule(place)
        present = part._buffers.get(leaf)
        if present is not None and present.is_contiguous() and _kind(present) == _kind(value):
            present.copy_(value)  # in place, because it may be in several modules
        else:
            part.register_buffer(leaf, value, persistent=False)


def trained_network(network: torch.nn.Module, trained: Trained) -> torch.nn.Module:
    """Return a copy of a network with what a fit has trained. Warns of attributes that the fit has changed and does not keep."""
    network = copy.deepcopy(network)
    load_weights(network, trained.weights, trained.buffers)
    if trained.changed:
        warnings.warn(
            f"attributes of the network ({', '.join(trained.changed)}) were changed by training, and the model has them as "
            "they were before: a fit keeps parameters and buffers, so make buffers of them (register_buffer), unless forward "
            "sets them each time",
            stacklevel=5,
        )
    return network


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


class PlainAttributes:
    """Detects changes in numbers and tensors among module attributes that are neither parameters nor buffers."""

    def __init__(self, network: torch.nn.Module) -> None:
        self._network = network
        self._before = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in _plain(network).items()
        }

    def changed(self) -> tuple[str, ...]:
        """Return the names of attributes whose value differs from the initial one."""
        now = _plain(self._network)
        return tuple(name for name, value in self._before.items() if name in now and not _equal(value, now[name]))


def _plain(network: torch.nn.Module) -> dict[str, object]:
    return {
        f"{place}.{name}" if place else name: value
        for place, part in network.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and name not in _TORCHS and _is_comparable(value) and not _is_made(part, name)
    }


def _is_comparable(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_nested and value.layout is torch.strided and not value.is_meta and value.numel() <= NUMBERS
    return isinstance(value, (int, float))


def _is_made(part: torch.nn.Module, name: str) -> bool:
    """Whether torch computes the attribute from parameters in each forward, such as weight_norm's ``weight``."""
    return any(parameter.startswith(f"{name}_") for parameter in part._parameters)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and same_values(one, other.to(one.device))
    return type(one) is type(other) and (one == other or (one != one and other != other))
