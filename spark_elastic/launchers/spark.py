"""Slots from a Spark session with its SparkContext: one live Spark task per slot, for as long as the job wants slots.

Each slot is a Spark job of one task, without a barrier: an abort stays inside its slot, a slot that Spark has given up
(``spark.task.maxFailures``) is simply submitted again, and waiting slots make dynamic allocation request executors. If all
slots were one Spark job, the fourth failure of one slot would end all of them.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.base import SlotListener, refuse_to_strike
from spark_elastic.launchers.defaults import YIELD_SECONDS, pause_after, unlogged
from spark_elastic.launchers.resources import TaskResources, known_profile
from spark_elastic.launchers.session import (
    addresses_of,
    check_session,
    check_session_settings,
    default_sizes,
    find_session,
    note_use,
    use_own_python,
    warn_of_too_few_cores,
)
from spark_elastic.launchers.slot import Slot
from spark_elastic.launchers.slot_reason import GAVE_UP, find_hopeless, find_reason, first_line, never_registered
from spark_elastic.launchers.spark_task import RowsTask
from spark_elastic.protocol.fault_points import Fault
from spark_elastic.protocol.ticket import Ticket

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

logger = logging.getLogger("spark_elastic")

# How often Spark is asked for the status of the slots. The end of its connection shows the loss of a task at once. This only
# shows that Spark will not start the task again: there is no event for that without a callback server in the user's gateway.
WATCH_SECONDS = 0.5
END_SECONDS = 20.0
# How often the remaining Spark jobs of this run are checked while they end.
CANCEL_SECONDS = 0.05
_GROUP, _TAGS = "spark.jobGroup.id", "spark.job.tags"
# How names of our tags and job groups begin.
_OURS = "spark_elastic-"


class SparkEndedError(Exception):
    """Spark is gone, or was told to cancel this run's Spark jobs. Another try would not help."""


class _HopelessError(Exception):
    """Executors cannot run this run's tasks. Another try would not help."""


