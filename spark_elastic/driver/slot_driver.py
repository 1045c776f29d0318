"""The task that runs a job's driver in a slot. It reports to the client by letters while it runs, and by rows at its end."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import select
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import cloudpickle
import msgspec

from spark_elastic.driver.driver_place import CheckpointWish, begin_job
from spark_elastic.driver.event_log import EventLog, OnEvent
from spark_elastic.driver.meeting import own_addresses
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.post import Addresses, Letter, PostOffice, Put, visit
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.base import refuse_to_strike
from spark_elastic.launchers.spark_task import find_executor
from spark_elastic.protocol.connection import chunks
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.messages import Stream
from spark_elastic.protocol.records import EventsDropped

# How many seconds the driver waits, before it ends the slots, until the client knows that the job is over and does not
# start them again.
TELL_SECONDS = 5.0
# How many seconds pass between two points at which Spark can stop the task of a cancelled driver.
PULSE_SECONDS = 0.25
# How many bytes of results the driver's task returns at most. Larger ones are fetched before, in parts of this size: the JVM of
# the executor holds all that a task returns.
RESULT_BYTES = 16 * 1024 * 1024


class _Told(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages to the client."""


class EventTold(_Told, frozen=True):
    """An event of the job."""

    event: dict[str, object]


class OutputTold(_Told, frozen=True):
    """Lines that a worker printed."""

    stream: Stream
    prefix: str
    lines: tuple[str, ...]
    dropped: int


class LogTold(_Told, frozen=True):
    """A line of the driver's log."""

    level: int
    text: str


class SlotRegistered(_Told, frozen=True):
    """A slot's task has registered."""

    slot: int


class SlotLost(_Told, frozen=True):
    """The connection of a slot's task has ended although the job goes on."""

    slot: int


class SlotsWantedBack(_Told, frozen=True):
    """All slots are to be given back for a while."""


class JobIsOver(_Told, frozen=True):
    """No slot is needed any more."""


class ResultPart(_Told, frozen=True):
    """A part of a worker's pickled result. Results are in rank order, and the parts of each are consecutive."""

    content: bytes
    last: bool


class JobError(_Told, frozen=True):
    """The pickled error with which the job has ended."""

    error: bytes


class DriverLost(_Told, frozen=True):
    """The driver was lost, or the client could not have found it."""

    reason: str


Told = EventTold | OutputTold | LogTold | SlotRegistered | SlotLost | SlotsWantedBack | JobIsOver | ResultPart
# The rows at the end: letters that had not been fetched, then results or an error.
Row = Letter | ResultPart | JobError | DriverLost


@dataclass(frozen=True, slots=True)
class SlotJob:
    """A job, as it travels to its driver's slot. It holds none of this package's secrets."""

    run_id: str
    application: str
    settings: JobSettings
    call: bytes
    faults: tuple[Fault, ...]
    wish: CheckpointWish | None


class Addressed(msgspec.Struct, frozen=True):
    """Where the driver's service and its post office are."""

    service: Addresses
    post: Addresses


