"""What ``driver=`` takes, how many slots are left for workers, and what a client makes of what its drivers tell."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from spark_elastic.driver import cluster_driver as module
from spark_elastic.driver.cluster_driver import LOST_DRIVERS, OWN_SLOTS, ClusterDriver
from spark_elastic.driver.driver_place import CheckpointWish
from spark_elastic.driver.event_log import EventLog, OnEvent
from spark_elastic.driver.meeting import EndMeeting, OpenMeeting
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.post import FetchLetters, Letter
from spark_elastic.driver.run import run
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.slot_driver import (
    Addressed,
    DriverLost,
    EventTold,
    JobError,
    JobIsOver,
    OutputTold,
    ResultPart,
    SlotLost,
    SlotRegistered,
    SlotsWantedBack,
)
from spark_elastic.errors import CheckpointError, JobCancelledError, NotEnoughHostsError, TrainingFailedError
from spark_elastic.launchers.defaults import fill_sizes
from spark_elastic.protocol.event_format import as_event
from spark_elastic.protocol.messages import Stream
from spark_elastic.protocol.records import Entry, JobFinished, JobStarted, WorkerReported
from spark_elastic.protocol.reports import CheckpointWritten


def launcher(present: int) -> Any:
    return SimpleNamespace(sizes=lambda *given: fill_sizes(present, *given))


def test_without_sizes_the_drivers_slots_are_left_free() -> None:
    assert ClusterDriver(None).sizes(launcher(6), None, None, None) == (6 - OWN_SLOTS,) * 3
    assert ClusterDriver(None).sizes(launcher(6), None, 2, None) == (2, 2, 6 - OWN_SLOTS)


def test_what_is_given_stays() -> None:
    assert ClusterDriver(None).sizes(launcher(2), None, 2, 5) == (2, 2, 5)


def test_where_the_size_of_the_cluster_is_not_known_as_many_workers_as_asked_for_are_the_most() -> None:
    """Two were refused on a cluster of any size, with ``resources=``: they were taken for the cluster's slots."""

    def sizes(num_proc: int | None, min_np: int | None, max_np: int | None) -> tuple[int, int, int]:
        if num_proc is None and max_np is None:
            raise ValueError("give max_np or num_proc")
        return fill_sizes(0, num_proc, min_np, max_np)

    unknown: Any = SimpleNamespace(sizes=sizes)
    assert ClusterDriver(None).sizes(unknown, 2, None, None) == (2, 2, 2)
    assert ClusterDriver(None).sizes(unknown, 2, 1, None) == (1, 2, 2)
    with pytest.raises(ValueError, match="give max_np or num_proc"):
        ClusterDriver(None).sizes(unknown, None, 2, None)


def test_a_cluster_that_is_smaller_than_what_is_asked_for_is_named_with_its_own_slots() -> None:
    with pytest.raises(ValueError, match=r"this cluster has 4 in all: too few for 9 workers"):
        ClusterDriver(None).sizes(launcher(4), 9, None, None)


@pytest.mark.parametrize(("present", "min_np"), [(OWN_SLOTS, None), (OWN_SLOTS + 2, 3)])
def test_a_cluster_that_is_too_small_is_named(present: int, min_np: int | None) -> None:
    with pytest.raises(ValueError, match=f"driver='cluster' takes {OWN_SLOTS} slots .* has {present} in all"):
        ClusterDriver(None).sizes(launcher(present), None, min_np, None)


@pytest.mark.parametrize("value", ["yarn", None, True, ""])
def test_a_place_that_does_not_exist_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="driver must be one of 'client', 'cluster', not"):
        run(int, driver=value)


def test_local_processes_have_no_cluster_for_the_driver() -> None:
    with pytest.raises(ValueError, match="with local the driver is in this process"):
        run(int, driver="cluster", local=True)


def test_a_discovery_script_of_the_client_cannot_run_beside_a_driver_elsewhere() -> None:
    with pytest.raises(ValueError, match="host_discovery_script"):
        run(int, driver="cluster", host_discovery_script="./hosts.sh", min_np=1, max_np=1)


# ---------------------------------------------------------------- a client and its drivers


def encode(what: Any) -> bytes:
    return bytes(msgspec.msgpack.encode(what))


