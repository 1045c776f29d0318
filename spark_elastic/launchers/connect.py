"""Slots from a session of Spark Connect, which has no SparkContext: one query of one task per slot, each on a thread.

A query runs until its task ends. It has a tag, by which it can be interrupted while it waits for a free core.
"""

from __future__ import annotations

import itertools
import logging
import random
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.base import SlotListener, refuse_to_strike
from spark_elastic.launchers.defaults import YIELD_SECONDS, unlogged
from spark_elastic.launchers.resources import ServersProfile, TaskResources, connect_profile
from spark_elastic.launchers.session import check_session_settings, default_sizes, note_use
from spark_elastic.launchers.session_watch import WATCH_SECONDS, SessionWatch, endpoint_of, find_end
from spark_elastic.launchers.slot import Slot
from spark_elastic.launchers.slot_reason import GAVE_UP, find_hopeless, find_reason, never_registered
from spark_elastic.launchers.spark_task import ArrowTask
from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.ticket import Ticket

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

logger = logging.getLogger("spark_elastic")

END_SECONDS = 20.0
# How often waiting queries are interrupted while the job ends, because another one may be about to be submitted.
INTERRUPT_SECONDS = 0.2

# When a session is being stopped, its queries are cancelled before the session says so itself.
_INTERRUPTED = "its queries were interrupted, or its Spark Connect session was stopped"

_LOGGERS = ("pyspark.sql.connect.logging", "pyspark.sql.connect.client.core")

# The error conditions of Spark Connect after which a session is no longer usable.
_ENDED = {
    "SESSION_CLOSED": "its Spark Connect session was closed",
    "SESSION_NOT_FOUND": "the Spark Connect server does not know its session any more; it was closed, or timed out",
    "SESSION_CHANGED": "the Spark Connect server was restarted",
    "NO_ACTIVE_SESSION": "its Spark Connect session was stopped",
    "SparkContext was shut down": "the SparkContext of the Spark Connect server was stopped",
    "stopped SparkContext": "the SparkContext of the Spark Connect server was stopped",
}
_USELESS = "no job can begin: {}. Make another session"