@dataclass(frozen=True, slots=True)
class DriveInSlot:
    """What the driver's task does. It takes a pickled ``SlotJob`` as rows, in parts, and returns encoded ``Row`` objects."""

    credentials: Credentials
    meeting: Addresses
    spark_driver: str

    def __call__(self, rows: Iterable[bytes]) -> Iterator[bytes | None]:
        """Run the driver until the job has ended, or Spark has taken the task back."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        encode = msgspec.msgpack.encode
        if context.attemptNumber() > 0:
            # Spark has restarted a lost task. The slots know only the first driver's address, and the job's state was there.
            yield encode(DriverLost("it was lost with the executor that it ran on"))
            return
        job: SlotJob = pickle.loads(b"".join(rows))
        with EndWithExecutor(), PostOffice(self.credentials) as post:
            outcome = yield from self._drive(job, post)
            parts = _parts_of(outcome) if isinstance(outcome, list) else deque()
            yield from leave_for_client(post, parts)
            left = post.left()
        yield from map(encode, left)
        if not isinstance(outcome, list):
            yield encode(outcome if isinstance(outcome, DriverLost) else JobError(_pickle(outcome)))
        yield from parts

    def _drive(self, job: SlotJob, post: PostOffice) -> Generator[None, None, list[bytes] | DriverLost | Exception]:
        def tell(what: Told) -> None:
            post.put(msgspec.msgpack.encode(what))
            if dropped := post.take_turned_away():
                log.record(EventsDropped(dropped))

        log = EventLog(OnEvent(lambda event: tell(EventTold(event))))
        try:
            with ExitStack() as stack:
                stack.enter_context(log)
                service = stack.enter_context(
                    SparkDriverService(
                        job.settings,
                        self.credentials,
                        event_log=log,
                        printer=_LetterPrinter(tell),
                        faults=job.faults,
                    )
                )
                payload = begin_job(log, job.run_id, job.settings, job.call, job.faults, job.wish, job.application)
                service.begin(payload, _ClientsSlots(tell))
                addressed = Addressed(
                    own_addresses(self.spark_driver, service.port), own_addresses(self.spark_driver, post.port)
                )
                try:
                    visit(self.meeting, self.credentials, Put(msgspec.msgpack.encode(addressed)))
                except OSError as error:
                    return DriverLost(f"the executor was lost that knew where it would be ({error})")
                while not concurrent.futures.wait([service.outcome], PULSE_SECONDS).done:
                    yield None
                tell(JobIsOver())
                post.emptied.wait(TELL_SECONDS)
                return service.outcome.result()
        except Exception as error:
            return error


class EndWithExecutor:
    """Ends this process at once when its executor ends. pyspark's daemon might leave it behind, and two drivers would train."""

    def __enter__(self) -> EndWithExecutor:
        self._executor = os.pidfd_open(find_executor())
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="spark_elastic-executor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        os.eventfd_write(self._done, 1)
        self._thread.join()
        os.close(self._done)
        os.close(self._executor)

    def _watch(self) -> None:
        watched = select.poll()
        watched.register(self._executor, select.POLLIN)
        watched.register(self._done, select.POLLIN)
        if self._done not in [descriptor for descriptor, _ in watched.poll()]:
            os._exit(1)


class _ClientsSlots:
    """Tells the client, which keeps the slots."""

    def __init__(self, tell: Callable[[SlotRegistered | SlotLost | SlotsWantedBack], None]) -> None:
        self._tell = tell

    def slot_registered(self, slot: int) -> None:
        self._tell(SlotRegistered(slot))

    def slot_lost(self, slot: int) -> None:
        self._tell(SlotLost(slot))

    def give_back(self) -> None:
        self._tell(SlotsWantedBack())

    def strike(self, fault: Fault, slot: int) -> None:
        refuse_to_strike(fault)


class _LetterPrinter(OutputPrinter):
    """Sends lines to the client instead of printing them."""

    def __init__(self, tell: Callable[[OutputTold | LogTold], None]) -> None:
        super().__init__()
        self._tell = tell

    def __enter__(self) -> _LetterPrinter:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def show(self, stream: Stream, prefix: str, lines: tuple[str, ...], dropped: int = 0, wait: float = 0.0) -> None:
        self._tell(OutputTold(stream, prefix, lines, dropped))

    def log(self, level: int, text: str) -> None:
        self._tell(LogTold(level, text))


def _parts_of(results: list[bytes]) -> deque[bytes]:
    """Cut results into encoded ``ResultPart`` objects."""
    parts: deque[bytes] = deque()
    while results:
        parts += (msgspec.msgpack.encode(ResultPart(part.data, part.last)) for part in chunks(results.pop(0)))
    return parts


def leave_for_client(post: PostOffice, parts: deque[bytes]) -> Iterator[None]:
    """Have the client fetch parts of results until ``RESULT_BYTES`` or less are left in ``parts``."""
    left = sum(map(len, parts))
    if left <= RESULT_BYTES:
        return
    while True:
        while not post.emptied.wait(PULSE_SECONDS):
            yield None
        if left <= RESULT_BYTES:
            return
        wanted = left - RESULT_BYTES
        while left > wanted:
            left -= len(parts[0])
            post.put(parts.popleft())


def _pickle(error: Exception) -> bytes:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return pickle.dumps(SparkElasticError(f"{type(error).__name__}: {error}"))
