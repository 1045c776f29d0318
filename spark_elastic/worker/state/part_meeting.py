"""Lets ranks tell rank 0, through the control store, that they have written their parts of a durable checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store


class StoreMeeting:
    """One checkpoint's meeting. No two of a generation have the same name. May be used from any thread.

    asks: whether ranks ask rank 0, which answers by ``wish``, if it wants the parts; if not, the parts are always wanted.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, asks: bool = False) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._asks = asks
        self._told = 0

    def wish(self, wanted: bool) -> None:
        """Say on rank 0 whether it wants the parts."""
        self._store.set(f"{self._name}/wanted", str(int(wanted)))

    def is_wanted(self) -> bool:
        """Whether rank 0 wants the parts."""
        return not self._asks or bool(int(self._store.get(f"{self._name}/wanted")))

    def tell(self) -> None:
        """Tell rank 0, from another rank, that there is progress."""
        self._put(b"")

    def bring(self, content: bytes) -> None:
        """Tell rank 0, from another rank, what has been written."""
        self._put(content)

    def collect(self, progress: Callable[[], None]) -> list[bytes]:
        """Wait on rank 0 for what all other ranks bring, in rank order. The store forgets it."""
        found = []
        for rank in range(1, self._size):
            content, number = b"", 0
            while not content:
                number += 1
                key = f"{self._name}/{rank}/{number}"
                content = self._store.get(key)
                self._store.delete_key(key)
                progress()
            found.append(content)
        return found

    def _put(self, content: bytes) -> None:
        # What the store refuses gets no number: rank 0 waits for each number in turn.
        self._store.set(f"{self._name}/{self._rank}/{self._told + 1}", content)  # type: ignore[arg-type]  # torch's stub wants a str
        self._told += 1
