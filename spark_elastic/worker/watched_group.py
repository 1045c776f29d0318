"""WatchedGroup: a process group that knows whether anything waits in it. Torch is given such groups for all user code.

No library reports which of its collectives are incomplete, so a rank that hangs in a collective looks like one that computes
for a long time. A WatchedGroup passes each call on to the real group, and keeps the returned work until it is complete.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_elastic.worker.backends.backend import DTYPES
from spark_elastic.worker.backends.works import Guarded
from spark_elastic.worker.checks.manual_averaging import reductions
from spark_elastic.worker.shards.loops import loops

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as CollectiveGroup

# Options of a call that give no timeout have this one or less.
_NO_TIMEOUT = timedelta(0)
# Returns what to wait for in place of a work.
Guard = Callable[[dist.Work], dist.Work]
# Raises ``WorkerLostError`` in place of a library's error if a rank was lost, else nothing.
Translate = Callable[[RuntimeError], None]
# The calls that all ranks have to make in the same order, by torch's older and newer names. TRANSFERS involve only some ranks,
# and are therefore not counted.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "barrier",
)
TRANSFERS = ("send", "recv", "recv_anysource")
# The collective that DDP uses for gradients. No rank has its result before all have entered it.
REDUCTION = "allreduce"
# The collective that brings tensors to other ranks as they are, so that libraries need not know what is in them.
BROADCAST = "broadcast"
# How many of the last collectives are remembered by name: a rank may be this far ahead of another one for which it waits.
RECENT = 16


class Watch:
    """Torch's ``Work`` objects for what a rank has entered, and which of them are incomplete. May be used from any thread.

    ``in_order``: no work completes before the works that were entered ahead of it. Then only the newest work is kept, and
    ``is_waiting`` asks about a work only from the second call on, because GPUs must not be asked while a graph of kernels is
    captured.
    """

    def __init__(self, in_order: bool) -> None:
        self.collectives = 0
        # The last change of what models train, as in ``Activity``: changes, compared_in, change.
        self.compared = (0, 0, "")
        # The model that was called last, if none of its parameters required a gradient; else empty.
        self.frozen = ""
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._in_order = in_order
        self._lock = threading.Lock()
        self._pending: list[dist.Work] = []
        self._reduction: dist.Work | None = None
        # The present backward pass, and the reductions that it has entered; -1 if none is known.
        self._pass = -1
        self._reductions_of_pass: list[dist.Work] = []
        self._known: dist.Work | None = None

    def entered(self, work: dist.Work | None, name: str, is_collective: bool = True) -> None:
        """Note that this rank has entered a collective."""
        with self._lock:
            if is_collective:
                self.collectives += 1
                self._recent.append(name)
            kept = [] if self._in_order else _incomplete(self._pending)
            self._pending = kept if work is None else [*kept, work]

    def reduces(self, work: dist.Work | None) -> None:
        """Note that a collective was entered whose result depends on every rank."""
        if self._reduction is None:
            self._reduction = work
        if work is not None and -1 < self._pass == torch._C._current_graph_task_id():
            self._reductions_of_pass.append(work)

    def take_reduction(self) -> dist.Work | None:
        """Return the first work that ``reduces`` was given since the last call."""
        work, self._reduction = self._reduction, None
        return work

    def begin_pass(self, task: int) -> bool:
        """Note which backward pass has begun. Return False if that is known already."""
        if self._pass == task:
            return False
        self._pass, self._reductions_of_pass = task, []
        return True

    def end_pass(self) -> list[dist.Work]:
        """Return the reductions that were entered since ``begin_pass``."""
        works, self._pass, self._reductions_of_pass = self._reductions_of_pass, -1, []
        return works

    def compares(self, change: str) -> None:
        """Note that the next collective compares a change of what models train, which all ranks have to make at this point."""
        with self._lock:
            self.compared = (self.compared[0] + 1, self.collectives + 1, change)

    def count(self) -> tuple[int, tuple[str, ...]]:
        """Return how many collectives have been entered, and the names of the last ones, the newest last."""
        with self._lock:
            return self.collectives, tuple(self._recent)

    def is_waiting(self) -> bool:
        """Whether a work is incomplete. With ``in_order``, a work that is new since the last call does not count."""
        with self._lock:
            newest = self._pending[-1] if self._pending else None
            known, self._known = self._known, newest
            if self._in_order and newest is not known:
                return False
            self._pending = _incomplete(self._pending)
            return bool(self._pending)

    def forget(self) -> None:
        """Drop the works, which hold tensors."""
        with self._lock:
            self._pending, self._known, self._reduction = [], None, None
        self.end_pass()


def _incomplete(works: list[dist.Work]) -> list[dist.Work]:
    return [work for work in works if not work.is_completed()]


class WatchedGroup(dist.ProcessGroup):
    """Passes all calls on to ``backends``, by the device of their tensors, including calls from torch's C++ (DDP's reducer).

    ``backends`` maps each device to the kind of library for which torch takes the group, to the group, and to the function that
    returns what to wait for in place of one of its works.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        backends: Mapping[str, tuple[dist.ProcessGroup.BackendType, CollectiveGroup, Guard]],
        watch: Watch,
        translate: Translate,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch has it, its stubs do not
        self._watch = watch
        self._translate = translate
        self._inner = dist.ProcessGroup(store, rank, size)
        # Calls that this class does not override reach the backends from here, and are not watched.
        for group in (self._inner, self):
            group._set_default_backend(backends["cpu"][0])
            for device, (kind, backend, _) in backends.items():
                group._register_backend(torch.device(device), kind, backend)
        self._guards = {device: guard for device, (_, _, guard) in backends.items()}

    def _guard(self, arguments: tuple[object, ...], work: dist.Work) -> dist.Work:
        if any(getattr(argument, "timeout", _NO_TIMEOUT) > _NO_TIMEOUT for argument in arguments):
            return work  # only the library may end it, at the caller's own timeout
        tensor = _first_tensor(arguments)
        device = _device_of_barrier(arguments) if tensor is None else tensor.device
        return self._guards[device.type](work)


