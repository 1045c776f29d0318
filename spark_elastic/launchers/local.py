"""Slots on this machine, without Spark or Java: one process per slot, for as long as the job wants slots.

The slots' processes are forked from one parent, which has imported torch for all of them. They end with their parent, which
ends with the driver, however the driver ends. Unless the user gave a cluster, the parent is kept for the next run.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.base import SlotListener
from spark_elastic.launchers.defaults import YIELD_SECONDS, cores, fill_sizes
from spark_elastic.launchers.gpus import find_gpus
from spark_elastic.launchers.kept import KEPT
from spark_elastic.launchers.local_cluster import LocalCluster, Seat
from spark_elastic.launchers.slot import Slot
from spark_elastic.launchers.slot_process import SlotProcess
from spark_elastic.protocol.fault_points import Action, Fault
from spark_elastic.protocol.ticket import Ticket

logger = logging.getLogger("spark_elastic")

LOOPBACK = "127.0.0.1"
# Processes that the driver has released end within this time. Before that, the driver's service has waited for them.
END_SECONDS = 20.0
KILL_SECONDS = 5.0
# All slots share one environment, so a slot that has failed this often in a row, before any has registered, will fail again.
HOPELESS_FAILURES = 3
# A slot costs some bytes even if no process ever starts in it.
MOST_SLOTS = 100_000


class LocalLauncher:
    """Takes slots from the given cluster, else one for each GPU of this machine, else one for each core."""

    platform = "processes of this machine"
    memory_setting = None

    def __init__(self, local: bool | LocalCluster) -> None:
        if local is not True and not isinstance(local, LocalCluster):
            raise TypeError(
                f"local must be True, False, or a cluster of spark_elastic.testing.local_cluster, not {local!r}"
            )
        self._given = None if local is True else local
        self._own: LocalCluster | None = None
        self._gpus: tuple[str, ...] = ()

    def __enter__(self) -> LocalLauncher:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise SparkElasticError(
                "the working directory of this process has been deleted, and workers would start there: change to one that exists"
            ) from None
        if self._given is None:
            self._gpus = find_gpus()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._own is not None:
            self._own.close()

    @property
    def application(self) -> str:
        """The name of this process, because there is no Spark application."""
        return f"local-{os.getpid()}"

    @property
    def bind_address(self) -> str:
        """The loopback interface, which other machines cannot reach."""
        return LOOPBACK

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        """Return where processes on this machine reach the driver."""
        return ((LOOPBACK, port),)

    def sizes(self, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        """Fill in sizes that are None from the existing slots. Return ``min_np``, ``num_proc`` and ``max_np``."""
        low, start, high = fill_sizes(self._present(), num_proc, min_np, max_np)
        if high > MOST_SLOTS:
            raise ValueError(f"max_np={high} processes are more than a machine can have; give at most {MOST_SLOTS}")
        if self._gpus and high > len(self._gpus):
            raise ValueError(
                f"max_np={high} is more than the {len(self._gpus)} GPUs of this machine, of which each worker has one: lower it, "
                "or set CUDA_VISIBLE_DEVICES= (empty) to train on cores"
            )
        return low, start, high

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> LocalSlots:
        """Return ``slots`` slots: in the given cluster, besides the other jobs that run there, else in a new cluster."""
        if self._given is not None:
            return LocalSlots(self._given, ticket, slots, listener)
        self._own = LocalCluster(slots, self._gpus, KEPT)
        return LocalSlots(self._own, ticket, slots, listener)

    def _present(self) -> int:
        if self._given is not None:
            return self._given.slots
        return len(self._gpus) or cores()


@dataclass(slots=True)
class _Slot(Slot):
    process: SlotProcess | None = None
    seat: Seat | None = None
    attempts: int = 0
    draining: bool = False


class LocalSlots:
    """Starts, watches and ends the slots' processes, on one thread, from ``__enter__`` to ``__exit__``.

    That thread calls the listener: ``on_stopped`` if the cluster was closed, ``on_failed`` if slots cannot be started,
    ``on_draining`` if a slot's seat is being taken away, ``on_given_up`` if a process has ended before it had registered.
    """

    def __init__(self, cluster: LocalCluster, ticket: Ticket, slots: int, listener: SlotListener) -> None:
        self._cluster = cluster
        self._ticket = ticket
        self._slots = [_Slot(number) for number in range(slots)]
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._bell = -1
        self._bell_lock = threading.Lock()
        # Other threads set the following, and then ring the bell.
        self._closing = False
        self._give_back = False
        self._has_hosts = False
        self._has_stopped = False
        self._kill_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="spark_elastic-launcher", daemon=True)

    def __enter__(self) -> LocalSlots:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._cluster.watch(self._ring)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait until all processes have ended; processes that take too long are killed."""
        self.submit_no_more()
        self._thread.join()
        self._cluster.unwatch(self._ring)
        self._selector.close()
        with self._bell_lock:  # threads that do not know yet that the job is over may be about to ring
            os.close(self._bell)
            self._bell = -1

    def submit_no_more(self) -> None:
        """Note that the job is over: its processes are about to end, and must not be started again."""
        self._closing = True
        self._ring()

    def slot_registered(self, slot: int) -> None:
        """Note that a slot's task has registered with the driver."""
        self._slots[slot].register()
        self._has_hosts = True

    def slot_lost(self, slot: int) -> None:
        """Do nothing: this launcher sees by itself when a slot's process ends."""

    def give_back(self) -> None:
        """Start no slot for a while: another job may be waiting for seats in the cluster."""
        self._give_back = True
        self._ring()

    def strike(self, fault: Fault, slot: int) -> None:
        """Take away the seat of a slot, or give back a seat that has been taken away."""
        seat = self._slots[slot].seat
        if fault.action is Action.TAKE_AWAY and seat is not None:
            self._cluster.vacate(seat, fault.grace)
        elif fault.action is Action.GIVE_BACK:
            try:
                self._cluster.give_back()
            except ValueError as error:
                logger.warning("the fault give_back found nothing to do: %s", error)

    def find_end(self) -> str:
        """Say how the cluster has ended the job; empty if the job continues."""
        return "the local cluster was closed" if self._cluster.is_closed else ""

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # This is a bug in this package. The processes end with the driver's connections to them, or with their cluster.
            logger.exception("the launcher failed")
            self._listener.on_failed(f"the launcher failed: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        while True:
            if self._closing and self._kill_at == float("inf"):
                self._kill_at = time.monotonic() + END_SECONDS
                self._withdraw()
            pause = self._look(time.monotonic())
            if self._closing and not any(slot.process for slot in self._slots):
                return
            for key, _ in self._selector.select(pause):
                if key.fd == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    self._take_note(key)

    def _look(self, now: float) -> float | None:
        """Start, drain and kill slots that are due. Return the seconds until the next may be due."""
        if end := self.find_end():
            self._stop(end, self._listener.on_stopped)
        if self._give_back:
            self._give_back = False
            again = now + random.uniform(*YIELD_SECONDS)
            for slot in self._slots:
                slot.start_at = again
                if slot.process is not None and not slot.registered:
                    slot.process.kill()
        due = [self._kill_at, self._kill_at + KILL_SECONDS]
        for slot in self._slots:
            if slot.process is None and not self._closing and not self._has_stopped:
                if slot.start_at <= now:
                    self._start(slot)
                if slot.process is None and slot.start_at > now:
                    due.append(slot.start_at)
            if slot.process is not None:
                due.append(self._see_off(slot, slot.process, now))
        # A slot that was killed becomes readable when its process has ended.
        waiting = [moment for moment in due if now < moment < float("inf")]
        return min(waiting) - now if waiting else None

    def _see_off(self, slot: _Slot, process: SlotProcess, now: float) -> float:
        """Have the process of a drained slot leave. Return the time at which it is to be killed."""
        leave_by = None if slot.seat is None else slot.seat.leave_by
        if leave_by is not None and not slot.draining:
            slot.draining = True
            if slot.registered and leave_by > now:
                self._listener.on_draining(slot.number)
            else:
                process.kill()
        kill_at = min(self._kill_at, leave_by or float("inf"))
        if kill_at <= now:
            process.kill()
        if self._kill_at + KILL_SECONDS <= now:
            process.kill_parent()  # the process does not answer
        return kill_at

    def _start(self, slot: _Slot) -> None:
        seat = self._cluster.acquire()
        if seat is None:
            return
        slot.draining = False
        try:
            slot.process = self._cluster.start(self._ticket, seat, slot.number, slot.attempts)
        except OSError as error:  # e.g. no descriptor, process or memory is left at the moment
            self._failed(slot, str(error))
            self._cluster.release(seat)
            return
        slot.seat = seat
        slot.attempts += 1
        for source in (slot.process.output, slot.process.connection):
            self._selector.register(source, selectors.EVENT_READ, slot)

    def _withdraw(self) -> None:
        """Give up the slots whose processes have not been forked yet, because torch is still being imported for them."""
        for slot in self._slots:
            if slot.process is not None and not slot.process.may_exist:
                process = slot.process
                seat = self._vacate(slot, process)
                process.withdraw()
                self._cluster.release(seat)

    def _take_note(self, key: selectors.SelectorKey) -> None:
        slot: _Slot = key.data
        process: SlotProcess | None = slot.process
        if process is None:
            return  # both descriptors of the process were ready
        if key.fd == process.output:
            if not process.read():
                self._selector.unregister(key.fd)
            return
        seat = self._vacate(slot, process)
        reason = process.close()
        if not self._closing:
            self._failed(slot, reason)
        self._cluster.release(seat)

    def _vacate(self, slot: _Slot, process: SlotProcess) -> Seat:
        """Cease to watch the process of a slot. Return the seat, which is to be released when the process is gone."""
        for source in (process.output, process.connection):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        seat, slot.process, slot.seat = slot.seat, None, None
        assert seat is not None
        return seat

    def _failed(self, slot: _Slot, reason: str) -> None:
        slot.ended("slot %d: %s; it starts again in %.1f s, if the cluster has room", reason, self._listener)
        if not self._has_hosts and slot.failures >= HOPELESS_FAILURES:
            self._stop(f"slot {slot.number} failed {slot.failures} times: {reason}", self._listener.on_failed)

    def _stop(self, reason: str, report: Callable[[str], None]) -> None:
        """Report, once, that the job cannot continue."""
        if not self._closing and not self._has_stopped:
            self._has_stopped = True
            report(reason)
