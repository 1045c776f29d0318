"""The process from which the slots of this machine are forked, so that torch is imported once for all of them.

A slot that is forked here starts in milliseconds, and so does its warm parent. The process runs no threads and does not touch
CUDA, so forking is safe. When its imports are done, it tells the driver. For each slot, the driver sends an order with two
descriptors: one to which the slot prints, and one end of a connection. When the slot has ended, its exit code is sent over the
connection; when the driver closes its end, the slot is killed, or not forked at all. This process and its slots end with the
driver; it also ends by itself if it has received no order for long.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import processes
from spark_elastic.task.service import TaskPlace

PACKET_BYTES = 128 * 1024
# What this process sends when it has imported everything, and forks slots.
READY = b"ready"
# The descriptor to which a slot prints, and its end of the connection.
ORDER_DESCRIPTORS = 2


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
    from spark_elastic.worker.process.imports import import_noted
    from spark_elastic.worker.process.warm_parent import try_to_import_everything

    try_to_import_everything()  # what fails here also fails in each slot's warm parent, whose workers report it
    with socket.socket(fileno=descriptor) as orders:
        with suppress(BrokenPipeError):  # the driver needs this process no more
            orders.send(READY)
        _Parent(orders, gone, import_noted).serve()


class _Parent:
    def __init__(self, orders: socket.socket, driver: int, on_idle: Callable[[], None] = lambda: None) -> None:
        self._orders = orders
        self._driver = driver
        self._on_idle = on_idle
        self._slots: set[_Slot] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(driver, selectors.EVENT_READ)
        # Descriptors that are closed while an order is received: if too many were open, those in the order would be lost.
        self._spare: list[int] = []
        self._reserve()

    def serve(self) -> None:
        while self._slots or self._orders in self._selector.get_map():
            if not self._slots:
                self._on_idle()
            ready = self._selector.select(None if self._slots else processes.IDLE_SECONDS)
            if not ready:
                return
            for key, _ in ready:
                if key.fileobj is self._orders:
                    self._take_order()
                elif key.fileobj == self._driver:
                    return
                elif key.data not in self._slots:
                    pass  # the slot was reaped for the key before this one
                elif key.fileobj is key.data.driver:
                    self._selector.unregister(key.data.driver)
                    signal.pidfd_send_signal(key.data.pidfd, signal.SIGKILL)
                else:
                    self._reap(key.data)

    def _take_order(self) -> None:
        while self._spare:
            os.close(self._spare.pop())
        try:
            data, descriptors, _, _ = socket.recv_fds(self._orders, PACKET_BYTES, ORDER_DESCRIPTORS)
        except ConnectionResetError:  # the driver has retired this process, and never read that it is ready
            data, descriptors = b"", []
        if data:
            output, driver = descriptors[0], socket.socket(fileno=descriptors[1])
            if _is_readable(driver):  # the driver had the slot killed before it was forked
                os.close(output)
                _tell_exit(driver, -signal.SIGKILL)
            else:
                self._try_to_fork(msgspec.json.decode(data, type=Order), output, driver)
        else:
            self._selector.unregister(self._orders)  # the driver has started another process in place of this one
        self._reserve()

    def _reserve(self) -> None:
        while len(self._spare) < ORDER_DESCRIPTORS:
            self._spare.append(os.dup(self._driver))

    def _try_to_fork(self, order: Order, output: int, driver: socket.socket) -> None:
        """Fork a slot, or tell its driver why that is not possible at the moment."""
        try:
            self._reserve()
            slot = self._fork(order, output, driver)
        except OSError as error:  # e.g. no process, memory or descriptor is left at the moment
            with suppress(BrokenPipeError):
                os.write(output, f"it cannot be forked: {error}".encode())
            _tell_exit(driver, 1)
            return
        finally:
            os.close(output)
        self._slots.add(slot)
        self._selector.register(slot.driver, selectors.EVENT_READ, slot)
        self._selector.register(slot.pidfd, selectors.EVENT_READ, slot)

    def _fork(self, order: Order, output: int, driver: socket.socket) -> _Slot:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.end_with(partial(self._become_slot, order, output, parent))
        try:
            return _Slot(pid, os.pidfd_open(pid), driver)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _reap(self, slot: _Slot) -> None:
        _, status = os.waitpid(slot.pid, 0)
        self._slots.remove(slot)
        self._selector.unregister(slot.pidfd)
        os.close(slot.pidfd)
        if slot.driver in self._selector.get_map():
            self._selector.unregister(slot.driver)
        _tell_exit(slot.driver, os.waitstatus_to_exitcode(status))

    @staticmethod
    def _become_slot(order: Order, output: int, parent: int) -> int:
        """In the child, drop what belongs to the parent and run the slot. Return the exit code."""
        from spark_elastic.launchers.local_slot import run_slot

        os.dup2(output, 1)
        os.dup2(output, 2)
        processes.close_descriptors({0, 1, 2})
        run_slot(order, parent)
        return 0


def _is_readable(driver: socket.socket) -> bool:
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    return bool(poll.poll(0))


def _tell_exit(driver: socket.socket, code: int) -> None:
    with driver, suppress(BrokenPipeError):  # the driver may have had the slot killed, and be gone itself
        driver.send(str(code).encode())
