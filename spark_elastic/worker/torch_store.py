"""The control store of one generation, with the interface that torch's process groups require.

Torch calls it from its own threads. Every call is one round trip over the worker's authenticated connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
from torch.distributed import Store

from spark_elastic.protocol.packing import unpack
from spark_elastic.worker.sockets import Address, is_published

if TYPE_CHECKING:
    from spark_elastic.worker.control import ControlClient

SECRET_BYTES = 16


class WorldStore(Store):
    """A ``torch.distributed.Store``. Values are bytes; a ``get`` blocks until its key exists, whatever its timeout.

    Every call raises ``GenerationOverError`` once the driver has given the generation up, so that nobody waits for a peer
    that is dead.
    """

    def __init__(self, control: ControlClient, generation: int) -> None:
        super().__init__()
        self._control = control
        self._generation = generation

    @property
    def generation(self) -> int:
        return self._generation

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._control.store("set", (key,), (data,), generation=self._generation)

    def get(self, key: str) -> bytes:
        return self._control.store("get", (key,), generation=self._generation).values[0]

    def gather(self, key: str, value: bytes, size: int) -> tuple[bytes, ...]:
        """Contribute a value, and return the values of all ranks, in any order, once ``size`` ranks have contributed one."""
        (packed,) = self._control.store("gather", (key,), (value,), size, generation=self._generation).values
        return unpack(packed)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._control.store("get", tuple(keys), generation=self._generation)

    def add(self, key: str, amount: int) -> int:
        return self._control.store("add", (key,), amount=amount, generation=self._generation).amount

    def check(self, keys: list[str]) -> bool:
        return bool(self._control.store("check", tuple(keys), generation=self._generation).amount)

    def delete_key(self, key: str) -> bool:
        return bool(self._control.store("delete", (key,), generation=self._generation).amount)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: torch asks for the method, but the driver's timeouts apply here."""


class MeshStore(Store):
    """The store that Gloo uses while it connects all ranks: it takes one round trip, instead of two for each peer.

    Gloo has every rank set one key, which ends with its rank, and get the keys of all others. So a ``set`` waits for the values
    of all ranks, and keeps them. Along with them travel ``addresses``, where the ranks' devices listen, and ``secret``, 16 random
    bytes from rank 0 that only members of the generation can know. ``address`` is this rank's own: of several candidates, the one
    that Gloo publishes.
    """

    def __init__(self, store: WorldStore, rank: int, size: int, may_be: Sequence[Address]) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._may_be = may_be
        self._mine = secrets.token_bytes(SECRET_BYTES) if rank == 0 else b""
        self._values: dict[str, bytes] = {}
        self.address = may_be[0]
        self.addresses: set[Address] = set()
        self.secret = b""

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        if len(self._may_be) > 1:  # user code has opened a listening socket in the meantime
            self.address = next((one for one in self._may_be if is_published(one, value)), self.address)
        # The value comes last because all ranks' values end alike, which ``pack`` makes use of.
        mine = msgspec.msgpack.encode((key, self.address, self._mine, value))
        for entry in self._store.gather(key.rstrip("0123456789"), mine, self._size):
            published, address, secret, content = msgspec.msgpack.decode(entry, type=tuple[str, Address, bytes, bytes])
            self._values[published] = content
            self.addresses.add(address)
            self.secret += secret

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return at once: the values of the others came with this rank's own."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: torch asks for the method, but the driver's timeouts apply here."""
