"""Loading a kept state into live objects, in place where possible, so that no second copy of a large state is made."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, TypeGuard, TypeVar

import numpy
import torch

from spark_elastic.checkpoint.skeleton import PLAIN, StateDict, Tree, has_plain_keys, map_tree
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.module_registers import stepped
from spark_elastic.worker.optimizers.memory_layout import laid_out
from spark_elastic.worker.optimizers.steps import forget_scale
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.inference import writing_to
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import KeptPart, Stateful, cloned, has_state_dict
from spark_elastic.worker.state.structure import reshape
from spark_elastic.worker.state.switches import plain_name, switch_as_noted

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

# Containers that are refilled in place; tuples cannot be.
_CONTAINERS = (list, dict, set, deque, defaultdict, Counter)
# The flag of classes that are not built in (Py_TPFLAGS_HEAPTYPE), and the methods of those that define how they are copied.
_HEAP_TYPE = 1 << 9
_COPYING = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__"}


class Loading:
    """One load of kept values, which go into the objects that they belong to, so that references to these stay valid.

    Nothing of the result is what is kept. Containers, arrays and objects of plain Python classes are refilled. Kept objects
    refer to each other, and to themselves: once they have been paired with objects here, what they refer to is these, too.

    Args:
        places: the objects of which the kept values are copies, if these were copied here (``is_own``), else those with which
            the job began here. None takes what is at each place now.
        rebound: of values that were not copied here, the names of places that have been set to other objects since.
        same: the names of places where the object belongs that is at another one, with the name of that; None if that is not
            known.
    """

    def __init__(
        self,
        places: Places | None = None,
        *,
        is_own: bool = False,
        rebound: Collection[str] = (),
        same: Mapping[str, str] | None = None,
    ) -> None:
        self._first = places
        self._is_own = is_own
        self._rebound = frozenset(rebound)
        self._same = same
        # Of places whose object belongs to others as well: what is there and what is kept, and what has been loaded.
        self._sharing: dict[str, tuple[object, object] | None] = dict.fromkeys((same or {}).values())
        self._shared: dict[str, object] = {}
        # By the ids of kept objects, what takes their place; also the memo of copies.
        self._takers: dict[int, Any] = {}
        # The ids of objects here that belong to a kept one, and of those that have taken its content in.
        self._paired: set[int] = set()
        self._filled: set[int] = set()

    def load(self, present: Mapping[str, object], kept: Mapping[str, object]) -> Iterator[tuple[str, object]]:
        """Yield what belongs under each name: an object here with the kept content if possible, else a copy.

        Raises ``SparkElasticError`` for a state dict where no object can load it.
        """
        for name, value in kept.items():
            self._pair(present.get(name), value, name)
        for name, value in kept.items():
            yield name, self._load(present.get(name), value, name)

    def _target(self, name: str, present: object) -> object:
        """Return the object that what is kept of a place belongs to; None if there is none here."""
        if name in self._rebound:
            return None
        return present if self._first is None else self._first.at(name)

    def _pair(self, present: object, kept: Tree, name: str) -> None:
        """Note which of the objects here belong to those in a kept tree."""
        kind = type(kept)
        if kind in PLAIN or (self._same and name in self._same):
            return
        if name in self._sharing:
            self._sharing[name] = present, kept
        if isinstance(kept, (StateDict, KeptPart, torch.Tensor)):
            return
        target = self._target(name, present)
        if kind in (list, tuple) or (kind in (dict, OrderedDict) and has_plain_keys(kept)):
            for key, beside, value in _entries(target if self._is_own else present, kept):
                self._pair(beside, value, f"{name}[{key!r}]")
        elif id(kept) not in self._takers and id(target) not in self._paired and _can_be_refilled(target, kept):
            self._takers[id(kept)] = target
            self._paired.add(id(target))

    def _load(self, present: object, kept: object, name: str) -> object:
        if type(kept) in PLAIN:
            return kept
        place = self._same.get(name, name) if self._same else name
        if place in self._shared:
            return self._shared[place]
        if place != name and (sharing := self._sharing[place]) is not None:
            name, (present, kept) = place, sharing
        target = self._target(name, present)
        loaded = self._loaded(target if self._is_own else present, target, kept, name)
        if name in self._sharing:
            self._shared[name] = loaded
        return loaded

    def _loaded(self, present: object, target: object, kept: Tree, name: str) -> object:
        """Load what is kept of a place into ``target``. What is in it may be in ``present``, which is there now."""
        if isinstance(kept, (StateDict, KeptPart)):
            self._load_stateful(present, kept, name)
            return present
        if isinstance(kept, torch.Tensor):
            return self._load_tensor(target, kept, name)
        kind: Any = type(kept)
        if isinstance(kept, Enum):
            return _member_here(present, kept)
        if kind not in (list, tuple) and not (kind in (dict, OrderedDict) and has_plain_keys(kept)):
            return self._take(kept)
        entries = [
            (key, self._load(beside, value, f"{name}[{key!r}]")) for key, beside, value in _entries(present, kept)
        ]
        if kind is OrderedDict:
            return _with_metadata(OrderedDict(entries), kept)
        return self._fill(target, dict(entries) if kind is dict else kind(value for _, value in entries))

    def _load_stateful(self, target: object, kept: StateDict | KeptPart, name: str) -> None:
        if not has_state_dict(target):
            raise SparkElasticError(
                f"state.{name} was saved with a state dict, but is {type(target).__name__} here; give it to the "
                "State on every rank, above the elastic function"
            )
        if not self._is_own and self._same is not None and id(target) in self._filled:
            raise SparkElasticError(
                f"state.{name} is an object that the State has in another place, too, and was another one when it was saved: "
                "give the State two objects, above the elastic function"
            )
        self._filled.add(id(target))
        if isinstance(kept, KeptPart):
            copy.deepcopy(kept).load_into(target)
            return
        if self._is_own and isinstance(target, torch.nn.Module):
            _reshape(target, kept.content)
        copies: dict[int, object] = {}
        load_state_dict(target, map_tree(lambda value: _own(value, copies), kept.content))

    def _load_tensor(self, target: object, kept: torch.Tensor, name: str) -> torch.Tensor:
        if not self._is_own and _is_learned(target) and _form(target) != _form(kept):
            raise SparkElasticError(
                f"state.{name} is learned, and was saved as {_form(kept)}, and is {_form(target)} here: what trains it would go "
                "on with a tensor that is no longer in the State"
            )
        if id(target) in self._filled or not fits(target, kept):
            return kept.detach().clone().requires_grad_(kept.requires_grad)
        self._filled.add(id(target))
        with writing_to([target]):
            target.copy_(kept)
        target.grad = None
        return target

    def _take(self, kept: object) -> object:
        """Return what takes the place of a kept object, with its content."""
        target = self._takers.get(id(kept))
        if target is None or id(target) not in self._paired:
            return copy.deepcopy(kept, self._takers)
        if id(target) not in self._filled:
            self._filled.add(id(target))
            if isinstance(kept, numpy.ndarray):
                target[...] = kept
            elif isinstance(kept, _CONTAINERS):
                _fill(target, copy.deepcopy(dict(kept) if isinstance(kept, dict) else list(kept), self._takers))
            else:
                _fill(vars(target), copy.deepcopy(vars(kept), self._takers))
        return target

    def _fill(self, target: object, loaded: object) -> object:
        """Return loaded entries, in the container here if that is of the same kind."""
        if id(target) in self._filled or not _can_be_refilled(target, loaded):
            return loaded
        self._filled.add(id(target))
        _fill(target, loaded)
        return target


def _is_learned(target: object) -> TypeGuard[torch.Tensor]:
    return isinstance(target, torch.Tensor) and (target.requires_grad or isinstance(target, torch.nn.Parameter))


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def _member_here(present: object, kept: Enum) -> Enum:
    """Return a member of an enumeration, of the one that is here by that name: a function may define one each time it runs."""
    kind = type(kept)
    if isinstance(present, Enum) and (type(present).__module__, type(present).__qualname__) == (
        kind.__module__,
        kind.__qualname__,
    ):
        with suppress(ValueError):  # it has no such member
            named = type(present).__members__.get(kept.name)
            return type(present)(kept.value) if named is None else named  # a member may be false
    return kept


def _entries(present: object, kept: Tree) -> Iterator[tuple[object, object, object]]:
    """Yield the keys and values of a kept container, with what is at the same place in the present one."""
    if isinstance(kept, dict):
        named = present if isinstance(present, dict) else {}
        for key, value in kept.items():
            yield key, named.get(key), value
    else:
        beside = present if isinstance(present, (list, tuple)) else ()
        for place, value in enumerate(kept):
            yield place, beside[place] if place < len(beside) else None, value


def _own(value: object, copies: dict[int, object]) -> object:
    """Return a copy of anything but a tensor."""
    return value if type(value) in PLAIN or isinstance(value, torch.Tensor) else copy.deepcopy(value, copies)


def _fill(content: Any, inside: Any) -> None:
    content.clear()
    (content.extend if isinstance(content, (list, deque)) else content.update)(inside)


def _can_be_refilled(present: object, loaded: object) -> bool:
    kind = type(loaded)
    if type(present) in _CONTAINERS or isinstance(present, numpy.ndarray):
        alike = type(present) is kind and getattr(present, "maxlen", None) == getattr(loaded, "maxlen", None)
        return alike and (not isinstance(loaded, numpy.ndarray) or _takes(present, loaded))
    # Names are compared, because a newcomer has its own copy of a class that is defined inside a function, whose name pickle may
    # have shortened.
    if (type(present).__module__, type(present).__name__) != (kind.__module__, kind.__name__):
        return False
    if kind.__hash__ not in (None, object.__hash__):
        return False  # an object that is a key or in a set must not change its hash
    return hasattr(present, "__dict__") and all(_is_all_in_dict(owner) for owner in (type(present), kind))


def _takes(array: object, loaded: numpy.ndarray) -> bool:
    assert isinstance(array, numpy.ndarray)
    return array.flags.writeable and (array.shape, array.dtype) == (loaded.shape, loaded.dtype)


def _is_all_in_dict(kind: type) -> bool:
    """Whether ``__dict__`` holds all that makes up an instance: the class is written in Python, without slots."""
    return all(
        base.__flags__ & _HEAP_TYPE and not _COPYING & vars(base).keys() and not vars(base).get("__slots__")
        for base in kind.__mro__[:-1]
    )


def _reshape(module: torch.nn.Module, kept: Mapping[str, object]) -> None:
    """Give parameters that have grown since the commit their old shapes back."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = kept.get(name)
        if isinstance(value, torch.Tensor):
            reshape(tensor, value)


