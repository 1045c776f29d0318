"""How the ranks of a world tell rank 0 that they have written their parts of a durable checkpoint: by the control store."""

from __future__ import annotations

from torch.distributed import Store


class StoreMeeting:
    """One checkpoint's meeting. No two of a generation have the same name. May be used from any thread."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size

    def bring(self, content: bytes) -> None:
        """Tell rank 0, from another rank."""
        self._store.set(f"{self._name}/{self._rank}", content)  # type: ignore[arg-type]  # torch's stub wants a str

    def collect(self) -> list[bytes]:
        """Wait on rank 0 for what all other ranks bring, in rank order. The store forgets it."""
        found = []
        for rank in range(1, self._size):
            key = f"{self._name}/{rank}"
            found.append(self._store.get(key))
            self._store.delete_key(key)
        return found
