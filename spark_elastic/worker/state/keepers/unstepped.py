"""Weights that no optimizer of the State steps: of an average, a teacher, a momentum encoder, or layers that are frozen.

A commit in place rests on the rule that weights change in an optimizer's step and nowhere else. Weights that user code itself
changes break it, at any time between two commits. They are found by a few of their values, at which each commit looks, and
are copied from then on. Weights that stay as they are cost no copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

# How many values of each weight are looked at. Code that changes the weights of a module changes nearly all of them.
LOOKED_AT = 16


class UnsteppedWeights:
    """Watches the unstepped weights of one State's modules, from commit to commit."""

    def __init__(self) -> None:
        # The ids of the weights that optimizers step, and of all that the commit asked for last has no copy of.
        self._stepped: frozenset[int] = frozenset()
        self._uncopied: set[int] = set()
        # By the ids of the modules, as users' modules may have no hash. Another thread may ask what has changed.
        self._modules: dict[int, _Watched] = {}

    def watch(self, weights: Iterable[torch.Tensor]) -> None:
        """Take these weights, and no others, for those that optimizers step."""
        self._stepped = frozenset(map(id, weights))
        self._uncopied = set(self._stepped)

    def is_uncopied(self, weight: torch.Tensor) -> bool:
        """Whether the last commit has no copy of a weight."""
        return id(weight) in self._uncopied

    def to_copy(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return those of a module's weights that the commit being made has to copy, uncopied, by their numbers."""
        unstepped = self._unstepped(weights)
        watched = self._modules.get(id(module))
        if not unstepped:
            self._modules.pop(id(module), None)
            return {}
        if watched is None or watched.module() is not module:
            watched = self._modules[id(module)] = _Watched(weakref.ref(module))
        watched.taken = watched.look(unstepped)
        watched.changes = watched.changes or watched.taken.differs_from(watched.held)
        if watched.changes:
            return {number: weight.detach() for number, weight in unstepped.items()}
        self._uncopied.update(map(id, unstepped.values()))
        return {}

    def settle(self) -> None:
        """Note that the commit for which weights were asked last is complete."""
        for number, watched in list(self._modules.items()):
            watched.held = watched.taken
            if watched.module() is None:
                del self._modules[number]

    def forget(self) -> None:
        """Note that the live weights may be those of another commit: comparing begins anew with the next one."""
        for watched in self._modules.values():
            watched.held = watched.taken = None

    def changed(self, on_devices: bool = True) -> str:
        """Name a weight that has changed since the last commit, which has no copy of it; empty if there is none.

        on_devices: also look at weights on other devices than the CPU, for which a device may be waited for.
        """
        for watched in list(self._modules.values()):
            module, held = watched.module(), watched.held
            if module is None or held is None or watched.changes or not (on_devices or held.is_on_cpu):
                continue
            weights = dict(enumerate(module.parameters()))
            now = watched.look({number: weights[number] for number in held.numbers if number in weights})
            if now.differs_from(held):
                name = [name for name, _ in module.named_parameters()][held.numbers[0]]
                return f"a weight of a {type(module).__name__}, such as {name}"
        return ""

    def _unstepped(self, weights: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            number: weight
            for number, weight in enumerate(weights)
            if id(weight) not in self._stepped and type(weight) is torch.nn.Parameter and weight.numel()
        }


@dataclass(slots=True, eq=False)
class _Watched:
    """A module's unstepped weights.

    changes: whether they have been seen to change. held, taken: some of their values in the last commit, and in the one being
    made; None if they are not known.
    """

    module: weakref.ref[torch.nn.Module]
    changes: bool = False
    held: _Look | None = None
    taken: _Look | None = None
    # Views of the values to look at, for weights that lie where they did.
    _places: list[int] = field(default_factory=list)
    _views: list[list[torch.Tensor]] = field(default_factory=list)

    def look(self, weights: Mapping[int, torch.Tensor]) -> _Look:
        """Look at some values of each weight."""
        places = [weight.data_ptr() for weight in weights.values()]
        if places != self._places:
            views: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for weight in weights.values():
                views.setdefault((weight.dtype, weight.device), []).append(some_of(weight.detach()))
            self._places, self._views = places, list(views.values())
        # As bytes, NaN equals NaN.
        return _Look(list(weights), [torch.cat(views).view(torch.uint8) for views in self._views])


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """Some values of the weights with these numbers, in one tensor per dtype and device."""

    numbers: list[int]
    values: list[torch.Tensor]

    @property
    def is_on_cpu(self) -> bool:
        """Whether all of the weights are."""
        return all(values.device.type == "cpu" for values in self.values)

    def differs_from(self, before: _Look | None) -> bool:
        """Whether the same weights had other values before. Other weights, as after layers were thawed, tell nothing."""
        if before is None or before.numbers != self.numbers:
            return False
        return not all(map(torch.equal, self.values, before.values))


def some_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of some values of a weight: all over a contiguous weight, else at its beginning."""
    while not weight.is_contiguous():
        weight = weight[0]
    return weight.view(-1)[:: max(weight.numel() // LOOKED_AT, 1)]
