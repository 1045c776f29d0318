"""Backend: what a world's process group asks of a library for collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch.distributed as dist

from spark_elastic.worker.torch_store import WorldStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as CollectiveGroup

# Hangs are found by the driver. A library's own timeout must not end a long evaluation on one rank that says heartbeat().
COLLECTIVE_TIMEOUT = timedelta(hours=24)


class Backend(Protocol):
    """Makes the groups of one generation: that of all ranks, and those of ``new_group`` in user code.

    ``build`` and ``subgroup`` may hang with a peer; ``abort`` may be called from any thread, at any time, and does not block.
    """

    # The devices whose tensors the library takes, by torch's names. One that names "cpu" serves user code there instead of Gloo.
    devices: ClassVar[tuple[str, ...]]
    # The library by torch's name, or CUSTOM where torch has none. No other in the table may have the same: torch keeps one
    # group for each kind, and silently uses the first that it was given.
    kind: ClassVar[dist.ProcessGroup.BackendType]
    # Whether no collective is complete before those that were entered ahead of it, as on a stream.
    in_order: ClassVar[bool]
    # Whether the host goes on before a collective has succeeded, so that an abort may spoil what comes after on the device.
    runs_ahead: ClassVar[bool]
    # The group of all ranks, once it is built.
    group: CollectiveGroup | None

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, timeout: timedelta) -> None: ...

    def build(self) -> None:
        """Connect to all ranks, at once: a group that connects at its first collective can hold user code with a dead peer.

        Raises what torch raises when a peer does not answer in time.
        """

    def subgroup(self, store: dist.Store, rank: int, size: int) -> CollectiveGroup:
        """Make a group of some of the ranks, which ``abort`` reaches, too."""

    def abort(self) -> list[threading.Thread]:
        """End all pending and later collectives. Return the threads that are still about it."""

    def close(self) -> None:
        """Let go of the groups. Whatever is pending on them has been aborted."""

    def drop(self) -> None:
        """Free what closed groups hold. This may block."""