def _with_metadata(loaded: OrderedDict[K, V], kept: object) -> OrderedDict[K, V]:
    """Carry over the versions of a module's parts, which its state dict keeps as metadata."""
    if hasattr(kept, "_metadata"):
        loaded._metadata = kept._metadata  # type: ignore[attr-defined]
    return loaded


def load_state_dict(target: Stateful, kept: Any) -> None:
    """Set ``target`` to a kept state dict, whose tensors remain the keeper's, and clear gradients. No dtype changes.

    Modules copy from the state dict. Optimizers would adopt its tensors, so their own are overwritten where the shapes match and
    replaced by clones elsewhere; a class with a ``load_state_dict`` of its own is then asked to load them, too. Raises what
    ``target.load_state_dict`` raises, and ``SparkElasticError`` for the state of an optimizer or scheduler of another class,
    whose settings torch would take over.
    """
    if isinstance(target, torch.optim.Optimizer):
        _check_is_of_optimizer(target, kept)
        if isinstance(target, ZeroRedundancyOptimizer):
            target.undivide()  # it is divided again once all ranks have the whole state
        is_overwritten = _overwrite(target, kept)
        if not is_overwritten or _loads_for_itself(target):
            content = cloned({**kept, "state": {}} if is_overwritten else kept)
            if is_overwritten:
                content["state"] = target.state_dict()["state"]  # torch adopts an optimizer's own tensors uncopied
            target.load_state_dict(content)
            _undo_changes(target, kept)
        forget_scale(target)
        target.zero_grad(set_to_none=True)
    elif isinstance(target, torch.nn.Module):
        switch_as_noted(target, kept)
        kept = _named_as_here(target, kept)
        has_extra_state = any(str(name).endswith("_extra_state") for name in kept)
        with writing_to((*target.parameters(), *target.buffers())):
            target.load_state_dict(cloned(kept) if has_extra_state else kept)
        target.zero_grad(set_to_none=True)
    else:
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler):
            _check_is_of_scheduler(target, kept)
        target.load_state_dict(cloned(kept))
        if isinstance(target, torch.amp.GradScaler) and target.is_enabled():  # a disabled scaler keeps nothing
            # Its state dict does not say that step() has been called and update() has not.
            target._per_optimizer_states.clear()


