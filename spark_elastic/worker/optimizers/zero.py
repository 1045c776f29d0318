"""ZeroRedundancyOptimizer: each rank keeps the optimizer state of some parameters, and updates these for all ranks.

Whole parameters are dealt out to as many parts as there are ranks, so that each is updated by the same arithmetic as in the
plain optimizer. Gradients are the same on all ranks, so a rank can also update the parts of its neighbours in the ring, as many
as the State's redundancy says. That keeps a second copy of their state up to date without network traffic, so the loss of a
rank takes no state with it. The first holder of a part shares its new weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spark_elastic.errors import RanksDifferError, SparkElasticError, TrainingCodeError
from spark_elastic.worker.context import current_world
from spark_elastic.worker.job import current_job
from spark_elastic.worker.optimizers.memory_layout import laid_out
from spark_elastic.worker.state.snapshot import find_objects
from spark_elastic.worker.world import translated_errors

# Weights of at least this many bytes are sent in place; smaller ones of one part are packed together first.
LARGE = 1 << 16
# How many elements of each parameter that two ranks update are compared.
PIECE = 1 << 12
# On a GPU, where the host waits for a comparison, one in so many steps has one. A prime, which fits no period of a user's loop.
SELDOM = 61
# The fraction of an update by which two ranks may differ: more than processors differ in the last bits.
TOLERANCE = 0.01


def deal(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the part of each parameter. The largest parameters are dealt first, each to the smallest part. Pure."""
    loads = [0] * parts
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        part = loads.index(min(loads))
        dealt[number] = part
        loads[part] += sizes[number]
    return dealt


def divides(size: int, redundancy: int) -> bool:
    """Whether a world of this size divides optimizers; in smaller worlds each rank would keep every part. Pure."""
    return size > redundancy + 1


