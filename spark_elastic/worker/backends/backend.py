"""Backend: what a world's process group requires of a library for collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.distributed as dist

from spark_elastic.worker.torch_store import WorldStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as CollectiveGroup

# The driver detects hangs. A library's own timeout must not interrupt a long evaluation on one rank that calls heartbeat().
COLLECTIVE_TIMEOUT = timedelta(hours=24)
# The dtypes that all libraries reduce and broadcast, with the results that torch itself would compute.
DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)


class Backend(Protocol):
    """Makes the groups of one generation: that of all ranks, and those of ``new_group`` in user code.

    ``build`` and ``subgroup`` may hang with a peer; ``abort`` may be called from any thread, at any time, and does not block.
    That a peer is gone, or silent, is noticed on the connections of Gloo's group, which every world has besides.
    """

    # The devices whose tensors the library takes, by torch's names. A library that names "cpu" replaces Gloo there for user
    # code and for repairs, which bring ranks the newest commit.
    devices: ClassVar[tuple[str, ...]]
    # Torch's name for the library, or CUSTOM if torch has none. No two libraries in the table may have the same kind: torch
    # keeps one group for each kind, and silently uses the first one registered.
    kind: ClassVar[dist.ProcessGroup.BackendType]
    # Whether collectives complete in the order in which they were entered, as on a stream.
    in_order: ClassVar[bool]
    # Whether the host continues before a collective has succeeded, so that an abort may spoil what follows on the device.
    runs_ahead: ClassVar[bool]
    # The group of all ranks, once it is built.
    group: CollectiveGroup | None

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, timeout: timedelta) -> None: ...

    @classmethod
    def why_unavailable(cls) -> str:
        """Say why this process cannot use the library, and what to do; empty if it can."""
        return ""

    def build(self) -> None:
        """Connect to all ranks now: a group that connected at its first collective could block user code on a dead peer.

        Raises what torch raises when a peer does not answer in time.
        """

    def subgroup(self, store: dist.Store, rank: int, size: int) -> CollectiveGroup:
        """Make a group of some of the ranks, which ``abort`` reaches, too."""

    def guard(self, work: dist.Work) -> dist.Work:
        """Return what user code and torch wait for in place of one of these groups' works: itself, if an abort ends it.

        Otherwise return a ``Guarded`` of ``works.py``: only of these does ``WatchedGroup`` turn errors into ``WorkerLostError``.
        """
        return work

    def abort(self) -> list[threading.Thread]:
        """End all pending and later collectives. Return the threads that are still working on the abort."""

    def close(self) -> None:
        """Release the groups. Everything pending on them has been aborted before."""

    def drop(self) -> None:
        """Free what closed groups hold. This may block."""