def _device_of_barrier(arguments: tuple[object, ...]) -> torch.device:
    """The device on which ranks meet: that of the call's options, or torch's choice."""
    devices = (getattr(argument, "device", None) for argument in arguments)
    return next((device for device in devices if device is not None), torch.device("cpu"))


def _first_tensor(arguments: object) -> torch.Tensor | None:
    if isinstance(arguments, torch.Tensor):
        return arguments
    nested = arguments if isinstance(arguments, (list, tuple)) else ()
    return next((tensor for tensor in map(_first_tensor, nested) if tensor is not None), None)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor whose dtype some library lacks; any other tensor, and one with gaps, unchanged."""
    if tensor.dtype in DTYPES or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    if not tensor.is_contiguous() and tensor.stride() != torch.empty_like(tensor, device="meta").stride():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _handing_on(name: str, is_collective: bool) -> Callable[..., dist.Work | None]:
    def call(self: WatchedGroup, *args: Any, **kwargs: object) -> dist.Work | None:
        if name == BROADCAST and args:
            first = _as_bytes(args[0]) if isinstance(args[0], torch.Tensor) else [*map(_as_bytes, args[0])]
            args = (first, *args[1:])
        if is_collective:
            loops.refuse_within(f"torch.distributed's {name} was called")
        try:
            work: dist.Work | None = getattr(self._inner, name)(*args, **kwargs)
        except RuntimeError as error:
            self._translate(error)
            raise
        if work is not None:
            work = self._guard((*args, *kwargs.values()), work)
        if isinstance(work, Guarded):
            work.translate = self._translate
        self._watch.entered(work, name, is_collective)
        numbers = sum(tensor.numel() for tensor in args[0]) if name == REDUCTION and args else 0
        if numbers:  # Gloo does nothing for empty tensors
            reductions.note(numbers)
            self._watch.reduces(work)
        return work

    call.__name__ = name
    return call


for _name in (*COLLECTIVES, *TRANSFERS):
    if hasattr(dist.ProcessGroup, _name):
        setattr(WatchedGroup, _name, _handing_on(_name, _name in COLLECTIVES))