MEETING, SERVICE, POST = (("meeting", 1),), (("driver", 2),), (("driver", 3),)
WISH = CheckpointWish("/checkpoints", 0.0)
WRITTEN = EventTold(
    as_event(Entry(2.0, WorkerReported(0, 0, 1, CheckpointWritten(name="one", step=1, bytes=1, seconds=1.0))))
)
BEGUN = [[Letter(1, encode(EventTold(as_event(Entry(1.0, JobStarted("r", 1, 2, 2, None, "app"))))))]]
LOST = RuntimeError("ExecutorLostFailure (executor 1 exited)")


class Driver:
    """One driver: what its post office gives at each fetch, what its query has in the end, and whether it ends unfound."""

    def __init__(
        self, fetches: Sequence[Sequence[Letter]] = (), end: Sequence[Any] | Exception = (), unfound: bool = False
    ) -> None:
        self.fetches = list(fetches)
        self.end = end
        self.unfound = unfound


class Cluster:
    """Stands for a session: plays drivers, one after the other, and notes what is asked of it and of slots."""

    def __init__(self, *drivers: Driver) -> None:
        self.drivers = list(drivers)
        self.asked: list[Any] = []
        self.acknowledged: list[int] = []
        self.end_of_session = self.ended = ""
        self.finds_driver, self.has_slots = True, True
        self.unfit = ""

    # -- queries

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *raised: object) -> None:
        self.asked.append("all taken back")

    def interrupt(self) -> None: ...

    def find_end(self, error: BaseException) -> str:
        return self.end_of_session

    def submit(self, function: Any, description: str, rows: Sequence[bytes] = ()) -> Future[list[bytes]]:
        future: Future[list[bytes]] = Future()
        if isinstance(function, OpenMeeting):
            future.set_result([encode(MEETING)])
        elif isinstance(function, FetchLetters) and function.addresses == MEETING:
            if not self.has_slots:
                pass
            elif self.finds_driver:
                future.set_result([encode([Letter(1, encode(Addressed(SERVICE, POST)))])])
            else:
                future.set_exception(LOST)
        elif isinstance(function, EndMeeting):
            self.asked.append(("meeting ended", function.addresses))
            future.set_result([])
        elif isinstance(function, FetchLetters):
            self.acknowledged.append(function.after)
            if self.driver.fetches:
                future.set_result([encode(list(self.driver.fetches.pop(0)))])
            else:
                self.end_driver()
        else:
            self.driver = self.drivers.pop(0)
            self.driving = future
            if self.driver.unfound:
                self.end_driver()
        return future

    def end_driver(self) -> None:
        if isinstance(self.driver.end, Exception):
            self.driving.set_exception(self.driver.end)
        else:
            self.driving.set_result([encode(row) for row in self.driver.end])

    # -- slots

    def launch(self, ticket: Any, slots: int, listener: Any) -> Any:
        self.asked.append(("launched", ticket.addresses, slots))
        if self.unfit:
            listener.on_failed(self.unfit)
        return Slots(self.asked)


class Slots:
    def __init__(self, asked: list[Any]) -> None:
        self._asked = asked

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *raised: object) -> None:
        self._asked.append("left")

    def slot_registered(self, slot: int) -> None:
        self._asked.append(("registered", slot))

    def slot_lost(self, slot: int) -> None:
        self._asked.append(("lost", slot))

    def give_back(self) -> None:
        self._asked.append("given back")

    def submit_no_more(self) -> None:
        self._asked.append("no more")

    def find_end(self) -> str:
        return ""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """``play(cluster)``: the results, or the error, of a job there, and the events that it had."""

    def call(
        cluster: Cluster, wish: CheckpointWish | None = None, function: bytes = b"call", start_timeout: float = 600.0
    ) -> tuple[Any, list[Any]]:
        launcher = SimpleNamespace(
            launch=cluster.launch, application="app", platform="Spark", session=SimpleNamespace(conf={})
        )
        monkeypatch.setattr(module, "Queries", lambda session, run_id: cluster)
        monkeypatch.setattr(module, "SparkLauncher", SimpleNamespace)
        events: list[Any] = []
        settings = JobSettings(min_np=1, num_proc=2, max_np=2, start_timeout=start_timeout)
        with EventLog(OnEvent(events.append)) as log:
            try:
                outcome: Any = ClusterDriver(wish).run(launcher, settings, function, log, OutputPrinter())  # type: ignore[arg-type]
            except Exception as error:
                log.failed(error)
                outcome = error
        return outcome, events

    return call


