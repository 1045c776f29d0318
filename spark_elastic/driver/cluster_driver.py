"""ClusterDriver: the driver runs in a slot, for sessions whose executors cannot reach the process that calls ``run``.

The client has nothing but a session. It starts the slots, as only a session can, and everything that the driver reports comes
back through queries of that session. If the driver's executor is lost, so is the driver: with a checkpoint, the job continues
from there with a new driver in another slot.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import cloudpickle
import msgspec

from spark_elastic._exhaustive import assert_never
from spark_elastic.driver.driver_place import SIGNAL_SECONDS, CheckpointWish
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.fault_plan import active_plan
from spark_elastic.driver.meeting import EndMeeting, OpenMeeting, read_addresses
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.post import Addresses, FetchLetters, Letter, read_letters
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.slot_driver import (
    Addressed,
    DriveInSlot,
    DriverLost,
    EventTold,
    JobError,
    JobIsOver,
    LogTold,
    OutputTold,
    ResultPart,
    Row,
    SlotJob,
    SlotLost,
    SlotRegistered,
    SlotsWantedBack,
    Told,
)
from spark_elastic.errors import JobCancelledError, NotEnoughHostsError, SparkElasticError, TrainingFailedError
from spark_elastic.launchers.base import Launcher, SlotListener, Slots
from spark_elastic.launchers.connect import ConnectLauncher
from spark_elastic.launchers.queries import Queries
from spark_elastic.launchers.slot_reason import find_hopeless, find_reason
from spark_elastic.launchers.spark import SparkLauncher
from spark_elastic.protocol.connection import chunks
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.records import SlotGivenUp, WorkerReported
from spark_elastic.protocol.reports import CheckpointWritten
from spark_elastic.protocol.ticket import Ticket

logger = logging.getLogger("spark_elastic")

# A function and arguments of more bytes than this are named as a likely reason why no driver has come.
LARGE_BYTES = 32 * 2**20
# How many slots are not for workers: one for the driver, and one for the queries that fetch what the driver reports.
OWN_SLOTS = 2
# How many drivers may be lost in a row without a checkpoint being written in between.
LOST_DRIVERS = 3
# How many seconds pass between a query that has not reached the driver and the next one.
RETRY_SECONDS = 1.0
# How many queries in a row may fail to fetch what a job that is over has left: the results may be among it.
LAST_QUERIES = 5
# If no driver is going to come: how many seconds the process that waits for it may take to end.
LEAVE_SECONDS = 10.0
# Output arrives here in bursts: a busy printer may delay the next query by this many seconds.
PRINT_SECONDS = 0.5


# Fills in ``num_proc``, ``min_np`` and ``max_np`` where they are None; returns ``min_np``, ``num_proc`` and ``max_np``.
Sizing = Callable[[int | None, int | None, int | None], tuple[int, int, int]]


class _DriverLostError(Exception):
    """The driver is gone, and with it all of the job that was not written to a checkpoint."""


class ClusterDriver:
    """Runs the driver's service in a slot, and in another slot if it is lost. Passes on what the driver reports."""

    own_slots: ClassVar[int] = OWN_SLOTS

    def __init__(self, wish: CheckpointWish | None) -> None:
        self._wish = wish

    def check(self, launcher: Launcher, host_discovery_script: str | os.PathLike[str] | None) -> None:
        """Refuse launchers without a cluster, and a script that would have to run here."""
        if not isinstance(launcher, (SparkLauncher, ConnectLauncher)):
            raise ValueError(
                "driver='cluster' is for the slots of a Spark session; with local the driver is in this process"
            )
        if host_discovery_script is not None:
            raise ValueError("host_discovery_script is run beside the driver: it cannot be used with driver='cluster'")

    def sizes(
        self, launcher: Launcher, num_proc: int | None, min_np: int | None, max_np: int | None
    ) -> tuple[int, int, int]:
        """Return the launcher's sizes less ``OWN_SLOTS``, unless ``max_np`` is given."""
        if max_np is None:
            max_np = room_for_workers(launcher.sizes, num_proc, min_np, "max_np")
        return launcher.sizes(num_proc, min_np, max_np)

    def run(
        self, launcher: Launcher, settings: JobSettings, call: bytes, log: EventLog, printer: OutputPrinter
    ) -> list[bytes]:
        """Run the job until it ends, with as many drivers as it takes; Ctrl-C ends it."""
        lost = 0
        with printer:
            while True:
                life = _Life(launcher, settings, self._wish, log, printer)
                try:
                    return life.run(call)
                except _DriverLostError as error:
                    lost = 1 if life.has_written else lost + 1
                    if life.has_begun and self._wish is None:
                        message = f"{error}. With checkpoint= the job goes on by itself, in another slot"
                    elif lost > LOST_DRIVERS:
                        message = f"{error}. {lost} drivers were lost in a row, without a checkpoint in between"
                    else:
                        logger.warning("%s; the job goes on with a new driver in another slot", error)
                        continue
                    raise TrainingFailedError(message) from error