def _check_is_of_optimizer(optimizer: torch.optim.Optimizer, kept: object) -> None:
    """Raise ``SparkElasticError`` if a kept state cannot come from this class. State dicts do not name their class."""
    groups = kept.get("param_groups") if isinstance(kept, Mapping) else None
    if not groups or not optimizer.param_groups:
        return
    theirs, ours = groups[0], optimizer.param_groups[0]
    lacking = [name for name in optimizer.defaults if name not in theirs]
    foreign = [name for name in theirs if name not in ours]
    _refuse_another_class(optimizer, lacking, foreign)
    # The only setting that distinguishes AdamW from Adam.
    decoupled = "decoupled_weight_decay"
    if decoupled in theirs and decoupled in ours and theirs[decoupled] != ours[decoupled]:
        raise SparkElasticError(
            f"the saved state is of an optimizer with {decoupled}={theirs[decoupled]}, {type(optimizer).__name__} here has "
            f"{ours[decoupled]}; AdamW has True, Adam False"
        )


def _check_is_of_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, kept: Mapping[str, object]) -> None:
    here = scheduler.state_dict()
    lacking = [name for name in here if name not in kept]
    foreign = [name for name in kept if name not in here]
    _refuse_another_class(scheduler, lacking, foreign)


def _refuse_another_class(here: object, lacking: Sequence[str], foreign: Sequence[str]) -> None:
    """Raise if settings are both missing and unknown. An earlier release of torch just has fewer, a later one more."""
    if lacking and foreign:
        there, missing = ", ".join(foreign), ", ".join(lacking)
        raise SparkElasticError(
            f"the saved state is not that of the {type(here).__name__} here: it has {there} and no {missing}"
        )