def test_what_a_driver_tells_is_passed_on_once_and_results_are_put_together(
    play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = EventTold(as_event(Entry(1.0, JobFinished([0], 0))))
    letters = [
        Letter(number, encode(told))
        for number, told in enumerate(
            [
                SlotRegistered(1),
                OutputTold(Stream.OUT, "[0]", ("hello",), 0),
                SlotLost(1),
                SlotsWantedBack(),
                JobIsOver(),
                finished,
            ],
            1,
        )
    ]
    cluster = Cluster(
        Driver(
            [letters[:2], letters[1:3]],
            [*letters[2:], ResultPart(b"ze", False), ResultPart(b"ro", True), ResultPart(b"one", True)],
        )
    )
    assert play(cluster) == ([b"zero", b"one"], [as_event(Entry(1.0, JobFinished([0], 0)))])
    assert cluster.asked == [
        ("launched", SERVICE, 2), ("registered", 1), ("lost", 1), "given back", "no more", "no more", "left", "all taken back"
    ]  # fmt: skip
    assert cluster.acknowledged == [0, 2, 3]
    assert capsys.readouterr().out == "[0] hello\n"


def test_the_jobs_error_is_raised_as_it_is(play: Any) -> None:
    failed = TrainingFailedError("it failed")
    error, _ = play(Cluster(Driver(end=[JobError(pickle.dumps(failed))])))
    assert (type(error), error.message) == (TrainingFailedError, "it failed")


def test_a_shortage_of_slots_says_that_the_driver_takes_some(play: Any) -> None:
    error, _ = play(Cluster(Driver(end=[JobError(pickle.dumps(NotEnoughHostsError("too few.")))])))
    assert isinstance(error, NotEnoughHostsError)
    assert str(error) == f"too few. driver='cluster' takes {OWN_SLOTS} slots beside those of the workers."


@pytest.mark.parametrize("end", [LOST, [DriverLost("it was lost")]])
def test_without_a_checkpoint_a_lost_driver_ends_the_job(play: Any, end: Any) -> None:
    error, events = play(Cluster(Driver(BEGUN, end)))
    assert isinstance(error, TrainingFailedError)
    assert "driver was lost" in str(error)
    assert str(error).endswith("With checkpoint= the job goes on by itself, in another slot")
    assert [event["event"] for event in events] == ["job_started", "job_failed"]
    assert events[-1]["message"] == str(error)


def test_with_a_checkpoint_another_driver_goes_on(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cluster = Cluster(
            Driver(end=LOST), Driver(end=[DriverLost("it was lost")]), Driver(end=[ResultPart(b"r", True)])
        )
        assert play(cluster, WISH)[0] == [b"r"]
    assert len([line for line in caplog.messages if "goes on with a new driver in another slot" in line]) == 2


def test_drivers_that_are_lost_in_a_row_without_a_checkpoint_in_between_end_the_job(play: Any) -> None:
    cluster = Cluster(*[Driver(end=LOST)] * (LOST_DRIVERS + 5))
    error, _ = play(cluster, WISH)
    assert f"{LOST_DRIVERS + 1} drivers were lost in a row, without a checkpoint in between" in str(error)
    assert len(cluster.drivers) == 4


def test_a_checkpoint_that_was_written_begins_the_count_anew(play: Any) -> None:
    written = [Driver([[Letter(1, encode(WRITTEN))]], LOST) for _ in range(LOST_DRIVERS + 2)]
    cluster = Cluster(*written, Driver(end=[ResultPart(b"r", True)]))
    assert play(cluster, WISH)[0] == [b"r"]


def test_a_session_that_has_ended_cancels_the_job_with_or_without_a_checkpoint(play: Any) -> None:
    cluster = Cluster(Driver(BEGUN, LOST))
    cluster.end_of_session = "its queries were interrupted"
    error, events = play(cluster, WISH)
    assert isinstance(error, JobCancelledError)
    assert str(error) == "the job cannot go on in Spark: its queries were interrupted"
    assert [event.get("error") for event in events] == [None, "JobCancelledError"]


@pytest.mark.parametrize("wish", [None, WISH])
def test_executors_that_cannot_run_the_driver_fail_the_job_which_nobody_has_cancelled(play: Any, wish: Any) -> None:
    unfit = RuntimeError("ModuleNotFoundError: No module named 'spark_elastic'")
    error, _ = play(Cluster(Driver(BEGUN, unfit)), wish)
    assert isinstance(error, TrainingFailedError)
    assert str(error).startswith("the job cannot go on in Spark: executors cannot run spark_elastic")


def test_slots_that_cannot_run_tasks_fail_the_job_of_a_driver_in_the_cluster(play: Any) -> None:
    cluster = Cluster(Driver([BEGUN[0], []]))
    cluster.unfit = "executors have another Python"
    error, _ = play(cluster)
    assert isinstance(error, TrainingFailedError)
    assert str(error) == "the job cannot go on in Spark: executors have another Python"


def test_where_no_driver_comes_the_process_that_waits_for_it_is_ended(play: Any) -> None:
    cluster = Cluster(Driver())
    cluster.finds_driver, cluster.end_of_session = False, "its queries were interrupted"
    error, events = play(cluster)
    assert isinstance(error, JobCancelledError)
    assert cluster.asked == [("meeting ended", MEETING), "all taken back"]
    assert events == []


def test_where_the_driver_ends_before_it_is_found_the_process_that_waits_for_it_is_ended(play: Any) -> None:
    """It stayed on its executor until ``start_timeout``."""
    failed = CheckpointError("no checkpoint can be written")
    cluster = Cluster(Driver(end=[JobError(pickle.dumps(failed))], unfound=True))
    error, _ = play(cluster)
    assert (type(error), str(error)) == (CheckpointError, "no checkpoint can be written")
    assert cluster.asked == [("meeting ended", MEETING), "all taken back"]


LARGE = "The function and its arguments have 33 MiB: Spark's driver may not have the memory to send them. Write large"


@pytest.mark.parametrize("size", [2**20, 33 * 2**20])
def test_where_no_driver_comes_in_time_a_large_function_is_named_as_a_likely_reason(play: Any, size: int) -> None:
    """A server without the memory to send it was told as a lack of slots, of which there were enough."""
    cluster = Cluster(Driver())
    cluster.has_slots = False
    error, _ = play(cluster, function=bytes(size), start_timeout=0.01)
    assert isinstance(error, NotEnoughHostsError)
    assert (LARGE in str(error)) == (size > 2**25)


@pytest.mark.parametrize("unfound", [True, False])
def test_of_a_driver_that_is_lost_before_it_is_found_a_large_function_is_named_as_a_likely_reason(
    play: Any, unfound: bool
) -> None:
    end = RuntimeError("Java heap space")
    error, _ = play(Cluster(*[Driver(end=end, unfound=unfound)] * (LOST_DRIVERS + 1)), function=bytes(33 * 2**20))
    assert "the driver was lost: Java heap space" in str(error)
    assert (LARGE in str(error)) == unfound


def test_a_function_that_is_too_large_for_any_driver_is_sent_only_once(play: Any) -> None:
    refused = RuntimeError(
        "Serialized task 2:0 was 3145728 bytes, which exceeds max allowed: a.maxSize (2097152 bytes)"
    )
    error, _ = play(Cluster(Driver(end=refused, unfound=True)), WISH)
    assert isinstance(error, TrainingFailedError)
    assert "the function and its arguments are too large for Spark" in str(error)


def test_results_that_no_query_can_fetch_are_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waited for the client, and the client for a query that would succeed."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    asked: list[str] = []

    def fail(task: object, description: str) -> Future[list[bytes]]:
        query: Future[list[bytes]] = Future()
        query.set_exception(RuntimeError("serialized results are bigger than spark.driver.maxResultSize"))
        asked.append(description)
        return query

    life: Any = module._Life.__new__(module._Life)
    life._driving, life._stopped = Future(), Future()
    life._queries, life._run_id, life._credentials = SimpleNamespace(submit=fail), "1", None
    life._heard, life._slots, life._is_over = 0, None, False
    life._take(JobIsOver())
    with pytest.raises(
        TrainingFailedError, match=r"results cannot be fetched: .* bigger than spark.driver.maxResultSize"
    ):
        life._listen(())
    assert len(asked) == module.LAST_QUERIES
