"""Process groups of one generation: built eagerly, registered as torch's default group, aborted at once.

Torch's own ``init_process_group("gloo")`` would build the group on the calling thread, where a peer that dies while it
connects could hold it. Here the group is built first, on a thread that can be left behind, and then handed to
``init_process_group`` through torch's interface for third-party backends. So ``torch.distributed`` calls, DDP, SyncBatchNorm
and ``new_group`` work in user code as ever.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.messages import Activity
from spark_elastic.worker.proof import prove
from spark_elastic.worker.sockets import Door, GroupSockets, listening_addresses
from spark_elastic.worker.store import SECRET_BYTES, MeshStore, WorldStore
from spark_elastic.worker.watched_group import Watch, WatchedGroup

logger = logging.getLogger("spark_elastic")

# Hangs are found by the driver. Gloo's own timeout must not end a long evaluation on one rank that says heartbeat().
COLLECTIVE_TIMEOUT = timedelta(hours=24)
# How long torch is kept from going on while NCCL is aborted.
ABORT_SECONDS = 2.0
GLOO_BACKEND = "elastic_gloo"
NCCL_BACKEND = "elastic_nccl"


class Group:
    """The process group of a generation, over Gloo, with NCCL beside it where ``backend`` is "nccl".

    ``build`` may hang with a peer, and is therefore called on a thread of its own; ``abort``, ``abort_device`` and ``is_broken``
    may be called from any thread, at any time.
    """

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, backend: str, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._backend = backend
        self._timeout = timeout
        self._sockets = GroupSockets()
        self._device: Any = None
        self._mesh: MeshStore | None = None
        self._door = Door(())
        self._aborted = threading.Event()
        self.gloo: Any = None
        self.nccl: Any = None
        self._watch = Watch(in_order=backend == "nccl")
        # What torch gets as its default group.
        self.watched: WatchedGroup | None = None
        # Those of ``new_group`` in user code; Gloo's are reached by their sockets.
        self._nccl_subgroups: list[Any] = []
        # Of a closed group, for ``drop``.
        self._remains: list[Any] = []
        self._name = f"generation {store.generation}" if store is not None else ""

    def build(self) -> None:
        """Connect to all ranks. Raises what torch raises when a peer does not answer in time."""
        before = listening_addresses()
        self._device = _create_device(self._address)
        mine = {inode: address for inode, address in listening_addresses().items() if inode not in before}
        self._sockets.addresses.update(mine.values())
        self._mesh = MeshStore(self._store, self._rank, self._size, list(mine.values()))
        self.gloo = self._new_gloo(dist.PrefixStore("gloo", self._mesh), self._rank, self._size, self._timeout)
        self._door = Door([inode for inode, address in mine.items() if address == self._mesh.address])
        self._door.shut()
        self._sockets.addresses.update(self._mesh.addresses)
        self._sockets.capture()
        # Ahead of the proof: where Gloo's own timeout has struck, the abort that follows can end the process.
        self.gloo._set_default_timeout(COLLECTIVE_TIMEOUT)
        if problem := prove(self.gloo, self._rank, self._size, self._mesh.secret, self._name):
            raise WorkerLostError(problem)
        if self._backend == "nccl":
            self.nccl = self._new_nccl(dist.PrefixStore("nccl", self._store), self._rank, self._size)
        if self._aborted.is_set():
            self.give_up()

    def register(self) -> None:
        """Make this torch's default group. Called on the user's thread, when ``build`` is done."""
        store = dist.PrefixStore("watched", self._store)
        backends = {"cpu": self.gloo, "cuda": self.gloo if self.nccl is None else self.nccl}
        self.watched = WatchedGroup(store, self._rank, self._size, backends, self._watch)
        _offer(self)
        name = GLOO_BACKEND if self.nccl is None else f"cpu:{GLOO_BACKEND},cuda:{NCCL_BACKEND}"
        dist.init_process_group(
            name, store=dist.PrefixStore("default", self._store), rank=self._rank, world_size=self._size
        )

    def entered(self, work: Any) -> None:
        """Take note of a collective that was not entered by way of torch's default group."""
        self._watch.entered(work)

    def activity(self) -> Activity:
        """What this rank has entered and waits for, and what its connections do."""
        return Activity(self._watch.collectives, self._watch.is_waiting(), *self._sockets.traffic())

    def is_broken(self) -> bool:
        """Whether a peer is gone, as far as this process can see without asking anybody."""
        return self._aborted.is_set() or self._sockets.is_broken()

    def abort(self) -> None:
        """End all pending and later collectives of Gloo's with an error, on this rank and its peers."""
        self._aborted.set()
        self._sockets.shut()

    def abort_device(self) -> list[threading.Thread]:
        """End those of NCCL's, without an error and with nonsense in their results, also of peers that have not aborted yet.

        Returns the threads that do so.
        """
        groups = [group for group in (self.nccl, *self._nccl_subgroups) if group is not None]
        # It may wait for kernels; the caller may be the control thread and must not.
        aborting = [
            threading.Thread(target=group.abort, name="spark_elastic-nccl-abort", daemon=True) for group in groups
        ]
        for thread in aborting:
            thread.start()
        return aborting

    def give_up(self) -> list[threading.Thread]:
        """Abort both, where no other rank may still have something to complete. Return the threads that abort NCCL."""
        self.abort()
        return self.abort_device()

    def close(self) -> None:
        """End the group's use. Its connections are shut, so whatever is pending on them fails; ``drop`` frees the rest."""
        for thread in self.give_up():
            thread.join(ABORT_SECONDS)  # what torch does next may wait for kernels
        if dist.is_initialized():
            dist.destroy_process_group()
        self._watch.forget()
        self._remains = [self.watched, self.gloo, self.nccl, *self._nccl_subgroups, self._device]
        self.watched = self.gloo = self.nccl = self._device = None
        self._nccl_subgroups.clear()

    def drop(self) -> threading.Thread:
        """Free what a closed group holds, on a thread of its own, which it returns: Gloo's destructor waits for Gloo's threads.

        It must not run on one of these, so this is called a generation after ``close``: callbacks of a communication hook, which
        may be the last to know the group, have then failed and are gone.
        """

        def free() -> None:
            self._remains.clear()
            self._sockets.close()

        dropping = threading.Thread(target=free, name="spark_elastic-drop", daemon=True)
        dropping.start()
        return dropping

    def _new_gloo(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timeout
        options._threads = 2
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _new_nccl(self, store: Any, rank: int, size: int) -> Any:
        # Errors are ours to notice: the driver aborts the group, torch's watchdog would end the process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        interface = interface_of(self._address)
        if interface is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Connect now: a communicator that is built at the first collective could hold the user's thread with a dead peer.
        group.eager_connect_single_device(torch.device("cuda", 0))
        return group

    def subgroup(self, kind: str, options: Any) -> Any:
        """Make the backend of a ``new_group`` in user code, on the same device, so that an abort reaches it."""
        if kind == NCCL_BACKEND:
            group = self._new_nccl(options.store, options.group_rank, options.group_size)
            self._nccl_subgroups.append(group)
            if self._aborted.is_set():
                raise WorkerLostError("the generation ended while a group was being built")
            return group
        with self._door.opened():
            group = self._new_gloo(options.store, options.group_rank, options.group_size, self._timeout)
        group._set_default_timeout(COLLECTIVE_TIMEOUT)
        if options.group_size > 1:
            name = f"a group of {self._name}"
            if problem := prove(group, options.group_rank, options.group_size, _secret_of(options), name):
                raise WorkerLostError(problem)
        return group


def _secret_of(options: Any) -> bytes:
    """A secret of the members of a group of user code, brought by its first rank."""
    if options.group_rank == 0:
        options.store.set("secret", secrets.token_bytes(SECRET_BYTES))
    secret: bytes = options.store.get("secret")
    return secret


def build_on_thread(group: Group, notify: Callable[[], None], wait: Callable[[Callable[[], bool]], bool]) -> None:
    """Build ``group`` on a thread, waiting by ``wait``, which returns False when the generation is over.

    Raises ``WorkerLostError`` then, or when the group could not be built; the thread is left to end by itself.
    """
    failures: list[BaseException] = []
    done = threading.Event()

    def build() -> None:
        try:
            group.build()
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()
            notify()

    threading.Thread(target=build, name="spark_elastic-form", daemon=True).start()
    if not wait(done.is_set):
        group.give_up()
        raise WorkerLostError("the generation ended while its group was being built")
    if failures:
        group.give_up()
        raise WorkerLostError(f"the group could not be built: {failures[0]}") from failures[0]


def _create_device(address: str) -> Any:
    """Make a Gloo device that listens on ``address``, eager: a lazy group can hang beyond every timeout."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # torch before 2.7 knows no lazy devices
        return dist.ProcessGroupGloo.create_device(hostname=address)


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None


# The group that torch's next call of a creator is for; only the thread that runs user code registers groups.
_offered: Group | None = None
_default_taken: set[str] = set()


def _offer(group: Group) -> None:
    global _offered
    _offered = group
    _default_taken.clear()


def _creator(kind: str) -> Callable[[Any, Any], Any]:
    def create(options: Any, backend_options: Any) -> Any:
        assert _offered is not None, "the backend is registered for spark_elastic's own use"
        if kind not in _default_taken:
            _default_taken.update((GLOO_BACKEND, NCCL_BACKEND))  # it serves all devices, and torch asks for no other
            return _offered.watched
        return _offered.subgroup(kind, options)

    return create


for _kind, _devices in (
    (GLOO_BACKEND, ["cpu", "cuda"]),
    (NCCL_BACKEND, ["cuda"]),
):
    if not hasattr(dist.Backend, _kind.upper()):
        dist.Backend.register_backend(_kind, _creator(_kind), extended_api=True, devices=_devices)
