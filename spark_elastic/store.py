"""WorldStore: the control store of one generation, as torch's process groups want it.

Torch calls it from threads of its own; every call is one round trip over the worker's authenticated connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from spark_elastic.control import ControlClient


class WorldStore(Store):
    """A ``torch.distributed.Store``. Values are bytes; a ``get`` blocks until its key exists, whatever its timeout.

    Every call raises ``GenerationOverError`` once the driver has given the generation up, so that nobody waits for a peer
    that is dead.
    """

    def __init__(self, control: ControlClient, generation: int) -> None:
        super().__init__()
        self._control = control
        self._generation = generation

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._control.store("set", (key,), (data,), generation=self._generation)

    def get(self, key: str) -> bytes:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        """Get several values in one round trip."""
        return self._control.store("get", tuple(keys), generation=self._generation).values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._control.store("get", tuple(keys), generation=self._generation)

    def add(self, key: str, amount: int) -> int:
        return self._control.store("add", (key,), amount=amount, generation=self._generation).amount

    def check(self, keys: list[str]) -> bool:
        return bool(self._control.store("check", tuple(keys), generation=self._generation).amount)

    def delete_key(self, key: str) -> bool:
        return bool(self._control.store("delete", (key,), generation=self._generation).amount)

    def set_timeout(self, timeout: timedelta) -> None:
        """Part of torch's interface; the driver's timeouts hold instead."""
