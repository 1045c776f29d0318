"""Process groups of one generation: built eagerly, registered as torch's default group, aborted at once.

Torch's own ``init_process_group("gloo")`` would build the group on the calling thread, where a peer that dies while it
connects could hold it. Here the group is built first, on a thread that can be left behind, and then handed to
``init_process_group`` through torch's interface for third-party backends. So ``torch.distributed`` calls, DDP, SyncBatchNorm
and ``new_group`` work in user code as usual.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_elastic.errors import SparkElasticError, WorkerLostError
from spark_elastic.protocol.messages import Activity
from spark_elastic.worker.backends import BACKENDS, HOST_BACKEND, find_backend
from spark_elastic.worker.backends.backend import Backend
from spark_elastic.worker.backends.gloo import Gloo
from spark_elastic.worker.backends.works import as_it_is
from spark_elastic.worker.system import Threads
from spark_elastic.worker.torch_store import WorldStore
from spark_elastic.worker.watched_group import Translate, Watch, WatchedGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as CollectiveGroup
    from torch._C._distributed_c10d import _DistributedBackendOptions

logger = logging.getLogger("spark_elastic")

# This package's backends are registered with torch under this prefix and the library's name.
PREFIX = "elastic_"
# How long an error in a group of user code waits for the sign that a rank was lost. A process that dies closes its connections
# one after the other, those of such groups perhaps first.
SIGN_SECONDS = 1.0


class Group:
    """The process group of a generation: Gloo's for the host, and additionally that of ``backend`` if it is another library.

    ``build`` may hang with a peer, and is therefore called on a thread of its own; ``abort``, ``abort_device`` and
    ``is_broken`` may be called from any thread, at any time.
    """

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, backend: str, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._aborted = threading.Event()
        self._host = Gloo(store, rank, size, address, timeout)
        self._device: Backend | None = None
        self._backends: dict[str, Backend] = {HOST_BACKEND: self._host}
        library = find_backend(backend)
        if why := library.why_unavailable():
            raise SparkElasticError(f"backend={backend!r}: {why}")
        if backend != HOST_BACKEND:
            self._backends[backend] = self._device = library(store, rank, size, address, timeout)
        self._in_order = library.in_order
        self._watch = Watch(self._in_order)
        for name in self._backends:
            _register(name)
        # The watches of the groups that user code has made. Torch and user code own these groups.
        self._others: list[weakref.ref[Watch]] = []
        # Whether the host continues before a collective has succeeded.
        self.runs_ahead = library.runs_ahead
        # The group that is registered as torch's default group.
        self.watched: WatchedGroup | None = None
        self._translate: Translate = as_it_is

    def build(self) -> None:
        """Connect to all ranks. Raises what torch raises when a peer does not answer in time."""
        for backend in self._backends.values():
            backend.build()
        if self._aborted.is_set():
            self.give_up()

    def register(self, translate: Translate) -> None:
        """Make this torch's default group. Called on the user's thread, when ``build`` is done.

        ``translate`` raises what its collectives raise in place of a library's error, if that is to be another.
        """
        self._translate = translate
        store = dist.PrefixStore("watched", self._store)
        backends = {name: backend.group for name, backend in self._backends.items() if backend.group is not None}
        self.watched = self._watched(store, self._rank, self._size, backends, self._watch, translate)
        _offer(self)
        name = ",".join(f"{device}:{PREFIX}{name}" for device, name in self._devices.items())
        dist.init_process_group(
            PREFIX + HOST_BACKEND if self._device is None else name,
            store=dist.PrefixStore("default", self._store),
            rank=self._rank,
            world_size=self._size,
        )

    def subgroup(self, options: _DistributedBackendOptions) -> WatchedGroup:
        """Make a group for ``new_group`` in user code, which an abort reaches and in which waiting ranks are noticed.

        The collectives of such a group are not counted, because not all ranks take part in them.
        """
        rank, size = options.group_rank, options.group_size
        try:
            backends = {
                name: backend.subgroup(dist.PrefixStore(name, options.store), rank, size)
                for name, backend in self._backends.items()
            }
        except RuntimeError as error:
            self._translate_late(error)
            raise
        if self._aborted.is_set():
            raise WorkerLostError("the generation ended while a group was being built")
        watch = Watch(self._in_order)
        self._others = [*(other for other in self._others if other() is not None), weakref.ref(watch)]
        return self._watched(options.store, rank, size, backends, watch, self._translate_late)

    def _translate_late(self, error: RuntimeError) -> None:
        """Raise that a rank was lost, if that shows within a moment, in place of an error in a group of user code."""
        deadline = time.monotonic() + SIGN_SECONDS
        while not self.is_broken() and time.monotonic() < deadline:
            self._aborted.wait(0.01)
        self._translate(error)

    @property
    def _devices(self) -> dict[str, str]:
        """The library that takes the tensors of each device; if several do, the last one."""
        return {device: name for name, backend in self._backends.items() for device in backend.devices}

    def _watched(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        groups: Mapping[str, CollectiveGroup],
        watch: Watch,
        translate: Translate,
    ) -> WatchedGroup:
        backends = {
            device: (self._backends[name].kind, groups[name], self._backends[name].guard)
            for device, name in self._devices.items()
        }
        return WatchedGroup(store, rank, size, backends, watch, translate)

    def allgather(self, tensors: list[torch.Tensor], mine: torch.Tensor, name: str) -> dist.Work:
        """Begin to fill ``tensors`` with those of all ranks, apart from torch's default group. ``name`` is how it is noted."""
        group: Any = self._host.group  # Any, because torch's stubs leave out the collectives of a backend
        work = self._host.guard(group.allgather([tensors], [mine]))
        self._watch.entered(work, name)
        return work

    def take_reduction(self) -> dist.Work | None:
        """Return the first reduction that was entered through torch's default group since the last call; None if none was."""
        return self._watch.take_reduction()

    def begin_pass(self, task: int) -> bool:
        """Note which backward pass has begun. Return False if that is known already."""
        return self._watch.begin_pass(task)

    def end_pass(self) -> list[dist.Work]:
        """Return the reductions that were entered since ``begin_pass``, in order."""
        return self._watch.end_pass()

    def froze(self, model: str) -> None:
        """Note that this model, which was called last, has no parameter that requires a gradient; empty if it has one."""
        self._watch.frozen = model

    def compares(self, change: str) -> None:
        """Note that the next collective compares this change of what models train with the other ranks."""
        self._watch.compares(change)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give all ranks the values that ``source`` has, for a tensor on the host. Blocks until they have arrived."""
        dist.broadcast(tensor, src=source)

    def send(self, tensor: torch.Tensor, receiver: int) -> dist.Work:
        """Begin to send to one rank. Returns an object that has ``wait``."""
        work = dist.isend(tensor, receiver)
        assert work is not None, "every rank of the world is in the group"
        return work

    def begin_receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Begin to fill the tensor with what ``source`` sends. Returns an object that has ``wait``."""
        work = dist.irecv(tensor, source)
        assert work is not None, "every rank of the world is in the group"
        return work

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill the tensor with what ``source`` sends. Blocks until that has arrived."""
        dist.recv(tensor, source)

    @property
    def collectives(self) -> int:
        """How many collectives this rank has entered."""
        return self._watch.count()[0]

    def activity(self) -> Activity:
        """Return what this rank has entered and waits for, and what its connections do."""
        # The collectives are counted before ``compared`` is read, because a rank notes a comparison before the collective that
        # makes it.
        collectives, recent = self._watch.count()
        changes, compared_in, change = self._watch.compared
        moved, silent = self._host.sockets.traffic()
        # Every watch has to be asked, because each remembers the newest work that it had at the last call.
        waiting = [watch.is_waiting() for watch in self._watches()]
        return Activity(
            collectives, any(waiting), moved, silent, changes, compared_in, change, recent, self._watch.frozen
        )

    def _watches(self) -> list[Watch]:
        """The watch of the default group, and those of user code's groups that still exist."""
        return [self._watch, *(watch for watch in (other() for other in self._others) if watch is not None)]

    def is_broken(self) -> bool:
        """Whether a peer is gone, as far as this process can tell without the driver."""
        return self._aborted.is_set() or self._host.sockets.is_broken()

    def abort(self) -> None:
        """End all pending and later collectives of the host's group with an error, on this rank and its peers."""
        self._aborted.set()
        self._host.abort()

    def abort_device(self) -> list[threading.Thread]:
        """End the collectives of the device's group, if there is one. Return the threads that are still busy with that."""
        return [] if self._device is None else self._device.abort()

    def give_up(self) -> list[threading.Thread]:
        """Abort both groups, which is safe once no rank has anything left to complete. Return what ``abort_device`` returns."""
        self.abort()
        return self.abort_device()

    def close(self) -> None:
        """End the use of the group. Its connections are shut, so that pending operations fail; ``drop`` frees the rest.

        The device is at rest, see ``World.rest``. Nothing waits until its group has been aborted, which takes NCCL a second.
        """
        self.give_up()
        if dist.is_initialized():
            dist.destroy_process_group()
        for watch in self._watches():
            watch.forget()
        for backend in self._backends.values():
            backend.close()

    def drop(self) -> threading.Thread:
        """Free the resources of a closed group. Return the thread that does so, because backends may block.

        This is called a generation after ``close``. By then callbacks of a communication hook, which may be the last to hold the
        group, have failed and are gone.
        """

        def free() -> None:
            self.watched, self._translate = None, as_it_is
            for backend in self._backends.values():
                backend.drop()

        dropping = threading.Thread(target=free, name="spark_elastic-drop", daemon=True)
        dropping.start()
        return dropping


