"""The interfaces of a launcher: what the driver asks of it, and what it reports to the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.ticket import Ticket


@dataclass(frozen=True)
class SlotListener:
    """What slots call, on a thread of their own, to report what happens to them.

    on_stopped: the platform, or somebody through it, has ended the job, for this reason. on_failed: tasks cannot run in any
    slot, for this reason. on_draining: the platform is about to take away the place where this slot's task runs.
    on_given_up: this slot ended, for this reason, before its task had registered.
    """

    on_stopped: Callable[[str], None]
    on_failed: Callable[[str], None]
    on_draining: Callable[[int], None]
    on_given_up: Callable[[int, str], None]


def refuse_to_strike(fault: Fault) -> NoReturn:
    """Raise ``NotImplementedError`` for a fault that only a ``testing.local_cluster`` plays; ``run`` has refused it before."""
    raise NotImplementedError(f"{fault} is for a testing.local_cluster")


class SlotKeeper(Protocol):
    """Whoever keeps the slots of a job, as the driver's service sees it. The service's loop calls these, so none may block."""

    def slot_registered(self, slot: int) -> None:
        """Note that a slot's task has registered with the driver."""

    def slot_lost(self, slot: int) -> None:
        """Note that the connection of a slot's task has ended although the job goes on."""

    def give_back(self) -> None:
        """Give all slots back to the platform and request them again after a while: another job may be waiting."""

    def strike(self, fault: Fault, slot: int) -> None:
        """Play a test's fault that takes slots away or gives them back. ``run`` allows it in a ``testing.local_cluster`` only."""


class Slots(SlotKeeper, AbstractContextManager["Slots"], Protocol):
    """Keeps one task alive for each slot, from ``__enter__`` to ``__exit__``, and leaves no task behind.

    A task calls ``spark_elastic.task.service.run_task`` with the ticket and its place. A slot whose task ends is started
    again, after a pause that grows while it fails. All methods may be called from any thread, and none blocks.
    """

    def submit_no_more(self) -> None:
        """Note that the job is over: tasks are about to end, and must not be started again."""

    def find_end(self) -> str:
        """Say how the platform, or somebody through it, has ended the job; empty if the job continues."""


class Launcher(AbstractContextManager["Launcher"], Protocol):
    """Finds the platform on ``__enter__``, and leaves it unchanged on ``__exit__``.

    A launcher is constructed with the user's ``spark`` or ``local`` argument, and raises ``TypeError`` if that has the wrong
    type. On entry it raises ``ValueError`` if no worker could run with the platform's settings.
    """

    @property
    def platform(self) -> str:
        """The name of the platform in messages."""

    @property
    def memory_setting(self) -> str | None:
        """The platform's setting that gives workers more memory; None if there is none."""

    @property
    def application(self) -> str:
        """The platform's name for this application."""

    @property
    def bind_address(self) -> str:
        """Where the driver has to listen; empty for all addresses."""

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        """Return where tasks reach a driver that listens on ``port``, in the order in which to try."""

    def sizes(self, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        """Fill in sizes that are None from what the platform has. Return ``min_np``, ``num_proc`` and ``max_np``."""

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> Slots:
        """Return ``slots`` slots for tasks that join the ticket's job. Nothing runs until the result is entered."""
