"""Seats for slots on this machine, which can be taken away and given back while jobs run, and the process behind the slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spark_elastic._integers import whole_number
from spark_elastic._seconds import seconds_from
from spark_elastic.launchers.defaults import cores
from spark_elastic.launchers.kept import KeptParent
from spark_elastic.launchers.slot_process import SlotParent, SlotProcess
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task.service import TaskPlace


@dataclass(eq=False, slots=True)
class Seat:
    """Room for the process of one slot. A cluster has a number of seats; a job occupies a seat while its process runs there.

    leave_by: when the process is killed because the seat was taken away; None if it was not. returns: whether the seat has
    since been given back, although the process has not left yet.
    """

    number: int
    gpus: tuple[str, ...] = ()
    leave_by: float | None = None
    returns: bool = False


class LocalCluster:
    """A number of seats, shared by all jobs that run on the cluster. A seat holds one slot of one job at a time.

    All methods may be called from any thread and return at once. ``spark_elastic.testing.local_cluster`` makes a cluster with
    ``slots`` seats. Seat ``i`` owns the GPU ``gpus[i]``, if there is one. ``kept`` holds the process that an earlier run has
    left.
    """

    def __init__(self, slots: int, gpus: tuple[str, ...] = (), kept: KeptParent | None = None) -> None:
        """Make the seats. No process is started before a job needs one.

        Raises ``ValueError`` unless ``slots`` is a positive integer.
        """
        slots = whole_number("slots", slots, 1)
        self._lock = threading.Lock()
        # In order of their numbers: the lowest free seat is taken first.
        self._free = [Seat(number, gpus[number : number + 1]) for number in range(slots)]
        self._away: list[Seat] = []
        self._taken: list[Seat] = []
        self._watchers: list[Callable[[], None]] = []
        self._is_closed = False
        # New slots are forked from the last of these; the others live until the slots that they have forked end.
        self._parents: list[SlotParent] = []
        # If the cluster is made for one run: where the first of these comes from, and the last one goes.
        self._kept = kept
        self.cpus = max(cores() // slots, 1)

    @property
    def slots(self) -> int:
        """How many slots can run at the moment."""
        with self._lock:
            return len(self._free) + len(self._staying())

    @property
    def pids(self) -> set[int]:
        """The processes that the cluster keeps between jobs, from which slots are forked."""
        with self._lock:
            return {parent.pid for parent in self._parents}

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._is_closed

    def take_away(self, count: int = 1, *, grace: float = 30.0) -> None:
        """Take away seats, those of running slots first, from the highest number down.

        Their workers leave at their next commit, which costs no step. A process that is still there after ``grace`` seconds is
        killed; with 0, it is killed at once. Raises ``ValueError`` if there are fewer slots.
        """
        count, grace = whole_number("count", count, 1), seconds_from("grace", grace)
        with self._lock:
            present = [*self._free, *sorted(self._staying(), key=lambda seat: seat.number)]
            if count > len(present):
                raise ValueError(f"{_slots(count)} cannot be taken away: there are {len(present)}")
            for seat in present[-count:]:
                self._leave(seat, grace)
        self._notify()

    def give_back(self, count: int = 1) -> None:
        """Give back seats that were taken away. Slots that wait for a seat start there.

        Raises ``ValueError`` if fewer were taken away.
        """
        count = whole_number("count", count, 1)
        with self._lock:
            gone = [*self._away, *(seat for seat in self._taken if seat.leave_by is not None and not seat.returns)]
            if count > len(gone):
                raise ValueError(f"{_slots(count)} cannot be given back: {len(gone) or 'none'} were taken away")
            for seat in gone[:count]:
                if seat in self._away:
                    self._away.remove(seat)
                    self._put_back(seat)
                else:
                    seat.returns = True
        self._notify()

    def close(self) -> None:
        """End the jobs that still run here and, unless it is kept for another run, the process from which slots are forked."""
        self._is_closed = True
        self._notify()
        with self._lock:
            if self._kept is not None and not self._taken and self._parents and not self._parents[-1].has_ended:
                self._kept.keep(self._parents.pop())
            for parent in self._parents:
                parent.end()
            self._parents.clear()

    # ------------------------------------------------------------------ for launchers

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have ``watcher`` called after each change, on any thread."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling ``watcher``."""
        with self._lock:
            self._watchers.remove(watcher)

    def acquire(self) -> Seat | None:
        """Take a free seat; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            self._taken.append(self._free.pop(0))
            return self._taken[-1]

    def start(self, ticket: Ticket, seat: Seat, slot: int, attempt: int) -> SlotProcess:
        """Start the process of a slot in a seat. Raises ``OSError`` if this machine has no room for it at the moment."""
        with self._lock:
            if self._is_closed:
                raise OSError("the local cluster was closed")
            if not self._parents or not self._parents[-1].fits(self.cpus):
                self._replace_parent()
            return self._parents[-1].fork(ticket, TaskPlace(slot, attempt, seat.gpus, self.cpus))

    def release(self, seat: Seat) -> None:
        """Note that a seat's process has ended."""
        with self._lock:
            self._taken.remove(seat)
            if seat.leave_by is None or seat.returns:
                self._put_back(seat)
            else:
                self._away.append(seat)
        self._notify()

    def vacate(self, seat: Seat, grace: float) -> None:
        """Take away an occupied seat. Harmless when done twice."""
        with self._lock:
            if seat in self._staying():
                self._leave(seat, grace)
        self._notify()

    def _replace_parent(self) -> None:
        for parent in self._parents[-1:]:
            parent.retire()
        for parent in [parent for parent in self._parents if parent.has_ended]:
            parent.end()
            self._parents.remove(parent)
        self._parents.append(SlotParent(self.cpus) if self._kept is None else self._kept.take(self.cpus))

    def _staying(self) -> list[Seat]:
        return [seat for seat in self._taken if seat.leave_by is None]

    def _leave(self, seat: Seat, grace: float) -> None:
        if seat in self._free:
            self._free.remove(seat)
            self._away.append(seat)
        else:
            seat.leave_by = time.monotonic() + grace

    def _put_back(self, seat: Seat) -> None:
        seat.leave_by, seat.returns = None, False
        self._free.append(seat)
        self._free.sort(key=lambda free: free.number)

    def _notify(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher()


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