class SparkLauncher:
    """Takes slots from the given session, else from the active one, else from a local-cluster that ends on exit."""

    def __init__(self, spark: SparkSession | None = None, resources: TaskResources | None = None) -> None:
        if spark is not None:
            check_session(spark)
        self._given = spark
        self._resources = resources
        self._profile: ResourceProfile | None = None
        self._stack = ExitStack()

    def __enter__(self) -> SparkLauncher:
        with ExitStack() as stack:
            self._session = find_session(stack) if self._given is None else self._given
            if is_gone(self._session.sparkContext):
                raise SparkElasticError("the Spark session has been stopped: make another one")
            check_session_settings(self._session, resources=self._resources)
            if self._resources is not None:
                self._profile = known_profile(self._session, self._resources)
            use_own_python(self._session)
            note_use(self._session, self.application)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    platform = "Spark"
    memory_setting = "spark.executor.memoryOverhead"

    @property
    def session(self) -> SparkSession:
        """The session from which slots are taken."""
        return self._session

    @property
    def application(self) -> str:
        """Spark's name for this application."""
        return str(self._session.sparkContext.applicationId)

    @property
    def bind_address(self) -> str:
        """Where Spark's own driver listens."""
        return str(self._session.sparkContext.getConf().get("spark.driver.bindAddress", ""))

    def addresses(self, port: int) -> tuple[tuple[str, int], ...]:
        """Return where executors reach the driver."""
        return addresses_of(self._session, port)

    def sizes(self, num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        """Fill in what is None from the Spark configuration; return ``min_np``, ``num_proc``, ``max_np``."""
        sizes = default_sizes(self._session, num_proc, min_np, max_np, self._resources)
        warn_of_too_few_cores(self._session, sizes[1], self._resources)
        return sizes

    def launch(self, ticket: Ticket, slots: int, listener: SlotListener) -> SparkSlots:
        """Return this many slots."""
        return SparkSlots(self._session, ticket, slots, listener, self._profile)


@dataclass(slots=True)
class _Slot(Slot):
    future: Any = None


class SparkSlots:
    """Submits, watches and cancels the slots' Spark jobs, on one thread, from ``__enter__`` to ``__exit__``.

    That thread calls ``on_stopped`` if the SparkContext is gone or the run's Spark jobs were cancelled, ``on_failed`` if
    executors cannot run its tasks, and ``on_given_up`` if Spark has given up a slot that had not registered. Anything else that
    fails there (for lack of a descriptor or of disk space, for example) is tried again after a growing pause.
    """

    def __init__(
        self,
        session: SparkSession,
        ticket: Ticket,
        slots: int,
        listener: SlotListener,
        profile: ResourceProfile | None = None,
    ) -> None:
        self._context = session.sparkContext
        self._ticket = ticket
        self._profile = profile
        self._slots = [_Slot(number) for number in range(slots)]
        self._listener = listener
        # Only this run's Spark jobs have this tag, whereas they share the caller's job group, if there is one.
        self._tag = f"{_OURS}{ticket.run_id}"
        self._wake = threading.Condition()
        self._closing = False
        self._give_back = False
        # Whether any slot has ever registered. If so, executors differ, and another try may find one that can run the task.
        self._has_hosts = False
        self._properties = inherited_properties(session)
        self._has_properties = False
        self._cancellation = ""
        self._thread = threading.Thread(target=self._run, name="spark_elastic-launcher", daemon=True)

    def __enter__(self) -> SparkSlots:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Cancel tasks that Spark has not started, and wait until no Spark job of this run is left."""
        self.submit_no_more()
        self._thread.join(timeout=END_SECONDS)

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
        """Cancel all slots and request them again after a while."""
        with self._wake:
            self._give_back = True
            self._wake.notify_all()

    def strike(self, fault: Fault, slot: int) -> None:
        """Refuse: see ``refuse_to_strike``."""
        refuse_to_strike(fault)

    def find_end(self) -> str:
        """Say how Spark, or somebody through it, has ended the job; empty if it continues."""
        if is_gone(self._context):
            return "the SparkContext was stopped"
        try:
            return self.find_cancellation()
        except Exception:  # Spark cannot be asked at the moment
            return ""

    def find_cancellation(self) -> str:
        """Say how our Spark jobs were cancelled from outside; empty if they were not. For any thread.

        The tasks of a cancelled Spark job end, and the workers with them. That may be noticed before this object's thread asks
        Spark.
        """
        for slot in self._slots:
            future = slot.future
            if not self._cancellation and future is not None and future.isDone():
                self._cancellation = cancellation_in(_reason(future))
        return self._cancellation

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closing:
                pause = WATCH_SECONDS
                try:
                    self._watch()
                    failures = 0
                except (SparkEndedError, _HopelessError):
                    raise
                except Exception as error:
                    if self._closing:
                        break
                    if is_gone(self._context):
                        raise SparkEndedError("the SparkContext was stopped") from error
                    failures += 1
                    pause = pause_after(failures)
                    logger.warning(
                        "the launcher of Spark tasks failed (%s: %s); it tries again in %.1f s, and what runs goes on",
                        type(error).__name__,
                        first_line(str(error)),
                        pause,
                    )
                    logger.debug("the launcher failed", exc_info=True)
                self._wait(pause, is_failing=failures > 0)
        except SparkEndedError as error:
            if not self._closing:
                logger.debug("the launcher ended", exc_info=True)
                self._listener.on_stopped(str(error))
        except _HopelessError as error:
            self._listener.on_failed(str(error))
        finally:
            self._cancel_all()

    def _wait(self, seconds: float, is_failing: bool) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closing or (self._give_back and not is_failing), seconds)

    def _take_properties(self) -> None:
        """Have this thread's Spark jobs run as the user's own would, so that what cancels those cancels them as well.

        Spark must not interrupt the threads of tasks, even if it would those of the caller: a thread that is interrupted closes
        its connection to the task's Python process, which still has workers to end. The driver ends cancelled tasks.
        """
        if self._has_properties:
            return
        self._context.setJobGroup(self._tag, f"spark_elastic run {self._ticket.run_id}", interruptOnCancel=False)
        tags = ",".join(filter(None, (self._properties.get(_TAGS), self._tag)))
        for name, value in {**self._properties, _TAGS: tags}.items():
            self._context.setLocalProperty(name, value)
        self._has_properties = True

    def _watch(self) -> None:
        now = time.monotonic()
        if self._context._jsc is None or self._context._jsc.sc().isStopped():
            raise SparkEndedError("the SparkContext was stopped")
        self._take_properties()
        if self._give_back:
            self._give_back = False
            self._cancel_all()
            again = now + random.uniform(*YIELD_SECONDS)
            for slot in self._slots:
                slot.future, slot.start_at, slot.registered = None, again, False
        for slot in self._slots:
            if slot.future is not None and slot.future.isDone():
                reason = _reason(slot.future)
                if cancellation := self.find_cancellation():
                    raise SparkEndedError(cancellation)
                if not self._has_hosts and (hopeless := find_hopeless(reason, self._context.pythonExec)):
                    raise _HopelessError(hopeless)
                if not reason and slot.future.get():
                    slot.register()  # a driver in the cluster may not have been able to tell yet
                slot.future = None
                slot.ended(GAVE_UP, reason, self._listener, never_registered(self._ticket))
            if slot.future is None and slot.start_at <= now and not self._closing:
                slot.future = self._submit(slot.number)

    def _submit(self, slot: int) -> object:
        self._context.setJobDescription(f"spark_elastic run {self._ticket.run_id}, slot {slot}")
        task = RowsTask(self._ticket, slot)
        with unlogged("py4j.java_gateway", "py4j.clientserver"):  # at DEBUG they log what is sent, and the key with it
            rows = self._context.parallelize([slot], 1).mapPartitions(task)
            if self._profile is not None:
                rows = rows.withResources(self._profile)
            return rows._jrdd.collectAsync()

    def _cancel_all(self) -> None:
        """Cancel the tasks that wait in Spark's queue. Running tasks end by themselves, because the driver tells them to.

        This is repeated, because Spark may put a task back into its queue, and because Spark's own view of jobs, which users
        see, lags behind. Returns when that view shows no Spark job of this run.
        """
        open_slots = [slot for slot in self._slots if slot.future is not None]
        deadline = time.monotonic() + END_SECONDS
        while True:
            try:
                if all(slot.future.isDone() for slot in open_slots) and not self._active_jobs():
                    return
                if time.monotonic() > deadline:
                    self._context.cancelJobsWithTag(self._tag)
                    return
                self._cancel_waiting()
            except Exception:
                if is_gone(self._context) or time.monotonic() > deadline:
                    # Usually the SparkContext is gone, and its jobs with it.
                    logger.debug("could not cancel the slots", exc_info=True)
                    return
            with self._wake:
                self._wake.wait_for(lambda: False, CANCEL_SECONDS)

    def _cancel_waiting(self) -> None:
        # In Spark's view the tasks of a short job may not have started yet. Spark kills the Python process of a task that it
        # cancels unless that ends within two seconds, which an executor may be too busy for.
        connected = {job for slot in self._slots if slot.is_connected and slot.future for job in slot.future.jobIds()}
        tracker = self._context.statusTracker()
        for job in self._active_jobs() - connected:
            info = tracker.getJobInfo(job)
            stages = [] if info is None else [tracker.getStageInfo(stage) for stage in info.stageIds]
            if not any(stage and stage.numActiveTasks for stage in stages):
                self._context._jsc.sc().cancelJob(job)

    def _active_jobs(self) -> set[int]:
        tracker = self._context._jsc.sc().statusTracker()  # Python's has no getJobIdsForTag
        return set(tracker.getActiveJobIds()) & set(tracker.getJobIdsForTag(self._tag))


def inherited_properties(session: SparkSession) -> dict[str, str]:
    """Return the calling thread's local properties that also apply to our Spark jobs, which have threads of their own.

    Those are the pool that they are scheduled in, and the job group and tags by which the user, a notebook or a streaming query
    cancels them. Where ``PYSPARK_PIN_THREAD`` is false, they may be those of a thread of an earlier run: each run cancels what
    has its own tag.
    """
    names = ("spark.scheduler.pool", _GROUP, _TAGS)
    found = {name: session.sparkContext.getLocalProperty(name) or "" for name in names}
    tags = f"{found[_TAGS]},{_session_tags(session)}".split(",")
    found[_TAGS] = ",".join(tag for tag in tags if tag and not tag.startswith(_OURS))
    if found[_GROUP].startswith(_OURS):
        del found[_GROUP]
    return {name: value for name, value in found.items() if value}


def _session_tags(session: SparkSession) -> str:
    """Return the tags by which ``interruptAll`` and ``interruptTag`` of a session find jobs; empty before Spark 4.

    Spark adds them to the jobs of its queries only, in the thread that asks for the query.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError

    java: Any = session._jsparkSession
    try:
        return ",".join(filter(None, (java.sessionJobTag(), java.managedJobTags().get().values().mkString(","))))
    except Py4JNetworkError:
        raise
    except Py4JError:
        return ""


def _reason(future: Any) -> str:
    """Say in a line why a slot's Spark job failed; empty if it did not. Raises what keeps Spark from answering."""
    from py4j.protocol import Py4JNetworkError

    try:
        future.get()
    except (OSError, Py4JNetworkError):
        raise
    except Exception as error:
        # The exception only says that the job failed; its cause, which is Spark's, has the executor's Python traceback.
        story, cause = [str(error)], getattr(error, "java_exception", None)
        while cause is not None:
            story.append(str(cause.getMessage()))
            cause = cause.getCause()
        return find_reason(story)
    return ""


def cancellation_in(reason: str) -> str:
    """Say how somebody has cancelled a slot's Spark job; empty if it ended for another reason.

    Only ``cancelAllJobs``, ``cancelJobGroup``, ``cancelJobsWithTag``, ``cancelJob``, the "kill" links of Spark's UI, and what
    calls one of these cancel a job: Spark runs lost tasks again, and aborts a job whose tasks fail too often.
    """
    # The error of a query goes on with Java's stack.
    found = re.search(
        r"(?:\[\w+\] )?\bJob \d+ cancelled\b.*?(?=\s*(?:\n\tat |\nJVM stacktrace|\nDriver stacktrace|$))",
        reason,
        re.DOTALL,
    )
    if not found:
        return ""
    if "SparkContext was shut down" in reason:
        return "the SparkContext was stopped"
    return f"its Spark jobs were cancelled ({found[0]})"


def is_gone(context: SparkContext) -> bool:
    """Whether the SparkContext has been stopped, or its JVM has ended.

    False if Spark cannot be asked, for example because this process has no descriptor left.
    """
    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except Exception as error:
        return any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes. Py4J has its own way of naming them."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