def room_for_workers(sizes: Sizing, num_proc: int | None, min_np: int | None, setting: str) -> int:
    """Return the ``max_np`` that leaves ``OWN_SLOTS`` of a cluster's slots free. ``sizes`` fills in sizes as launchers do.

    Raises ``ValueError`` if fewer slots are left than are wanted. If the number of slots is not known, as with ``resources=``,
    ``max_np`` is what is wanted.
    """
    at_will = sizes(num_proc, min_np, None)[2]
    try:
        slots = sizes(None, None, None)[2]
    except ValueError:
        return at_will
    room, wanted = slots - OWN_SLOTS, max(num_proc or 1, min_np or 1)
    if room < wanted:
        raise ValueError(
            f"driver='cluster' takes {OWN_SLOTS} slots beside those of the workers, and this cluster has {slots} in "
            f"all: too few for {wanted} worker{'' if wanted == 1 else 's'}. If it is going to have more, give {setting}"
        )
    return room


class _Life:
    """One driver, from the query that runs it to its end.

    has_begun: whether the driver was found. has_written: whether workers have written a checkpoint under this driver.
    """

    def __init__(
        self,
        launcher: Launcher,
        settings: JobSettings,
        wish: CheckpointWish | None,
        log: EventLog,
        printer: OutputPrinter,
    ) -> None:
        assert isinstance(launcher, (SparkLauncher, ConnectLauncher))
        self.has_begun = self.has_written = False
        self._launcher = launcher
        self._settings = settings
        self._wish = wish
        self._log = log
        self._printer = printer
        self._run_id = secrets.token_hex(4)
        self._credentials = create_credentials(self._run_id)
        self._queries = Queries(launcher.session, self._run_id)
        self._driving: concurrent.futures.Future[list[bytes]]
        self._slots: Slots | None = None
        # The number of the newest letter.
        self._heard = 0
        self._is_over = False
        self._parts: list[bytes] = []
        self._results: list[bytes] = []
        self._given_up = ""
        # Fails once somebody has cancelled the job through Spark.
        self._stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._call_bytes = 0

    def run(self, call: bytes) -> list[bytes]:
        """Run the job. Return the pickled results, or raise the job's error, or ``_DriverLostError``."""
        with self._queries:
            return self._drive(call)

    def _drive(self, call: bytes) -> list[bytes]:
        self._call_bytes = len(call)
        deadline = time.monotonic() + self._settings.start_timeout
        spark_driver = str(self._launcher.session.conf.get("spark.driver.host", "") or "").strip("[]")
        job = SlotJob(self._run_id, self._launcher.application, self._settings, call, active_plan(), self._wish)
        rows = [part.data for part in chunks(cloudpickle.dumps(job))]
        with self._meeting(spark_driver, deadline) as meeting:
            driving = DriveInSlot(self._credentials, meeting, spark_driver)
            self._driving = self._queries.submit(driving, f"spark_elastic run {self._run_id}, driver", rows)
            addressed = self._find_driver(meeting, deadline)
            if addressed is None:
                return self._read(self._result_of(self._driving))
        self.has_begun = True
        ticket = Ticket(self._run_id, addressed.service, self._credentials, self._settings.network_interface)
        listener = SlotListener(
            on_stopped=lambda reason: self._stop(self._cancelled(reason)),
            on_failed=lambda reason: self._stop(self._failed(reason)),
            on_draining=lambda slot: None,
            on_given_up=self._slot_given_up,
        )
        self._slots = self._launcher.launch(ticket, self._settings.max_np, listener)
        with ExitStack() as stack:
            stack.enter_context(self._slots)
            # Without a driver, everything that runs in the slots ends by itself.
            stack.callback(self._queries.interrupt)
            stack.callback(self._slots.submit_no_more)
            self._listen(addressed.post)
            return self._read(self._result_of(self._driving))

    @contextmanager
    def _meeting(self, spark_driver: str, deadline: float) -> Iterator[Addresses]:
        """Leave a process at which the driver can be found. It ends once that has happened; on an error it is ended here."""
        opening = OpenMeeting(self._credentials, spark_driver, self._settings.start_timeout)
        asked = self._queries.submit(opening, f"spark_elastic run {self._run_id}, where the driver will be found")
        try:
            self._wait_for([asked], deadline)
            yield read_addresses(self._result_of(asked)[0])
        except BaseException:
            # If this short task were cancelled, nobody would know of the process that it leaves behind.
            concurrent.futures.wait([asked], LEAVE_SECONDS)
            if asked.done() and not asked.exception():
                ending = EndMeeting(read_addresses(asked.result()[0]), self._credentials)
                ended = self._queries.submit(ending, f"spark_elastic run {self._run_id}, no driver comes")
                concurrent.futures.wait([ended], LEAVE_SECONDS)
            raise

    def _find_driver(self, meeting: Addresses, deadline: float) -> Addressed | None:
        """Wait for the driver and return where it is; None if it has already ended."""
        while True:
            description = f"spark_elastic run {self._run_id}, where the driver is"
            asked = self._queries.submit(FetchLetters(meeting, self._credentials, 0), description)
            self._wait_for([asked, self._driving], deadline)
            if self._driving.done():
                return None
            letters = read_letters(self._result_of(asked))
            if letters is None:
                raise _DriverLostError("the driver was lost: the executor is gone that knew where it would be")
            if letters:
                return msgspec.msgpack.decode(letters[0].content, type=Addressed)

    def _listen(self, post: Addresses) -> None:
        """Pass on what the driver reports, until its query has ended."""
        fetching: concurrent.futures.Future[list[bytes]] | None = None
        again_at, failures = 0.0, 0
        while not self._driving.done():
            if fetching is None and time.monotonic() >= again_at:
                description = f"spark_elastic run {self._run_id}, what the driver tells"
                fetching = self._queries.submit(FetchLetters(post, self._credentials, self._heard), description)
            waited: list[concurrent.futures.Future[Any]] = [self._driving, self._stopped]
            concurrent.futures.wait(
                waited if fetching is None else [*waited, fetching], SIGNAL_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
            if self._stopped.done():
                self._stopped.result()
            if fetching is not None and fetching.done():
                error = fetching.exception()
                letters = None if error else read_letters(fetching.result())
                again_at = time.monotonic() + (RETRY_SECONDS if letters is None else 0.0)
                failures = failures + 1 if letters is None else 0
                if self._is_over and failures == LAST_QUERIES:
                    reason = find_reason([str(error)]) if error else "its driver cannot be reached"
                    raise TrainingFailedError(
                        f"the job is done, but its results cannot be fetched: {reason}"
                    ) from error
                fetching = None
                self._hear(letters or [])

    def _wait_for(self, queries: Sequence[concurrent.futures.Future[list[bytes]]], deadline: float) -> None:
        """Wait in short turns for one of these queries, before the job has begun."""
        while not concurrent.futures.wait(queries, SIGNAL_SECONDS, concurrent.futures.FIRST_COMPLETED).done:
            if self._queries.ended:
                raise self._cancelled(self._queries.ended)
            if time.monotonic() > deadline:
                raise NotEnoughHostsError(
                    f"after start_timeout={self._settings.start_timeout:g} s there was no slot for the driver: "
                    f"driver='cluster' takes {OWN_SLOTS} beside those of the workers{self._large_call()}"
                )

    def _result_of(self, query: concurrent.futures.Future[list[bytes]]) -> list[bytes]:
        error = query.exception()
        if error is None:
            return query.result()
        ended = self._queries.find_end(error)
        if not ended and self._slots is not None:
            ended = self._slots.find_end()
        if ended:
            raise self._cancelled(ended) from error
        reason = find_reason([str(error)])
        if hopeless := find_hopeless(reason):
            raise self._failed(hopeless) from error
        raise _DriverLostError(f"the driver was lost: {reason}{self._large_call()}") from error

    def _large_call(self) -> str:
        """Say that the size of the function and its arguments may be why no driver has come; empty if that is not likely."""
        if self.has_begun or self._call_bytes <= LARGE_BYTES:
            return ""
        return (
            f". The function and its arguments have {self._call_bytes / 2**20:.0f} MiB: Spark's driver may not have the memory "
            "to send them. Write large data to storage and give its URL"
        )

    def _read(self, rows: Iterable[bytes]) -> list[bytes]:
        """Read what the driver's task has returned."""
        for row in rows:
            match msgspec.msgpack.decode(row, type=Row):
                case Letter() as letter:
                    self._hear([letter])
                case ResultPart() as part:
                    self._take_part(part)
                case JobError(error):
                    raise self._explained(pickle.loads(error))
                case DriverLost(reason):
                    raise _DriverLostError(f"the driver was lost: {reason}")
                case other:
                    assert_never(other)
        return self._results

    def _hear(self, letters: Iterable[Letter]) -> None:
        """Pass on new letters and skip those that have arrived before."""
        for letter in letters:
            if letter.number > self._heard:
                self._heard = letter.number
                self._take(msgspec.msgpack.decode(letter.content, type=Told))

    def _take(self, told: Told) -> None:
        match told:
            case EventTold(event):
                entry = read_event(event)
                if isinstance(entry.record, WorkerReported) and isinstance(entry.record.report, CheckpointWritten):
                    self.has_written = True
                self._log.pass_on(entry)
            case OutputTold(stream, prefix, lines, dropped):
                self._printer.show(stream, prefix, lines, dropped, PRINT_SECONDS)
            case LogTold(level, text):
                self._printer.log(level, text)
            case SlotRegistered() | SlotLost() | SlotsWantedBack():
                if self._slots is not None:
                    self._tell_slots(self._slots, told)
            case JobIsOver():
                self._is_over = True
                if self._slots is not None:
                    self._slots.submit_no_more()
            case ResultPart():
                self._take_part(told)
            case other:
                assert_never(other)

    @staticmethod
    def _tell_slots(slots: Slots, told: SlotRegistered | SlotLost | SlotsWantedBack) -> None:
        match told:
            case SlotRegistered(slot):
                slots.slot_registered(slot)
            case SlotLost(slot):
                slots.slot_lost(slot)
            case SlotsWantedBack():
                slots.give_back()

    def _take_part(self, part: ResultPart) -> None:
        self._parts.append(part.content)
        if part.last:
            self._results.append(b"".join(self._parts))
            self._parts.clear()

    def _explained(self, error: SparkElasticError) -> SparkElasticError:
        """Add to the error of a shortage what is particular to a driver in a slot."""
        if not isinstance(error, NotEnoughHostsError):
            return error
        last = f" The last slot that was given up: {self._given_up}" if self._given_up else ""
        return NotEnoughHostsError(
            f"{error} driver='cluster' takes {OWN_SLOTS} slots beside those of the workers.{last}"
        )

    def _cancelled(self, reason: str) -> JobCancelledError:
        return JobCancelledError(f"the job cannot go on in {self._launcher.platform}: {reason}")

    def _failed(self, reason: str) -> TrainingFailedError:
        return TrainingFailedError(f"the job cannot go on in {self._launcher.platform}: {reason}")

    # ------------------------------------------------------------------ called by the slots' threads

    def _stop(self, error: SparkElasticError) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(error)

    def _slot_given_up(self, slot: int, reason: str) -> None:
        self._given_up = reason
        self._log.record(SlotGivenUp(slot, reason))
