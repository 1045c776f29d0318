"""Nccl: groups of NVIDIA GPUs. An abort completes their collectives with meaningless results."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from spark_elastic.worker.backends.backend import COLLECTIVE_TIMEOUT, Backend
from spark_elastic.worker.sockets import interface_of
from spark_elastic.worker.torch_store import WorldStore

# How long a failed build waits for each communicator of a past world to be freed.
ABORT_SECONDS = 2.0


class Nccl(Backend):
    """NCCL's groups of a generation. Collectives run on the GPU's streams, and the host runs ahead of them."""

    devices = ("cuda",)
    kind = dist.ProcessGroup.BackendType.NCCL
    in_order = True
    runs_ahead = True
    # The aborts of this process that may still be running.
    _aborting: ClassVar[list[threading.Thread]] = []

    def __init__(self, store: WorldStore, rank: int, size: int, address: str, timeout: timedelta) -> None:
        self.group: dist.ProcessGroupNCCL | None = None
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._subgroups: list[dist.ProcessGroupNCCL] = []
        # The remains of closed groups, for ``drop``.
        self._remains: list[object] = []

    @classmethod
    def why_unavailable(cls) -> str:
        if not dist.is_nccl_available():
            return f"the torch of this worker, {torch.__version__}, has no NCCL; leave backend= out, or install a torch for CUDA"
        if not torch.cuda.is_available():
            return "this worker has no GPU that torch can use; leave backend= out, or give each worker a GPU"
        return ""

    def build(self) -> None:
        try:
            self.group = self._new(dist.PrefixStore("nccl", self._store), self._rank, self._size)
        except RuntimeError:
            # The build may have lacked memory that the last world's communicator still holds. Free it for the next try.
            for thread in list(self._aborting):
                thread.join(ABORT_SECONDS)
            raise

    def subgroup(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupNCCL:
        group = self._new(store, rank, size)
        self._subgroups.append(group)
        return group

    def abort(self) -> list[threading.Thread]:
        """End collectives without an error and with meaningless results, also on peers that have not aborted yet.

        This takes some milliseconds. Freeing the communicators takes a second more, in which another one may be built.
        """
        groups = [group for group in (self.group, *self._subgroups) if group is not None]
        # NCCL's abort may wait for kernels, and the caller may be the control thread, which must not wait. The threads are not
        # daemons, because NCCL must not be torn down under one when the process exits.
        aborting = [threading.Thread(target=group.abort, name="spark_elastic-nccl-abort") for group in groups]
        for thread in aborting:
            thread.start()
        Nccl._aborting = [thread for thread in (*self._aborting, *aborting) if thread.is_alive()]
        return aborting

    def close(self) -> None:
        self._remains = [self.group, *self._subgroups]
        self.group = None
        self._subgroups.clear()

    def drop(self) -> None:
        self._remains.clear()

    def _new(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroupNCCL:
        # In this package the driver aborts the group on an error; torch's watchdog would end the process. Write the variable
        # only if its value differs, because threads of earlier groups may be reading it.
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Torch's monitor would query the store of a past generation, and end the process, which is for the driver to decide.
        for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.setdefault(name, "0")
        interface = interface_of(self._address)
        if interface is not None:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Connect now: a communicator that is built at the first collective could block the user's thread on a dead peer. The
        # device is set because this thread has not used the GPU yet, and NCCL takes the thread's CUDA context.
        torch.cuda.set_device(0)
        group.eager_connect_single_device(torch.device("cuda", 0))
        return group
