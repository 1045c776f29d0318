"""Gloo's groups of two ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spark_elastic.worker.sockets import GroupSockets, listening_addresses

SECONDS = 30


@contextmanager
def gloo_pair(store: dist.Store) -> Iterator[list[Any]]:
    """Make the groups of ranks 0 and 1, and shut their connections in the end."""
    made, sockets = {}, GroupSockets()
    before = listening_addresses()

    def build(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=SECONDS)
        made[rank] = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, options)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    sockets.addresses.update(address for inode, address in listening_addresses().items() if inode not in before)
    sockets.capture()
    try:
        yield [made[0], made[1]]
    finally:
        sockets.shut()  # or Gloo would wait for what is pending
        sockets.close()
