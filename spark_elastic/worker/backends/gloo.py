"""Gloo: groups over TCP, which are aborted by shutting their sockets."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends.backend import Backend
from spark_elastic.worker.backends.native_threads import native_threads, rest
from spark_elastic.worker.backends.proof import prove
from spark_elastic.worker.backends.works import Works
from spark_elastic.worker.sockets import Gate, GroupSockets, listening_addresses
from spark_elastic.worker.torch_store import SECRET_BYTES, MeshStore, WorldStore

logger = logging.getLogger("spark_elastic")

# Gloo's own timeout must never expire. The driver detects hangs; and if Gloo timed out an operation whose work has already been
# ended from here, the process would end.
TIMEOUT = timedelta(days=3650)
# After an abort: the interval at which a rank looks whether Gloo is still active, and for how many looks it must be idle.
LOOK_SECONDS = 0.01
LOOKS = 3
# After this many looks, two seconds, the thread that serves the connections need not be idle any more. It may never be: it
# keeps trying to read for an operation that has failed.
SERVING_LOOKS = 200


class Gloo(Backend):
    """Gloo's groups of a generation. All have one device, so that the group of all ranks knows every socket."""

    devices = ("cpu", "cuda")
    kind = dist.ProcessGroup.BackendType.GLOO
    in_order = False
    runs_ahead = False

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, timeout: timedelta) -> None:
        self.group: dist.ProcessGroupGloo | None = None
        self.sockets = GroupSockets()
        self._works = Works()
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._timeout = timeout
        self._device: dist.ProcessGroupGloo.Device | None = None
        self._mesh: MeshStore | None = None
        self._gate = Gate(())
        self._subgroups: list[weakref.ref[dist.ProcessGroupGloo]] = []
        # Gloo's threads: those that serve the connections, and those that run collectives.
        self._serving: set[int] = set()
        self._running: set[int] = set()
        self._is_aborted = self._is_closed = self._is_dropped = False
        # The remains of closed groups, for ``drop``.
        self._remains: list[object] = []

    def build(self) -> None:
        """Connect to all ranks, over connections on which each proves that it is a member of the generation."""
        before, threads = listening_addresses(), native_threads()
        self._device = dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
        self._serving = native_threads() - threads
        mine = {inode: address for inode, address in listening_addresses().items() if inode not in before}
        self.sockets.addresses.update(mine.values())
        self._mesh = MeshStore(self._store, self._rank, self._size, list(mine.values()))
        self.group = self._new(dist.PrefixStore("gloo", self._mesh), self._rank, self._size)
        self._gate = Gate([inode for inode, address in mine.items() if address == self._mesh.address])
        self._gate.shut()
        self.sockets.addresses.update(self._mesh.addresses)
        self.sockets.capture()
        # This comes before the proof: once Gloo's own timeout has expired, the abort that follows it can end the process.
        self.group._set_default_timeout(TIMEOUT)
        name = f"generation {self._store.generation}"
        if problem := prove(self.group, self._rank, self._size, self._mesh.secret, name, self.guard):
            raise WorkerLostError(problem)

    def subgroup(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
        """Make a group for user code on the same Gloo device, so that an abort reaches it."""
        with self._gate.opened():
            group = self._new(store, rank, size)
        group._set_default_timeout(TIMEOUT)
        self._subgroups = [*(known for known in self._subgroups if known() is not None), weakref.ref(group)]
        if size > 1:
            name = f"a group of generation {self._store.generation}"
            if problem := prove(group, rank, size, _secret_of(store, rank), name, self.guard):
                raise WorkerLostError(problem)
        return group

    def guard(self, work: dist.Work) -> dist.Work:
        """Return a work on which nobody is left waiting when Gloo has lost its operation."""
        return self._works.guard(work)

    def abort(self) -> list[threading.Thread]:
        """End collectives with an error, on this rank and its peers: at once, or within some looks if Gloo has lost them."""
        is_first, self._is_aborted = not self._is_aborted, True
        self.sockets.shut()
        if is_first:
            threading.Thread(target=self._end_lost_works, name="spark_elastic-lost-works", daemon=True).start()
        return []

    def close(self) -> None:
        """Release the group of all ranks, and outlive torch, which owns the groups that user code has made."""
        self._is_closed = True
        self._remains = [self.group, self._device, *(known() for known in self._subgroups)]
        self.group = self._device = None

    def drop(self) -> None:
        """Free what closed groups hold.

        Gloo's destructor joins Gloo's threads, so it must not run on one of them, and it does not return if an operation was
        lost.
        """
        self._is_dropped = True
        self.sockets.close()
        self._remains.clear()

    def _new(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = self._timeout
        options._threads = 2
        before = native_threads()
        group = dist.ProcessGroupGloo(store, rank, size, options)
        self._running = self._running | (native_threads() - before)
        return group

    def _end_lost_works(self) -> None:
        """Fail the works that Gloo has lost, from an abort until the group is closed and nothing is pending.

        All connections have been shut, so each operation has been woken up, unless it is lost, and is then run by a thread.
        What is still pending while those threads are idle is lost.
        """
        looks = idle = 0
        before: dict[int, int] | None = None
        while not (self._is_dropped or (self._is_closed and self._works.are_complete())):
            time.sleep(LOOK_SECONDS)
            looks += 1
            if self._works.are_complete():
                continue
            found_all = self.sockets.shut()  # user code may have made a group in the meantime
            is_served = looks > SERVING_LOOKS or rest(self._serving) is not None
            now = rest(self._running) if found_all and is_served and not self._works.are_in_callbacks() else None
            idle = idle + 1 if now is not None and now == before else 0
            before = now
            if idle == LOOKS:
                lost = self._works.lose()
                logger.info("Gloo lost %d operations when the generation ended; this rank goes on without them", lost)


def _secret_of(store: dist.Store, rank: int) -> bytes:
    """Return a secret that only the members of a group of user code know; its first rank generates it."""
    if rank == 0:
        store.set("secret", secrets.token_bytes(SECRET_BYTES))  # type: ignore[arg-type]  # torch takes bytes, its stubs do not
    secret: bytes = store.get("secret")
    return secret