class ConnectLauncher:
    """Takes slots from a session of Spark Connect. Executors have to reach this machine: the driver listens here."""

    platform = "Spark"
    memory_setting = "spark.executor.memoryOverhead"

    def __init__(self, session: SparkSession, resources: TaskResources | None = None) -> None:
        self._session = session
        self._resources = resources
        self._profile: ServersProfile | None = None

    def __enter__(self) -> ConnectLauncher:
        if self._session.is_stopped:
            raise SparkElasticError("the session of Spark Connect has been stopped: make another one")
        if end := find_end(self._session):
            raise SparkElasticError(_USELESS.format(end))
        try:
            check_session_settings(self._session, resources=self._resources)
        except Exception as error:
            if end := end_in(str(error)):
                raise SparkElasticError(_USELESS.format(end)) from error
            raise
        if self._resources is not None:
            self._profile = connect_profile(self._session, self._resources)
        note_use(self._session, self.application)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def session(self) -> SparkSession:
        """The session from which slots are taken."""
        return self._session

    @property
    def application(self) -> str:
        """Spark's name for the application of the Spark Connect server."""
        return str(self._session.conf.get("spark.app.id", "unknown"))

    @property
    def bind_address(self) -> str:
        """All addresses, because it is not known on which of this machine's networks executors are."""
        return ""

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        """Return where executors may reach this machine."""
        host, server_port = endpoint_of(self._session)
        local = local_address(host, server_port)
        hosts = [local, socket.gethostname()]
        if not local or local.startswith("127.") or local == "::1":
            # The server runs on this machine, so executors reach both by the name that they use for the server.
            hosts = [str(self._session.conf.get("spark.driver.host", "")).strip("[]"), *hosts]
        return tuple((host, port) for host in dict.fromkeys(hosts) if host)

    def sizes(self, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        """Fill in what is None from the server's configuration; return ``min_np``, ``num_proc``, ``max_np``."""
        return default_sizes(self._session, num_proc, min_np, max_np, self._resources)

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> ConnectSlots:
        """Return this many slots."""
        return ConnectSlots(self._session, ticket, slots, listener, self._profile)


@dataclass(slots=True)
class _Slot(Slot):
    # The tags of the slot's newest query, and of the one that was interrupted for another job.
    tag: str = ""
    given_back: str = ""


class ConnectSlots:
    """Submits and watches the slots' queries, each on a thread of its own, from ``__enter__`` to ``__exit__``.

    ``on_stopped`` is called if the session or its server is gone, or if queries were interrupted; ``on_failed`` if executors
    cannot run the tasks; ``on_given_up`` if Spark has given up a slot that had not registered.
    """

    def __init__(
        self,
        session: SparkSession,
        ticket: Ticket,
        slots: int,
        listener: SlotListener,
        profile: ServersProfile | None = None,
    ) -> None:
        self._session = session
        self._ticket = ticket
        # Spark before 4.0 does not know the argument.
        self._with_profile: dict[str, Any] = {} if profile is None else {"profile": profile}
        self._listener = listener
        self._slots = [_Slot(number) for number in range(slots)]
        self._wake = threading.Condition()
        self._closing = False
        # The calling thread's, by which the user may interrupt the job.
        self._tags = frozenset(session.getTags())
        self._has_hosts = False
        self._end = ""
        self._threads = [
            threading.Thread(target=self._keep, args=(slot,), name=f"spark_elastic-slot-{slot.number}", daemon=True)
            for slot in self._slots
        ]
        self._watch = SessionWatch(session, self._stop)

    def __enter__(self) -> ConnectSlots:
        self._watch.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Interrupt queries that Spark has not started, and wait until all queries have ended.

        If the server is gone, this does not wait: the client's own attempts to reach it end a few minutes later, on the slots'
        threads.
        """
        self.submit_no_more()
        deadline = time.monotonic() + END_SECONDS
        threading.Thread(target=self._take_back, args=(deadline,), name="spark_elastic-take-back", daemon=True).start()
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline + END_SECONDS and not self.find_end():
                thread.join(WATCH_SECONDS)
        self._watch.__exit__()

    def submit_no_more(self) -> None:
        """Note that the job is over: its tasks are about to end, and must not be started again."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def slot_registered(self, slot: int) -> None:
        """Note that a slot's task runs, so that its next submission need not wait."""
        self._slots[slot].register()
        self._has_hosts = True

    def slot_lost(self, slot: int) -> None:
        """Note that a slot's task is connected no longer, so that Spark may have put it back into its queue."""
        self._slots[slot].is_connected = False

    def give_back(self) -> None:
        """Interrupt all queries and submit them again after a while."""
        again = time.monotonic() + random.uniform(*YIELD_SECONDS)
        for slot in self._slots:
            slot.start_at, slot.given_back = again, slot.tag
        tags = [slot.given_back for slot in self._slots]  # when the thread runs, slots may have their next queries
        threading.Thread(target=self._interrupt, args=tags, name="spark_elastic-give-back", daemon=True).start()

    def strike(self, fault: Fault, slot: int) -> None:
        """Refuse: see ``refuse_to_strike``."""
        refuse_to_strike(fault)

    def find_end(self) -> str:
        """Say how Spark, or somebody through it, has ended the job; empty if it continues."""
        # All workers are lost with the server. That may end the job before the watch has noticed.
        self._end = self._end or self._watch.find_end()
        return self._end

    # ------------------------------------------------------------------ threads

    def _keep(self, slot: _Slot) -> None:
        """Keep a query submitted for a slot until the job is over. Tags apply only to the queries of this thread."""
        for tag in self._tags:
            self._session.addTag(tag)
        for attempt in itertools.count():
            while (pause := slot.start_at - time.monotonic()) > 0 and self._wait(pause):
                pass  # the slot may have been given back meanwhile, and have to wait longer
            if not self._wait(0.0):
                return
            reason, said = "", ""
            slot.tag = f"spark_elastic-{self._ticket.run_id}-{slot.number}-{attempt}"
            self._session.addTag(slot.tag)
            try:
                frame = self._session.range(0, 1, 1, numPartitions=1)
                with unlogged(*_LOGGERS):  # at level DEBUG these loggers write what is sent, and the key with it
                    task = ArrowTask(self._ticket, slot.number)
                    if frame.mapInArrow(task, "slot long", **self._with_profile).collect():
                        slot.register()  # a driver in the cluster may not have been able to tell yet
            except Exception as error:
                said = str(error)
                reason = find_reason([said])
                logger.debug("slot %d ended", slot.number, exc_info=True)
            finally:
                self._session.removeTag(slot.tag)
            if self._closing:
                return
            if end := self._find_end_in(said, slot):
                self._stop(end)
                return
            if not self._has_hosts and (hopeless := find_hopeless(reason)):
                self.submit_no_more()
                self._listener.on_failed(hopeless)
                return
            if slot.given_back == slot.tag:
                slot.registered = False
            else:
                slot.ended(GAVE_UP, reason, self._listener, never_registered(self._ticket))

    def _find_end_in(self, said: str, slot: _Slot) -> str:
        if "OPERATION_CANCELED" in said:
            return "" if slot.given_back == slot.tag else _INTERRUPTED
        return end_in(said)

    def _wait(self, seconds: float) -> bool:
        """Wait this many seconds, or until the job is over. Return whether the job continues."""
        with self._wake:
            return not self._wake.wait_for(lambda: self._closing or bool(self._end), max(seconds, 0.0))

    def _stop(self, reason: str) -> None:
        """Report, once, that the job has been ended."""
        with self._wake:
            if self._closing or self._end:
                return
            self._end = reason
            self._wake.notify_all()
        self._listener.on_stopped(reason)

    def _take_back(self, deadline: float) -> None:
        """Interrupt waiting queries until none is left, and after the deadline running ones, too."""
        while (
            left := [entry for entry in zip(self._slots, self._threads, strict=True) if entry[1].is_alive()]
        ) and not self._end:
            is_late = time.monotonic() > deadline
            for slot, _ in left:
                if is_late or not slot.is_connected:
                    self._interrupt(slot.tag)
            if is_late:
                return
            left[0][1].join(INTERRUPT_SECONDS)

    def _interrupt(self, *tags: str) -> None:
        for tag in tags:
            try:
                self._session.interruptTag(tag)
            except Exception:
                logger.debug("could not interrupt %s", tag, exc_info=True)


def end_in(said: str) -> str:
    """Return, from what an error says, why no other query of this session will run; empty if another try may help."""
    return next((reason for sign, reason in _ENDED.items() if sign in said), "")


def local_address(host: str, port: int) -> str:
    """Return this machine's address in the network of a host; empty if it cannot be determined."""
    if not host:
        return ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
