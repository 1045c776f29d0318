"""A rank that dies so that Gloo loses an operation of its peer; pickled by value for workers.

The peer has entered an operation and is stopped, while this rank says that it is ready to receive, sends what it has, and dies
with a reset of the connection. When the peer goes on, it reads that the other side is ready, fails to write, notes the operation
no more, and then reads that the connection has ended. Or it reads a part of what it waits for, and then that.
"""

from __future__ import annotations

from typing import Any


def train_through_a_lost_operation(kind: str, folder: str) -> tuple[list[int], int]:
    """Train eight steps on two ranks; in the fourth of generation 1 rank 1 dies. Return the first two processes, and this one.

    ``kind``: the operation that is lost, "backward", "collective", "sending" or "receiving". Whoever started the job has to let
    rank 0 go on once rank 1 has died, whose processes are then in the file ``processes`` of ``folder``.
    """
    import os
    import signal
    import socket
    import struct
    import threading
    import time
    from pathlib import Path

    import psutil
    import torch
    import torch.distributed as dist

    import spark_elastic as se
    from spark_elastic.worker.job import current_job

    model = se.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = se.TorchState(model, optimizer, step=0, processes=[])

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()

    # What is received has to be more than the kernel holds for a process that is stopped.
    numbers = 4096 if kind == "sending" else 2**24

    def enter() -> None:
        if kind == "backward":
            step()
        elif kind == "collective":
            dist.all_reduce(torch.ones(4096))
        elif (kind == "sending") == (se.rank() == 0):
            dist.send(torch.ones(numbers), 1 - se.rank())
        else:
            dist.recv(torch.ones(numbers), 1 - se.rank())

    def wait_for_quiet(sockets: Any) -> None:
        before = None
        while (now := sockets.traffic()) != before:
            before = now
            time.sleep(0.3)

    def die() -> None:
        job = current_job()
        assert job is not None
        assert job.world is not None
        sockets: Any = job.world.group._host.sockets  # type: ignore[attr-defined]
        peer = psutil.Process(state.processes[0])
        wait_for_quiet(sockets)
        peer.suspend()
        while peer.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        threading.Thread(target=enter, daemon=True).start()
        wait_for_quiet(sockets)
        for connection in sockets._kept:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        path = Path(folder) / "processes"
        path.with_suffix(".new").write_text(" ".join(map(str, state.processes)))
        path.with_suffix(".new").rename(path)
        os.kill(os.getpid(), signal.SIGKILL)

    @se.elastic
    def train(state: Any) -> tuple[list[int], int]:
        while state.step < 8:
            if se.generation() == 1 and state.step == 3:
                state.processes = se.allgather_object(os.getpid())
                state.commit()
                se.barrier()
                if se.rank() == 1:
                    die()
                enter()
            step()
            state.step += 1
            state.commit()
        return state.processes, os.getpid()

    result: tuple[list[int], int] = train(state)
    return result
