"""A communication hook for DDP that outlives generations."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

from spark_elastic.data.stopwatch import note_waited, note_waiting
from spark_elastic.worker.job import present_world
from spark_elastic.worker.world import translated_errors

# Torch's hooks that send a bucket in a single collective, as soon as they are called.
_SEND_ONCE = (allreduce_hook, fp16_compress_hook, bf16_compress_hook)

# The attribute of a hook's state that changes with the generation. If it is None, torch's hooks look up the present group.
_GROUP = "process_group"


class CommHook:
    """The arguments of ``register_comm_hook``, which are registered with torch's wrapper of each generation.

    ``state`` is passed to the hook. If it is a function (or a class, or a ``functools.partial``), it is called in each world
    and returns the state. The state of a torch hook, such as ``PowerSGDState``, is reset in each world to what it was when
    given, so that survivors and newcomers hold the same. Any other state is passed on unchanged.

    Hooks such as PowerSGD's send a bucket in several collectives, each when the one before has arrived. With Gloo these
    collectives start on Gloo's threads, at different moments on each rank, so collectives of two buckets could be confused with
    each other. Therefore a bucket waits until the previous one, of any model, is reduced. With NCCL this wait is short: its
    futures are done once their kernels are on the stream.
    """

    # The future that the last call of any hook in this process returned.
    _last: ClassVar[torch.futures.Future[object] | None] = None

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise TypeError(f"hook must be callable, not {hook!r}")
        self.state, self.hook = state, hook
        self._is_made = inspect.isroutine(state) or isinstance(state, (type, functools.partial))
        self._beginning: dict[str, object] = {}
        if not self._is_made and type(state).__module__.startswith("torch."):
            if getattr(state, _GROUP, None) is not None:
                name = type(state).__name__
                raise ValueError(
                    f"a {name} that holds a process group is of no use in the next generation: give it {_GROUP}=None, or give "
                    f"a function that makes it, register_comm_hook(lambda: {name}(…), hook)"
                )
            self._beginning = {name: copy.deepcopy(value) for name, value in _attributes(state) if name != _GROUP}

    @classmethod
    def wait_for_last(cls) -> None:
        """Wait until the last bucket is reduced, if its hook sends it in several collectives. Raises what torch raises."""
        if cls._last is not None:
            _wait(cls._last)

    def register(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Register the hook with the torch wrapper of the present world."""
        for name, value in self._beginning.items():
            setattr(self.state, name, copy.deepcopy(value))
        state = self.state() if self._is_made else self.state
        CommHook._last = None
        nn.parallel.DistributedDataParallel.register_comm_hook(ddp, state, self._as_torch_takes_it())

    def _as_torch_takes_it(self) -> Callable[..., object]:
        """Return a function that calls the hook, because torch accepts neither partials nor annotations that are strings."""

        def call(state, bucket):  # type: ignore[no-untyped-def]
            if CommHook._last is not None and not CommHook._last.done():
                with translated_errors(present_world()):
                    _wait(CommHook._last)
            future = self.hook(state, bucket)
            CommHook._last = None if self.hook in _SEND_ONCE else future
            return future

        name = getattr(self.hook, "__name__", type(self.hook).__name__)
        call.__name__ = call.__qualname__ = name
        return call


def _wait(future: torch.futures.Future[object]) -> None:
    note_waiting()
    try:
        future.wait()
    finally:
        note_waited()


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(value, "__dict__", {}), *(name for name in slots if not name.startswith("__"))]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
