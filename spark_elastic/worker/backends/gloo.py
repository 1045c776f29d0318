"""Gloo: groups over TCP, which are aborted by shutting their sockets."""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta

import torch.distributed as dist

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends.backend import COLLECTIVE_TIMEOUT, Backend
from spark_elastic.worker.proof import prove
from spark_elastic.worker.sockets import Gate, GroupSockets, listening_addresses
from spark_elastic.worker.torch_store import SECRET_BYTES, MeshStore, WorldStore


class Gloo(Backend):
    """Gloo's groups of a generation. All have one device, so that the group of all ranks knows every socket."""

    devices = ("cpu", "cuda")
    kind = dist.ProcessGroup.BackendType.GLOO
    in_order = False
    runs_ahead = False

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, timeout: timedelta) -> None:
        self.group: dist.ProcessGroupGloo | None = None
        self.sockets = GroupSockets()
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._timeout = timeout
        self._device: dist.ProcessGroupGloo.Device | None = None
        self._mesh: MeshStore | None = None
        self._gate = Gate(())
        # The remains of closed groups, for ``drop``.
        self._remains: list[object] = []

    def build(self) -> None:
        """Connect to all ranks, over connections on which each proves that it is a member of the generation."""
        before = listening_addresses()
        self._device = _create_device(self._address)
        mine = {inode: address for inode, address in listening_addresses().items() if inode not in before}
        self.sockets.addresses.update(mine.values())
        self._mesh = MeshStore(self._store, self._rank, self._size, list(mine.values()))
        self.group = self._new(dist.PrefixStore("gloo", self._mesh), self._rank, self._size)
        self._gate = Gate([inode for inode, address in mine.items() if address == self._mesh.address])
        self._gate.shut()
        self.sockets.addresses.update(self._mesh.addresses)
        self.sockets.capture()
        # This comes before the proof: once Gloo's own timeout has expired, the abort that follows it can end the process.
        self.group._set_default_timeout(COLLECTIVE_TIMEOUT)
        name = f"generation {self._store.generation}"
        if problem := prove(self.group, self._rank, self._size, self._mesh.secret, name):
            raise WorkerLostError(problem)

    def subgroup(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
        """Make a group for user code on the same Gloo device, so that an abort reaches it."""
        with self._gate.opened():
            group = self._new(store, rank, size)
        group._set_default_timeout(COLLECTIVE_TIMEOUT)
        if size > 1:
            name = f"a group of generation {self._store.generation}"
            if problem := prove(group, rank, size, _secret_of(store, rank), name):
                raise WorkerLostError(problem)
        return group

    def abort(self) -> list[threading.Thread]:
        """End collectives with an error, on this rank and its peers. They have ended when this returns."""
        self.sockets.shut()
        return []

    def close(self) -> None:
        """Release the group of all ranks. Torch owns the groups that user code has made."""
        self._remains = [self.group, self._device]
        self.group = self._device = None

    def drop(self) -> None:
        """Free what closed groups hold. Gloo's destructor joins Gloo's threads, so it must not run on one of them."""
        self._remains.clear()
        self.sockets.close()

    def _new(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = self._timeout
        options._threads = 2
        return dist.ProcessGroupGloo(store, rank, size, options)


def _create_device(address: str) -> dist.ProcessGroupGloo.Device:
    """Make a Gloo device that listens on ``address``, eager: a lazy group can hang beyond every timeout."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # torch before 2.7 knows no lazy devices
        return dist.ProcessGroupGloo.create_device(hostname=address)


def _secret_of(store: dist.Store, rank: int) -> bytes:
    """Return a secret that only the members of a group of user code know; its first rank generates it."""
    if rank == 0:
        store.set("secret", secrets.token_bytes(SECRET_BYTES))  # type: ignore[arg-type]  # torch takes bytes, its stubs do not
    secret: bytes = store.get("secret")
    return secret