# How long a machine without free descriptors or memory waits before the next world is tried. The shortage may pass, and the
# driver gives a job up after a few failed worlds in a row.
SHORTAGE_SECONDS = 3.0


def build_on_thread(
    group: Group, notify: Callable[[], None], wait: Callable[[Callable[[], bool]], bool], threads: Threads = threading
) -> None:
    """Build ``group`` on a thread, and wait for it with ``wait``, which returns False when the generation is over.

    Raises ``WorkerLostError`` in that case, and if the group could not be built; the thread is left to end by itself.
    """
    failures: list[BaseException] = []
    done = threads.Event()

    def build() -> None:
        try:
            group.build()
        except BaseException as error:
            failures.append(error)
            if isinstance(error, OSError):
                threads.Event().wait(SHORTAGE_SECONDS)
        finally:
            done.set()
            notify()

    threads.Thread(target=build, name="spark_elastic-form", daemon=True).start()
    if not wait(done.is_set):
        group.give_up()
        raise WorkerLostError("the generation ended while its group was being built")
    if failures:
        group.give_up()
        failure = failures.pop()  # it holds the list, which would hold it
        raise WorkerLostError(f"the group could not be built: {failure}") from failure


# The group for which torch calls a creator next. Only the thread that runs user code registers groups, so one variable is
# enough.
_offered: Group | None = None
_default_taken: set[str] = set()


def _offer(group: Group) -> None:
    global _offered
    _offered = group
    _default_taken.clear()


def _creator(backend: str) -> Callable[[_DistributedBackendOptions, object], WatchedGroup]:
    def create(options: _DistributedBackendOptions, backend_options: object) -> WatchedGroup:
        assert _offered is not None, "the backend is registered for spark_elastic's own use"
        if backend not in _default_taken:
            _default_taken.update(BACKENDS)  # this group serves all devices, so torch needs no further default group
            assert _offered.watched is not None, "a group is offered once it is watched"
            return _offered.watched
        return _offered.subgroup(options)

    return create


def _register(name: str) -> None:
    """Make a library known to torch, once in a process."""
    if not hasattr(dist.Backend, (PREFIX + name).upper()):
        dist.Backend.register_backend(
            PREFIX + name, _creator(name), extended_api=True, devices=list(find_backend(name).devices)
        )
