"""The warm parent: a process that has imported torch, forks training workers on request, and is their guardian.

A fork of it is ready to train in milliseconds, where a fresh interpreter takes seconds. It runs no thread and touches no
CUDA, so forking is safe. It adopts whatever a worker leaves behind, and ends, with everything below it, when the task that
started it ends: by the end of its socket, or by a signal from the kernel should that be held open elsewhere.

Protocol, on a SOCK_SEQPACKET pair: one JSON object a packet. The task sends ``{"ticket": …}`` once, then
``{"start": worker, "token": …}`` with two descriptors (stdout, stderr), and ``{"kill": worker}``; the parent answers
``{"started": worker, "pid": …}`` with a pidfd, and ``{"exited": worker, "code": …}`` once the worker's whole process tree is
gone.
"""

from __future__ import annotations

import array
import atexit
import base64
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import processes
from spark_elastic.worker.control import ControlClient

PACKET_BYTES = 128 * 1024


def main(descriptor: int, task_pid: int) -> None:
    """Serve until the task is gone. Called in a fresh interpreter."""
    signal.signal(signal.SIGTERM, lambda *_: _end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    processes.die_with_parent(signal.SIGTERM, task_pid)
    connection = socket.socket(fileno=descriptor)
    failure = None
    try:
        import_everything()
    except Exception as error:
        failure = error  # for the workers to tell, who speak with the driver
    _Guardian(connection, failure).serve()


def import_everything() -> None:
    """Import what every worker needs, so that its fork does not have to. DDP and optimizers pull in torch._dynamo.

    Without the garbage collector this takes a quarter less: it would look through all that the imports make, and find nothing.
    """
    gc.disable()
    try:
        import torch
        import torch._dynamo
        import torch.distributed
        import torch.nn.parallel.distributed
        import torch.utils.data  # noqa: F401

        import spark_elastic.worker.main  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


class _Guardian:
    """Owns at most one worker at a time."""

    def __init__(self, connection: socket.socket, failure: Exception | None) -> None:
        self._connection = connection
        self._failure = failure
        self._ticket: Ticket | None = None
        self._worker: int | None = None
        self._pid = 0
        self._pidfd = -1
        self._pending: list[tuple[int, list[int], str]] = []

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            if self._worker is None and self._pending:
                self._start(*self._pending.pop(0))
                poll.register(self._pidfd, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == self._pidfd:
                    poll.unregister(self._pidfd)
                    self._reap()
                elif not self._obey():
                    _end()

    def _obey(self) -> bool:
        request, descriptors = receive(self._connection)
        if request is None:
            return False
        if "ticket" in request:
            self._ticket = decode_ticket(request["ticket"])
        elif "start" in request:
            self._pending.append((request["start"], descriptors, request["token"]))
        elif "kill" in request:
            self._kill(request["kill"])
        return True

    def _kill(self, worker: int) -> None:
        if worker == self._worker:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        for entry in [entry for entry in self._pending if entry[0] == worker]:
            self._pending.remove(entry)
            for descriptor in entry[1]:
                os.close(descriptor)
            send(self._connection, {"exited": worker, "code": -signal.SIGKILL})

    def _start(self, worker: int, output: list[int], token: str) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(worker, output, token, parent)
        for descriptor in output:
            os.close(descriptor)
        self._worker, self._pid, self._pidfd = worker, pid, os.pidfd_open(pid)
        send(self._connection, {"started": worker, "pid": pid}, [self._pidfd])

    def _become_worker(self, worker: int, output: list[int], token: str, parent: int) -> NoReturn:
        """In the child: shed what belongs to the guardian and run the worker. Never returns into the guardian's loop."""
        code = 1
        try:
            processes.die_with_parent(signal.SIGKILL, parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            atexit._clear()
            os.dup2(output[0], 1)
            os.dup2(output[1], 2)
            for descriptor in output:
                os.close(descriptor)
            self._connection.close()
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            assert self._ticket is not None
            failure = self._failure
            code = _run(self._ticket, worker, token) if failure is None else _tell(self._ticket, worker, token, failure)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _reap(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        processes.kill_descendants()
        processes.reap_adopted()
        os.close(self._pidfd)
        send(self._connection, {"exited": self._worker, "code": os.waitstatus_to_exitcode(status)})
        self._worker, self._pid, self._pidfd = None, 0, -1


def _run(ticket: Ticket, worker: int, token: str) -> int:
    from spark_elastic.worker.main import run_worker

    return run_worker(ticket, worker, token)


def _tell(ticket: Ticket, worker: int, token: str, failure: Exception) -> int:
    """Be a worker that raises what the imports raised."""
    with ControlClient(ticket, worker, token) as control:
        control.payload()
        control.failed(failure)
    return 1


def _end() -> NoReturn:
    """Take everything below along. Also called from the signal handler, hence no clean-up that needs the main loop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.kill_descendants()
    os._exit(0)


# ---------------------------------------------------------------- the protocol, for both ends


def send(connection: socket.socket, packet: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send one packet, with open files."""
    try:
        socket.send_fds(connection, [json.dumps(packet).encode()], descriptors or [])
    except (BrokenPipeError, ConnectionResetError):
        pass  # the other end is gone, which its reader is about to learn


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next packet and its descriptors; None at the end."""
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = connection.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None, []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (json.loads(data) if data else None), list(descriptors)


def encode_ticket(ticket: Ticket) -> dict[str, Any]:
    """Return a ticket as what JSON can hold."""
    return {
        "run_id": ticket.run_id,
        "addresses": ticket.addresses,
        "certificate": base64.b64encode(ticket.credentials.certificate).decode(),
        "private_key": base64.b64encode(ticket.credentials.private_key).decode(),
        "network_interface": ticket.network_interface,
    }


def decode_ticket(packet: dict[str, Any]) -> Ticket:
    """Return the ticket that was encoded."""
    return Ticket(
        run_id=packet["run_id"],
        addresses=tuple((host, port) for host, port in packet["addresses"]),
        credentials=Credentials(base64.b64decode(packet["certificate"]), base64.b64decode(packet["private_key"])),
        network_interface=packet["network_interface"],
    )
