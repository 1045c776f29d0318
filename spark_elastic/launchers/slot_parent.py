"""The process that the slots of this machine are forked from: it imports torch once for all of them.

A slot forked from it is there in milliseconds, and so is its warm parent. It runs no thread and touches no CUDA, so forking is
safe. For each slot the driver sends an order with two descriptors: where the slot writes what it prints, and one end of a
connection. When the slot has ended its exit code comes back over that; when the driver closes its end the slot is killed.
This process ends with the driver, and its slots with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import processes
from spark_elastic.task.service import TaskPlace

PACKET_BYTES = 128 * 1024


class Order(msgspec.Struct, frozen=True):
    """What a slot is to do."""

    ticket: Ticket
    place: TaskPlace


@dataclass(frozen=True, eq=False)
class _Slot:
    pid: int
    pidfd: int
    driver: socket.socket


def main(descriptor: int, driver: int) -> None:
    """Serve until the driver is gone. Called in a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = os.pidfd_open(driver)
    if os.getppid() != driver:
        return
    from spark_elastic.launchers import local_slot  # noqa: F401
    from spark_elastic.worker.warm_parent import import_everything

    try:
        import_everything()
    except Exception:
        pass  # each slot's warm parent fails in the same way, and its workers tell the driver
    _Parent(socket.socket(fileno=descriptor), gone).serve()


class _Parent:
    def __init__(self, orders: socket.socket, driver: int) -> None:
        self._orders = orders
        self._driver = driver
        self._slots: set[_Slot] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(driver, selectors.EVENT_READ)

    def serve(self) -> None:
        while self._slots or self._orders in self._selector.get_map():
            for key, _ in self._selector.select():
                if key.fileobj is self._orders:
                    data, descriptors, _, _ = socket.recv_fds(self._orders, PACKET_BYTES, 2)
                    if data:
                        self._fork(msgspec.json.decode(data, type=Order), *descriptors)
                    else:
                        self._selector.unregister(self._orders)  # the driver has started another process in our place
                elif key.fileobj == self._driver:
                    return
                elif key.fileobj is key.data.driver:
                    self._selector.unregister(key.data.driver)
                    signal.pidfd_send_signal(key.data.pidfd, signal.SIGKILL)
                else:
                    self._reap(key.data)

    def _fork(self, order: Order, output: int, driver: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_slot(order, output, parent)
        os.close(output)
        slot = _Slot(pid, os.pidfd_open(pid), socket.socket(fileno=driver))
        self._slots.add(slot)
        self._selector.register(slot.driver, selectors.EVENT_READ, slot)
        self._selector.register(slot.pidfd, selectors.EVENT_READ, slot)

    def _reap(self, slot: _Slot) -> None:
        _, status = os.waitpid(slot.pid, 0)
        self._slots.remove(slot)
        self._selector.unregister(slot.pidfd)
        os.close(slot.pidfd)
        if slot.driver in self._selector.get_map():
            self._selector.unregister(slot.driver)
        with slot.driver:
            try:
                slot.driver.send(str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass  # the driver has asked for its end, and is gone itself

    def _become_slot(self, order: Order, output: int, parent: int) -> NoReturn:
        """In the child: shed what belongs to the parent and be the slot. Never returns into the parent's loop."""
        from spark_elastic.launchers.local_slot import run_slot

        code = 1
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            processes.close_descriptors({0, 1, 2})
            run_slot(order, parent)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