@dataclass(frozen=True, slots=True)
class Division:
    """Which ranks keep which parts of an optimizer's state. There are as many parts as ranks."""

    rank: int
    # By rank, the parts that it keeps.
    held: tuple[tuple[int, ...], ...]
    # By part, the rank that shares the new weights.
    owners: tuple[int, ...]

    @property
    def of(self) -> int:
        """The number of parts."""
        return len(self.owners)


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """An ``optimizer_class(params, **defaults)`` whose state is divided among the ranks (ZeRO, stage 1) of every generation.

        optimizer = se.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        state = se.TorchState(model, optimizer)

    Args:
        params: the parameters or parameter groups, as for any optimizer.
        optimizer_class: an optimizer class, or a function that makes an optimizer from the parameters.
        defaults: keyword arguments of ``optimizer_class``, such as ``lr=1e-3``.

    Each of N ranks keeps about 2/N of the optimizer state (3/N with ``redundancy=2``), so the loss of one rank loses none of
    it. The weights after each step have the same bits as with the plain optimizer. ``step`` ends with broadcasts of the new
    weights, and blocks until all ranks have stepped; it raises ``WorkerLostError`` when a rank is lost. Parameter groups,
    schedulers, GradScaler and ``clip_grad_norm_`` work as with the plain optimizer, because all ranks have all gradients.

    The optimizer has to update each parameter independently, from its own gradient and state. So LBFGS is refused, and so are
    optimizers with a ``state_dict`` or ``load_state_dict`` of their own, and a step in which an optimizer changes its own
    settings or keeps state that belongs to no parameter. A step that combines several parameters, as in the norm of all
    gradients, sees only those of its rank. Neighbours then get different weights for the same parameters, and so they do if
    gradients were not averaged. They compare all of these at steps 1, 2, 4, 8 … of a generation and one at each other step, on
    GPUs at each 61st, and raise ``RanksDifferError``.

    The state is divided inside an elastic function whose State has the optimizer, in worlds of more than two ranks (three with
    ``redundancy=2``). Everywhere else, and under ``run(elastic=False)``, this is the plain optimizer. While the state is
    divided, ``add_param_group`` is refused, and so are parameters that change their order, such as two that change places
    between groups. A wrapper beside it in the State, such as one for Lookahead, leaves it out of its own ``state_dict``; a job
    that may divide it refuses one that does not. Hooks of torch for the steps of all optimizers see both this step and the
    optimizer's inside it, on each rank that updates parameters.
    """

    def __init__(
        self,
        params: Iterable[object],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **defaults: object,
    ) -> None:
        """Make the plain optimizer, which keeps its whole state until the elastic function divides it. Does not block.

        Raises ``TypeError`` if ``optimizer_class`` makes no optimizer, ``ValueError`` if its optimizer does not update each
        parameter independently, such as LBFGS, or has a state dict of its own, and whatever ``optimizer_class`` raises.
        """
        if not callable(optimizer_class):
            raise TypeError(
                f"optimizer_class must be a class of optimizers, or a function that makes one, not {optimizer_class!r}"
            )
        inner = optimizer_class(params, **defaults)
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"optimizer_class must make a torch.optim.Optimizer, and made a {type(inner).__name__}")
        if isinstance(inner, (torch.optim.LBFGS, ZeroRedundancyOptimizer)):
            raise ValueError(
                f"{type(inner).__name__} does not update each parameter by itself; use it without ZeroRedundancyOptimizer"
            )
        if _saves_more(inner):
            raise ValueError(
                f"{type(inner).__name__} has a state_dict() or load_state_dict() of its own, which may keep state that belongs "
                "to no parameter and cannot be divided among ranks; use it without ZeroRedundancyOptimizer"
            )
        # The optimizer that updates the parameters of this rank; its groups have this one's settings.
        self._inner: torch.optim.Optimizer | None = None
        self._division: Division | None = None
        # The parameters when the state was divided, with their ids and sizes then, and the part of each.
        self._divided: list[weakref.ref[torch.Tensor]] = []
        self._places: list[tuple[int, int]] = []
        self._dealt: list[int] = []
        # The number of steps since then.
        self._steps = 0
        self._is_asked = False
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.state = inner.state
        inner.is_part = True  # type: ignore[attr-defined]  # see the function of this name
        self._inner = inner

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer whose state is divided, which updates the parameters of this rank."""
        assert self._inner is not None, "it is made with this optimizer"
        return self._inner

    @property
    def plain_class(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer whose state is divided."""
        return type(self.inner)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters and exchange them with the other ranks. Returns the result of ``closure``, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_place()
        compared = self._choose_compared()
        before = _pieces(compared)
        self._update()
        updated = _pieces(compared)
        if self._division is not None:
            self._share(self._division)
        self._compare(before, updated, _pieces(compared))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the plain optimizer.

        While the state is divided, this is a collective: all ranks have to call it, even if only one uses the result. Each rank
        gets the whole state, in memory of its own.
        """
        self._is_asked = True
        if self._division is None:
            return super().state_dict()
        self._check_place()
        return self.whole_state_dict(self._gather(self._division))

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a plain optimizer's state. While it is divided, all ranks have to load the same; each keeps its parts."""
        super().load_state_dict(state_dict)
        groups = [dict(group) for group in self.param_groups]
        # The inner optimizer knows the formats of older releases.
        self.inner.__setstate__({"state": self.state, "param_groups": groups})
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        self._drop()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a parameter group, as with the plain optimizer. Raises ``SparkElasticError`` while the state is divided."""
        if self._division is not None:
            raise SparkElasticError(
                "a parameter group cannot be added while the optimizer's state is divided among ranks: give "
                "ZeroRedundancyOptimizer all parameters above the elastic function; those that require no gradients cost nothing"
            )
        super().add_param_group(param_group)
        if self._inner is not None:
            self._inner.add_param_group(dict(self.param_groups[-1]))

    def __getstate__(self) -> NoReturn:
        raise TypeError("a ZeroRedundancyOptimizer can be neither copied nor pickled; use its state_dict()")

    # ------------------------------------------------------------------ for the State

    @property
    def division(self) -> Division | None:
        """Which ranks keep which parts; None while each rank keeps everything."""
        return self._division

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order by which state dicts number them."""
        return list({id(p): p for group in self.param_groups for p in group["params"]}.values())

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    def held_state(self) -> dict[int, dict[str, Any]]:
        """Return the state that this rank keeps, by parameter number, without copying."""
        parameters = self.parameters
        self._check_order(parameters)
        return {number: self.state[p] for number, p in enumerate(parameters) if p in self.state}

    def divide(self, division: Division | None, held: Mapping[int, dict[str, object]] | None = None) -> None:
        """Keep only this rank's parts from now on. ``held`` is their state; by default it is taken from the present state."""
        self._division = division
        parameters = self.parameters
        self._divided, self._places = list(map(weakref.ref, parameters)), _ids_and_sizes(parameters)
        self._dealt = [] if division is None else deal(self.sizes, division.of)
        self._steps = 0
        if held is not None:
            self.state.clear()
            self.state.update({parameters[n]: laid_out(held[n], parameters[n]) for n in sorted(held)})
        self._drop()

    def undivide(self) -> None:
        """Drop all state if it was divided: the whole state is loaded next, or training starts over."""
        if self._division is not None:
            self.divide(None, {})

    def whole_state_dict(self, whole: Mapping[int, dict[str, object]]) -> dict[str, object]:
        """Return the state dict of a plain optimizer with this state, given by parameter number."""
        parameters, held = self.parameters, self.state
        self.state = type(held)(dict, {parameters[number]: whole[number] for number in sorted(whole)})
        try:
            return super().state_dict()
        finally:
            self.state = held

    # ------------------------------------------------------------------ inside

    def _check_place(self) -> None:
        job = current_job()
        if self._division is not None and job is not None and job.finished:
            raise SparkElasticError(
                "the optimizer's state is divided among ranks that have left the elastic function: call step() and "
                "state_dict() inside it, on all ranks"
            )
        self._check_order(self.parameters)

    def _check_order(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ``TrainingCodeError`` if parts are no longer those of the parameters. A new one may take an old one's place."""
        if self._division is None or _ids_and_sizes(parameters) == self._places:
            return
        divided = [reference() for reference in self._divided]
        places = {id(parameter): number for number, parameter in enumerate(divided) if parameter is not None}
        has_moved = any(places.get(id(p), number) != number for number, p in enumerate(parameters))
        if has_moved or self.sizes != [size for _, size in self._places]:
            raise TrainingCodeError(
                "parameters of a ZeroRedundancyOptimizer have changed their number, sizes or order while its state was divided "
                "among ranks by their places in the groups: arrange them above the elastic function and change only the groups' "
                "settings inside, or use the plain optimizer"
            )

    def _is_mine(self, number: int) -> bool:
        division = self._division
        return division is None or self._dealt[number] in division.held[division.rank]

    def _drop(self) -> None:
        """Free the state that other ranks keep."""
        for number, parameter in enumerate(self.parameters):
            if not self._is_mine(number):
                self.state.pop(parameter, None)

    def _update(self) -> None:
        """Let the plain optimizer step with the parameters of this rank."""
        inner = self.inner
        if getattr(inner.step, "_wrapped_by_lr_sched", False):  # its groups' settings follow this one's
            raise TrainingCodeError(
                f"a learning rate scheduler has the {type(inner).__name__} inside a ZeroRedundancyOptimizer, where it changes "
                "nothing: give it the ZeroRedundancyOptimizer"
            )
        mine = {id(parameter) for number, parameter in enumerate(self.parameters) if self._is_mine(number)}
        inner.state = self.state
        if len(inner.param_groups) != len(self.param_groups):  # a restore has removed groups that no commit holds
            inner.param_groups[:] = [dict(group) for group in self.param_groups]
        given = []
        for group, part in zip(self.param_groups, inner.param_groups, strict=True):
            given.append({name: value for name, value in group.items() if name not in ("params", "param_names")})
            part.update(given[-1])
            part["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
        if any(part["params"] for part in inner.param_groups):
            self._step_part(inner)
        for key in self.state:
            if not isinstance(key, torch.Tensor):
                raise SparkElasticError(
                    f"{type(inner).__name__} keeps state of its own under {key!r}, which belongs to no parameter, and cannot be "
                    "divided among ranks; use it without ZeroRedundancyOptimizer"
                )
        for settings, part in zip(given, inner.param_groups, strict=True):
            for name, value in settings.items():
                if part[name] is not value and part[name] != value:
                    raise SparkElasticError(
                        f"{type(inner).__name__} changes its setting {name} in a step, from all parameters together, and cannot "
                        "be divided among ranks; use it without ZeroRedundancyOptimizer"
                    )

    def _choose_compared(self) -> list[torch.Tensor]:
        """Choose parameters that this rank both updates and receives from another: at steps 1, 2, 4, 8 … all, else one in turn.

        An error at a step in between would else leave no trace, because ``_share`` makes weights equal again.
        """
        division = self._division
        if division is None:
            return []
        self._steps += 1
        twice = [
            parameter.detach()
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None
            and self._is_mine(number)
            and division.owners[self._dealt[number]] != division.rank
        ]
        if not twice or self._steps & (self._steps - 1) == 0:
            return twice
        turn, rest = divmod(self._steps, SELDOM) if twice[0].is_cuda else (self._steps, 0)
        return [] if rest else [twice[turn % len(twice)]]

    def _compare(self, before: list[torch.Tensor], updated: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """Raise ``RanksDifferError`` if another rank has updated parameters differently."""
        for was, mine, theirs in zip(before, updated, received, strict=True):
            rounding = 4 * torch.finfo(theirs.dtype).eps * theirs.double().norm()
            if (mine.double() - theirs).norm() > TOLERANCE * (theirs.double() - was).norm() + rounding:
                name = type(self._inner).__name__
                raise RanksDifferError(
                    f"two ranks updated the same parameters with {name} and got different weights. The usual causes: gradients "
                    "that are not averaged (a model that is called without se.DistributedDataParallel, a step after a backward "
                    f"under no_sync()), settings that differ between ranks, such as the learning rate, or a {name} that computes "
                    "something from several parameters in a step, such as the norm of all gradients (use it without "
                    "ZeroRedundancyOptimizer, or clip before the step)"
                )

    def _step_part(self, inner: torch.optim.Optimizer) -> None:
        """Step this rank's parameters. Raises ``SparkElasticError`` if that clears gradients: those of the others would add up.

        Whether gradients are set to 0 is looked at in the first of them, at steps 1, 2, 4, 8 ….
        """
        parts = inner.param_groups if self._division is not None else []
        own = [parameter for part in parts for parameter in part["params"] if parameter.grad is not None]
        looks = bool(own) and self._steps.bit_count() == 1 and not own[0].grad.is_sparse and bool(own[0].grad.any())
        inner.step()
        if any(parameter.grad is None for parameter in own) or (looks and not own[0].grad.any()):
            raise SparkElasticError(
                f"{type(inner).__name__} clears gradients in its step, which is given only some of the parameters on each "
                "rank: leave that to zero_grad() in your loop, or use it without ZeroRedundancyOptimizer"
            )

    def _share(self, division: Division) -> None:
        """Send the weights that were updated here to all ranks, and receive the others."""
        works, together = [], dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]]()
        with translated_errors(current_world()), torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                if parameter.grad is None:
                    continue
                owner, weight = division.owners[self._dealt[number]], parameter.detach()
                if weight.is_contiguous() and weight.numel() * weight.element_size() >= LARGE:
                    works.append(dist.broadcast(weight, owner, async_op=True))
                else:
                    together.setdefault((owner, weight.dtype, weight.device), []).append(weight)
            flats = []
            for (owner, _, _), weights in together.items():
                flats.append(torch.cat([weight.reshape(-1) for weight in weights]))
                works.append(dist.broadcast(flats[-1], owner, async_op=True))
            for work in works:
                work.wait()
            for flat, weights in zip(flats, together.values(), strict=True):
                pieces = flat.split([weight.numel() for weight in weights])
                shaped = [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
                torch._foreach_copy_(weights, shaped)

    def _gather(self, division: Division) -> dict[int, dict[str, object]]:
        """Return the whole state, each parameter's from the rank that shares its weights."""
        held = self.held_state()
        mine = {
            number: {name: _Outline.of(value) for name, value in state.items()}
            for number, state in held.items()
            if division.owners[self._dealt[number]] == division.rank
        }
        parts: list[dict[int, dict[str, object]]] = [mine] * division.of
        with translated_errors(current_world()):
            dist.all_gather_object(parts, mine)
            whole = {number: state for part in parts for number, state in part.items()}
            for number in sorted(whole):
                owner = division.owners[self._dealt[number]]
                for name, value in whole[number].items():
                    if isinstance(value, _Outline):
                        room = value.room()
                        if owner == division.rank:
                            room.copy_(held[number][name])
                        dist.broadcast(room, owner)
                        whole[number][name] = room
        parameters = self.parameters
        return {number: laid_out(state, parameters[number]) for number, state in whole.items()}


def _ids_and_sizes(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(parameter), parameter.numel()) for parameter in parameters]


def _saves_more(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a state dict of its own, as none of torch's classes has."""
    own, plain = type(optimizer), torch.optim.Optimizer
    is_torchs = own.state_dict is plain.state_dict and own.load_state_dict is plain.load_state_dict
    return not is_torchs or set(optimizer.state_dict()) != {"state", "param_groups"}


def _pieces(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the first elements of each tensor; a complex one counts as two numbers."""
    real = (torch.view_as_real(weight) if weight.is_complex() else weight for weight in weights)
    return [weight.reshape(-1)[:PIECE].clone() for weight in real]


@dataclass(frozen=True, slots=True)
class _Outline:
    """The shape, dtype and device of a tensor that has yet to arrive."""

    shape: torch.Size
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(value: object) -> object:
        """Return the outline of a tensor, and anything else unchanged."""
        return _Outline(value.shape, value.dtype, str(value.device)) if isinstance(value, torch.Tensor) else value

    def room(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is the inside of a ``ZeroRedundancyOptimizer``."""
    return getattr(optimizer, "is_part", False)


def find_divisible(values: Mapping[str, object]) -> list[ZeroRedundancyOptimizer]:
    """Find the optimizers among the objects of a State whose state can be divided among ranks."""
    return [value for value in find_objects(values).values() if isinstance(value, ZeroRedundancyOptimizer)]


def check_saved_once(values: Mapping[str, object]) -> None:
    """Raise ``TrainingCodeError`` for an object of a State whose state dict includes that of a divisible one beside it.

    Each commit would gather the whole of it from all ranks, and after a change of the world these no longer know their parts.
    """
    divisible = find_divisible(values)
    for place, value in find_objects(values).items() if divisible else ():
        for optimizer in divisible:
            optimizer._is_asked = False
        if not isinstance(value, ZeroRedundancyOptimizer):
            value.state_dict()
        if any(optimizer._is_asked for optimizer in divisible):
            raise TrainingCodeError(
                f"the state_dict() of state.{place} ({type(value).__name__}) calls that of a ZeroRedundancyOptimizer, which the "
                "State holds by itself, each rank its parts: leave it out of state_dict() and load_state_dict() there, or hold "
                "only one of the two"
            )
