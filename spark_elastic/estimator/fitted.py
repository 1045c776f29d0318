"""What a fit takes back from a trained network: its state dict, its other buffers, and word of attributes that are neither."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# What torch itself changes.
_TORCHS = {"training"}


def weights_of(network: torch.nn.Module) -> dict[str, object]:
    """Return the state dict, and the buffers that are left out of it (``persistent=False``)."""
    weights: dict[str, object] = dict(network.state_dict())
    return {**{name: buffer for name, buffer in network.named_buffers() if name not in weights}, **weights}


def load_weights(network: torch.nn.Module, weights: Mapping[str, object]) -> None:
    """Load what ``weights_of`` has returned, or a state dict."""
    kept = network.state_dict()
    others = {name: value for name, value in weights.items() if name not in kept and _is_buffer(network, name)}
    network.load_state_dict({name: value for name, value in weights.items() if name not in others})
    for name, value in others.items():
        place, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(place), leaf, value)


def _is_buffer(network: torch.nn.Module, name: str) -> bool:
    place, _, leaf = name.rpartition(".")
    modules = dict(network.named_modules())
    return place in modules and leaf in modules[place]._buffers


class PlainAttributes:
    """Notices attributes of a network's modules that are numbers or tensors, and neither parameters nor buffers, and change."""

    def __init__(self, network: torch.nn.Module) -> None:
        self._network = network
        self._before = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in _plain(network).items()
        }

    def changed(self) -> tuple[str, ...]:
        """Return the names of attributes that have another value than in the beginning."""
        now = _plain(self._network)
        return tuple(name for name, value in self._before.items() if name in now and not _equal(value, now[name]))


def _plain(network: torch.nn.Module) -> dict[str, object]:
    return {
        f"{place}.{name}" if place else name: value
        for place, part in network.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and name not in _TORCHS and isinstance(value, (torch.Tensor, int, float))
    }


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))
    return type(one) is type(other) and (one == other or (one != one and other != other))
