"""The interfaces of a launcher: what the driver asks of it, and what it tells the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from spark_elastic.protocol.ticket import Ticket


@dataclass(frozen=True)
class SlotListener:
    """What slots call, on a thread of their own, to tell what happens to them.

    on_stopped: the job cannot go on, for this reason. on_draining: the platform is about to take away the place where this
    slot's task runs. on_given_up: this slot ended, for this reason, before its task had registered.
    """

    on_stopped: Callable[[str], None]
    on_draining: Callable[[int], None]
    on_given_up: Callable[[int, str], None]


class Slots(AbstractContextManager["Slots"], Protocol):
    """Keeps one task alive for each slot, from ``__enter__`` to ``__exit__``, and leaves no task behind.

    A task calls ``spark_elastic.task.service.run_task`` with the ticket and its place. A slot whose task ends is started
    again, after a pause that grows while it fails. All methods may be called from any thread, and none blocks.
    """

    def slot_registered(self, slot: int) -> None:
        """Note that a slot's task has registered at the driver."""

    def give_back(self) -> None:
        """Give all slots back to the platform and ask for them again after a while: another job may be waiting."""

    def submit_no_more(self) -> None:
        """Note that the job is over: tasks are about to end, and are not to be started again."""

    def find_end(self) -> str:
        """Say how the platform, or somebody by way of the platform, has ended the job; an empty string if the job goes on."""


class Launcher(AbstractContextManager["Launcher"], Protocol):
    """Finds the platform on ``__enter__`` and leaves it as it was on ``__exit__``.

    A launcher is made with what the user gave as ``spark`` or ``local``, and raises ``TypeError`` if that is of the wrong kind.
    On entry it raises ``ValueError`` for a platform with whose settings no worker could run.
    """

    @property
    def platform(self) -> str:
        """What messages call the platform."""

    @property
    def memory_setting(self) -> str | None:
        """The platform's setting that gives workers more memory; None where there is none."""

    @property
    def application(self) -> str:
        """What the platform calls this application."""

    @property
    def bind_address(self) -> str:
        """Where the driver has to listen; empty for everywhere."""

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        """Return where tasks reach a driver that listens on ``port``; they try one after the other."""

    def sizes(self, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        """Fill in sizes that are None by what the platform has. Return ``min_np``, ``num_proc`` and ``max_np``."""

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> Slots:
        """Make ``slots`` slots, for tasks that join the ticket's job. Nothing runs before they are entered."""