def _named_as_here(module: torch.nn.Module, kept: Mapping[str, T]) -> Mapping[str, T]:
    """Give a module's kept state the names that the module uses: ``torch.compile`` adds a prefix to them.

    Raises ``SparkElasticError`` for a tensor of another dtype, which torch would silently convert.
    """
    here = module.state_dict()
    if set(here) != set(kept):
        names = {plain_name(name): name for name in here}
        renamed = OrderedDict((names.get(plain_name(name), name), value) for name, value in kept.items())
        kept = _with_metadata(renamed, here)
    for name, value in kept.items():
        present = here.get(name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.dtype != value.dtype:
            raise SparkElasticError(
                f"{name} is {value.dtype} in what was saved and {present.dtype} in the {type(module).__name__} here; "
                "make the model with the dtype that was saved, or convert the checkpoint"
            )
    return kept


def _undo_changes(optimizer: torch.optim.Optimizer, kept: Mapping[str, object]) -> None:
    """Give an optimizer's state back the dtypes that it had, which torch makes those of the parameters, and its layouts."""
    if not isinstance(kept, dict) or not {"state", "param_groups"} <= set(kept):
        return  # the optimizer's state dict has a format of its own
    numbers = [number for group in kept["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, stepped(optimizer), strict=True):
        if number in kept["state"] and parameter in optimizer.state:
            state = _with_dtypes_of(kept["state"][number], optimizer.state[parameter])
            optimizer.state[parameter] = laid_out(state, parameter) if isinstance(state, dict) else state


def _with_dtypes_of(kept: object, loaded: object) -> object:
    if isinstance(kept, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == kept.dtype else kept.to(loaded.device, copy=True)
    if isinstance(kept, dict) and isinstance(loaded, dict):
        return {key: _with_dtypes_of(kept.get(key), value) for key, value in loaded.items()}
    if isinstance(kept, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(kept) == len(loaded):
        return type(kept)(map(_with_dtypes_of, kept, loaded))
    return loaded


def fits(present: object, value: object) -> TypeGuard[torch.Tensor]:
    """Whether both are tensors, and the kept one, on whatever device, can be copied into the present one."""
    return (
        isinstance(present, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (present.shape, present.dtype) == (value.shape, value.dtype)
        and all(stride or length < 2 for stride, length in zip(present.stride(), present.shape, strict=True))
    )


def _overwrite(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> bool:
    """Copy a kept state into an optimizer's own tensors. Return False, with nothing changed, if they do not match."""
    live = optimizer.state_dict()
    if set(kept) != {"state", "param_groups"} or set(live) != set(kept):
        return False
    if [group["params"] for group in live["param_groups"]] != [group["params"] for group in kept["param_groups"]]:
        return False
    targets, sources = _tensors(live["state"]), _tensors(kept["state"])
    if _without_tensors(live["state"]) != _without_tensors(kept["state"]) or not all(map(fits, targets, sources)):
        return False
    if targets:
        with writing_to(targets):
            torch._foreach_copy_(targets, sources)
    for group, settings in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in cloned(settings).items() if name != "params"})
    return True


def _loads_for_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class of the user's has to be asked, because it may take attributes of its own out of a state dict."""
    torchs = (torch.optim.Optimizer.load_state_dict, ZeroRedundancyOptimizer.load_state_dict)
    return type(optimizer).load_state_dict not in torchs


def _tensors(tree: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tree(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, tree)
    return found


def _without_tensors(tree: object) -> object:
    """Reduce a tree to the values besides tensors that have to be equal. An incomparable value equals no other."""

    def comparable(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return "a tensor"
        return value if type(value) in PLAIN else object()

    return map_tree(comparable, tree)
