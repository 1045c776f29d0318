"""SparkDriverService on the loopback: what single connections may do to it. What is decided is tested elsewhere."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.runtime import REAL_RUNTIME
from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import JobCancelledError, SparkElasticError, TrainingFailedError
from spark_elastic.protocol import messages as m
from spark_elastic.protocol import records, reports, sampling
from spark_elastic.protocol.connection import Connection, ConnectionLostError, connect
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.event_format import as_event
from spark_elastic.protocol.records import Entry, Record
from spark_elastic.task.facts import gather_facts

R = TypeVar("R")

CREDENTIALS = create_credentials("test")
SECONDS = 60.0


class Log(EventLog):
    """Keeps records in memory."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.records: list[Record] = []
        self.changed = threading.Condition()

    def record(self, record: Record) -> None:
        with self.changed:
            self.records.append(record)
            self.changed.notify_all()

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def wait_for(self, kind: type[R], times: int = 1) -> R:
        with self.changed:
            is_there = self.changed.wait_for(lambda: len(self.of(kind)) >= times, SECONDS)
            assert is_there, f"no {kind.__name__} in {self.records}"
            return self.of(kind)[-1]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def service(log: Log) -> Iterator[SparkDriverService]:
    settings = JobSettings(min_np=1, max_np=2, num_proc=1)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log) as service:
        service.begin(b"payload", None)
        yield service
        # What a test leaves connected is cut here, so that leaving does not wait for it.
        service.cancel(JobCancelledError("the test is over"))
        service.stop_serving(release_seconds=0.0)


def play(service: SparkDriverService, scene: Callable[..., Awaitable[Any]]) -> Any:
    """Run ``scene(connect_task, connect_worker)`` against the service; connections are cut at its end."""

    async def run() -> Any:
        connections: list[Connection] = []

        async def reach(expected: Any) -> Connection:
            connection = await connect([("127.0.0.1", service.port)], CREDENTIALS, expected)
            connections.append(connection)
            return connection

        async def task(slot: int) -> Connection:
            connection = await reach(m.ToTask)
            connection.send(m.TaskHello(slot, gather_facts("127.0.0.1", (), 1, 0)))
            return connection

        async def worker(start: m.StartWorker) -> Connection:
            connection = await reach(m.ToWorker)
            connection.send(m.WorkerHello(start.worker, 1, start.token))
            return connection

        try:
            return await asyncio.wait_for(scene(task, worker), SECONDS)
        finally:
            for connection in connections:
                connection.abort()

    return asyncio.run(run())


async def expect(connection: Connection, kind: type[Any]) -> Any:
    """Receive until a message of this kind comes."""
    while not isinstance(message := await connection.receive(), kind):
        pass
    return message


def test_a_task_is_welcomed_and_told_to_start_a_worker_which_gets_the_payload(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        welcome, start = await expect(host, m.Welcome), await expect(host, m.StartWorker)
        process = await worker(start)
        return welcome.host, start.worker, await expect(process, m.Chunk)

    assert play(service, scene) == (0, 0, m.Chunk(b"payload", last=True))


class Keeper:
    """Notes what the service tells the keeper of its slots."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.has_lost = threading.Event()

    def slot_registered(self, slot: int) -> None:
        self.told.append(("registered", slot))

    def slot_lost(self, slot: int) -> None:
        self.told.append(("lost", slot))
        self.has_lost.set()


def test_who_keeps_the_slots_hears_of_tasks_that_come_and_are_lost_but_not_of_their_end_with_the_job(
    service: SparkDriverService,
) -> None:
    keeper = Keeper()
    service.begin(b"payload", keeper)  # type: ignore[arg-type]

    async def scene(task: Any, worker: Any) -> None:
        first, second = await task(1), await task(0)
        await expect(first, m.Welcome)
        await expect(second, m.Welcome)
        first.abort()
        assert await asyncio.to_thread(keeper.has_lost.wait, SECONDS)
        await asyncio.to_thread(service.stop_serving, 0.0)

    play(service, scene)
    assert sorted(keeper.told) == [("lost", 1), ("registered", 0), ("registered", 1)]


def test_a_task_is_pinged_and_its_answer_counts(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        return await expect(host, m.Ping)

    assert play(service, scene).number >= 1


def test_a_worker_that_nobody_asked_for_is_sent_away(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        return await (await worker(m.StartWorker(99, ""))).receive()

    assert play(service, scene) == m.LeaveJob()


def test_a_holder_of_the_key_cannot_speak_for_a_worker_that_has_not_connected_yet(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        start = await expect(await task(0), m.StartWorker)
        forged = await (await worker(m.StartWorker(start.worker, "guessed"))).receive()
        unnamed = await (await worker(m.StartWorker(start.worker, ""))).receive()
        real = await expect(await worker(start), m.Chunk)
        again = await (await worker(start)).receive()
        return forged, unnamed, real, again

    sent_away = m.LeaveJob()
    assert play(service, scene) == (sent_away, sent_away, m.Chunk(b"payload", last=True), sent_away)


def test_a_slot_that_does_not_exist_is_refused(service: SparkDriverService, log: Log) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(7)
        with pytest.raises(ConnectionLostError):
            await host.receive()

    play(service, scene)
    assert not log.of(records.HostRegistered)


def test_a_duplicate_of_a_task_waits_and_takes_over_when_the_original_goes(service: SparkDriverService) -> None:
    """Found in review: the take-over died of two readers on one stream."""

    async def scene(task: Any, worker: Any) -> Any:
        original = await task(0)
        await expect(original, m.Welcome)
        duplicate = await task(0)
        await expect(original, m.Ping)
        original.abort()
        welcome = await expect(duplicate, m.Welcome)
        return welcome.host, await expect(duplicate, m.Ping), await expect(duplicate, m.Ping)

    assert play(service, scene)[0] == 1


def test_a_slot_whose_task_is_silent_is_taken_over_before_tcp_gives_its_connection_up(log: Log) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        silent = await task(0)
        await expect(silent, m.Welcome)
        other = await task(0)
        await expect(silent, m.RestartTask)
        return await expect(other, m.Welcome)

    settings = JobSettings(min_np=1, max_np=1, num_proc=1, heartbeat_timeout=1.0)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log) as service:
        assert play(service, scene) == m.Welcome(1, {})
    assert log.of(records.HostLost)[0].reason == "it did not answer pings for 1 s"


def test_what_has_arrived_while_the_driver_stood_still_is_heard_before_it_judges_who_is_late(log: Log) -> None:
    now, answered = [0.0], threading.Event()

    async def stand_still(service: SparkDriverService) -> None:
        now[0] += 1.0
        service._tick()
        assert answered.wait(SECONDS)
        now[0] += 2.0
        service._loop.call_later(0.0, service._tick)

    async def scene(task: Any, worker: Any) -> None:
        host = await task(0)
        await expect(host, m.Welcome)
        standing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stand_still(service), service._loop))
        ping = await expect(host, m.Ping)
        host.send(m.Pong(ping.number))
        answered.set()
        await standing
        assert (await expect(host, m.Ping)).number > ping.number

    settings = JobSettings(min_np=1, max_np=1, num_proc=1, heartbeat_timeout=1.5)
    runtime = replace(REAL_RUNTIME, clock=lambda: now[0])
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log, runtime=runtime) as service:
        play(service, scene)
        service.cancel(JobCancelledError("the test is over"))
    assert {lost.reason for lost in log.of(records.HostLost)} <= {"its connection to the driver broke"}


def test_a_message_that_is_not_a_workers_to_send_ends_its_connection_only(
    service: SparkDriverService, log: Log
) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        start = await expect(host, m.StartWorker)
        process = await worker(start)
        await expect(process, m.Chunk)
        process.send(m.TaskHello(0, gather_facts("127.0.0.1", (), 1, 0)))
        with pytest.raises(ConnectionLostError):
            await expect(process, m.FormWorld)
        return await expect(host, m.KillWorker)

    assert play(service, scene) == m.KillWorker(0)
    assert log.wait_for(records.WorkerLost).cause == "its connection to the driver broke"


def test_samples_that_follow_too_soon_are_not_recorded(
    service: SparkDriverService, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SAMPLES_A_SECOND", 0.001)

    async def scene(task: Any, worker: Any) -> None:
        host = await task(0)
        start = await expect(host, m.StartWorker)
        for seconds in (1.0, 2.0, 3.0):
            host.send(m.WorkerSampled(start.worker, seconds, 2**30, ("hello",)))
        host.send(m.WorkerStarted(start.worker, 1234))
        await asyncio.to_thread(log.wait_for, records.WorkerStarted)

    play(service, scene)
    assert log.of(records.WorkerSampled) == [records.WorkerSampled(0, 1.0, 2**30, ["hello"])]


def test_a_task_speaks_for_its_own_worker_only(service: SparkDriverService, log: Log) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host, other = await task(0), await task(1)
        start, _ = await expect(host, m.StartWorker), await expect(other, m.Welcome)
        other.send(m.WorkerDying(start.worker))
        other.send(m.WorkerExited(start.worker, 1))
        other.send(m.WorkerStarted(42, 1))
        await asyncio.to_thread(log.wait_for, records.WorkerStarted)

    play(service, scene)
    log.wait_for(records.WorkerLost)
    causes = {lost.cause for lost in log.of(records.WorkerLost)}
    assert causes == {"its host was lost: its connection to the driver broke"}


def test_only_members_of_a_world_reach_its_store(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host, other = await task(0), await task(1)
        member = await worker(await expect(host, m.StartWorker))
        member.send(m.WorkerReady(0, None))
        generation = (await expect(member, m.FormWorld)).generation
        stranger = await worker(await expect(other, m.StartWorker))
        replies = []
        for process in (member, stranger):
            process.send(m.StoreRequest(1, generation, "set", ("key",), (b"",)))
            replies.append(await expect(process, m.StoreReply))
        return replies

    assert play(service, scene) == [m.StoreReply(1), m.StoreReply(1, gone=True)]


def test_a_result_that_was_not_announced_ends_the_connection(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        process = await worker(await expect(host, m.StartWorker))
        process.send(m.Chunk(b"", last=True))
        return await expect(host, m.KillWorker)

    assert play(service, scene) == m.KillWorker(0)
    assert not service.outcome.done()


@pytest.mark.parametrize("name", ["worker", "rank", "generation", "kind", "event", "time", "version", "self"])
def test_a_metric_may_have_any_name(service: SparkDriverService, log: Log, name: str) -> None:
    """Found in review: some names clash with the fields of the event, and the worker's connection dies of it."""

    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        start = await expect(host, m.StartWorker)
        process = await worker(start)
        await expect(process, m.Chunk)
        process.send(m.Reported(1, reports.Metrics({name: 42})))
        process.send(m.StoreRequest(1, 0, "check", ("key",)))
        return await expect(process, m.StoreReply)

    assert play(service, scene) == m.StoreReply(1, amount=0)
    event = as_event(Entry(0.0, log.wait_for(records.WorkerReported)))
    assert (event["event"], event["values"]) == ("metrics", {name: 42})


def test_a_request_that_makes_no_sense_does_not_disturb_the_job(service: SparkDriverService, log: Log) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        start = await expect(host, m.StartWorker)
        process = await worker(start)
        await expect(process, m.Chunk)
        process.send(m.StoreRequest(1, 0, "set", ("a", "b"), (b"1",)))
        process.send(m.StoreRequest(2, 0, "check", ("key",)))
        return (await expect(process, m.StoreReply)).number

    assert play(service, scene) in (1, 2)


@pytest.mark.parametrize(
    ("python", "torch", "message"),
    [
        ("3.7.1", "2.13.0", r"a task on old runs Python 3\.7\.1"),
        (platform.python_version(), "", "a task on old has no torch: install it"),
    ],
)
def test_another_python_or_no_torch_fails_the_job_and_is_named(
    service: SparkDriverService, python: str, torch: str, message: str
) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        connection = await connect([("127.0.0.1", service.port)], CREDENTIALS, m.ToTask)
        facts = m.HostFacts("old", "127.0.0.1", 1, 1, python, torch)
        connection.send(m.TaskHello(0, facts))
        answer = await connection.receive()
        await connection.close()
        return answer

    assert play(service, scene) == m.ReleaseTask()
    with pytest.raises(TrainingFailedError, match=message):
        service.outcome.result(SECONDS)


async def join_with_another_torch(service: SparkDriverService, slot: int) -> Any:
    connection = await connect([("127.0.0.1", service.port)], CREDENTIALS, m.ToTask)
    connection.send(m.TaskHello(slot, m.HostFacts("new", "127.0.0.1", 1, 1, platform.python_version(), "99.1")))
    answer = await connection.receive()
    await connection.close()
    return answer


def test_another_torch_on_the_hosts_that_a_job_begins_on_fails_it(log: Log) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        await expect(await task(0), m.StartWorker)
        return await join_with_another_torch(service, 1)

    settings = JobSettings(min_np=2, max_np=2, num_proc=2)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log) as service:
        service.begin(b"payload", None)
        assert play(service, scene) == m.ReleaseTask()
        with pytest.raises(
            TrainingFailedError, match=r"a task on new has torch 99\.1, one on .* need the same minor version"
        ):
            service.outcome.result(SECONDS)


def test_another_torch_on_a_host_that_comes_later_fails_no_job(service: SparkDriverService) -> None:
    """Also where no world is ever formed, because the function has no elastic part."""

    async def scene(task: Any, worker: Any) -> Any:
        process = await worker(await expect(await task(0), m.StartWorker))
        await expect(process, m.Chunk)
        return await join_with_another_torch(service, 1)

    assert isinstance(play(service, scene), m.Welcome)
    assert not service.outcome.done()


def test_a_job_of_one_worker_runs_from_registration_to_its_result(service: SparkDriverService) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        process = await worker(await expect(host, m.StartWorker))
        process.send(m.WorkerReady(0, None))
        world = await expect(process, m.FormWorld)
        process.send(m.WorldFormed(world.generation))
        process.send(m.WorkerReturned(world.generation, m.CommitId(1, 0)))
        await expect(process, m.FinishWorld)
        process.send(m.ResultFollows(elastic=True))
        process.send(m.Chunk(b"res", last=False))
        process.send(m.Chunk(b"ult", last=True))
        await expect(process, m.LeaveJob)
        await expect(host, m.ReleaseTask)
        return world.backend

    assert play(service, scene) == "gloo"
    assert service.outcome.result(SECONDS) == [b"result"]


@pytest.mark.parametrize(("backend", "is_told"), [("nccl", True), ("gloo", False)])
def test_the_devices_group_is_aborted_when_all_ranks_have_answered_and_nothing_is_where_there_is_none(
    log: Log, backend: str, is_told: bool
) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        ranks = []
        for slot in (0, 1):
            start = await expect(await task(slot), m.StartWorker)
            ranks.append(await worker(start))
            ranks[-1].send(m.WorkerReady(0, None))
        for rank in ranks:
            assert (await expect(rank, m.FormWorld)).backend == backend
            rank.send(m.WorldFormed(1))
        await asyncio.to_thread(log.wait_for, records.WorldFormed)
        ranks[1].send(m.WorldBroken(1, "a connection ended"))
        for rank in ranks:
            assert (await expect(rank, m.AbortWorld)).reason == "rank 1 reports: a connection ended"
            rank.send(m.WorkerAborted(1, None))
        if is_told:
            assert [await rank.receive() for rank in ranks] == [m.AbortDevice(1)] * 2
        for rank in ranks:
            rank.send(m.WorkerReady(1, None, "a rank was lost"))
        return [type(await rank.receive()) for rank in ranks]

    settings = JobSettings(min_np=2, max_np=2, num_proc=2, backend=backend)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log) as service:
        assert play(service, scene) == [m.FormWorld] * 2
        service.cancel(JobCancelledError("the test is over"))


def test_a_task_that_comes_when_the_job_is_over_is_released(service: SparkDriverService) -> None:
    service.cancel(JobCancelledError("stop"))

    async def scene(task: Any, worker: Any) -> Any:
        return await expect(await task(0), m.ReleaseTask)

    assert play(service, scene) == m.ReleaseTask()


def test_leaving_the_service_leaves_no_thread(log: Log) -> None:
    before = set(threading.enumerate())
    settings = JobSettings(min_np=1, max_np=2, num_proc=1)
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log):
        pass
    assert set(threading.enumerate()) <= before


def test_a_port_that_is_taken_is_an_error_and_leaves_no_thread(service: SparkDriverService, log: Log) -> None:
    before = set(threading.enumerate())
    settings = JobSettings(min_np=1, max_np=2, num_proc=1, driver_port=service.port)
    with pytest.raises(SparkElasticError, match="driver_port"):
        SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", event_log=log).__enter__()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("teller", ["launcher", "task"])
def test_events_of_a_drain_reach_the_machine(service: SparkDriverService, log: Log, teller: str) -> None:
    async def scene(task: Any, worker: Any) -> Any:
        host = await task(0)
        await expect(host, m.StartWorker)
        if teller == "task":
            host.send(m.TaskDraining())
        else:
            service.drain_slot(0)
        return await expect(host, m.KillWorker)

    assert play(service, scene) == m.KillWorker(0)
    assert log.wait_for(records.HostDraining).host == 0


def test_a_connection_that_came_in_as_the_service_closes_is_cut_before_close_returns() -> None:
    class Silent:
        peer_address = "somebody"

        async def receive(self) -> Any:
            await asyncio.Event().wait()

        def abort(self) -> None:
            pass

    settings = JobSettings(min_np=1, max_np=1, num_proc=1)
    runtime = replace(REAL_RUNTIME, connection=lambda *args: Silent())
    with SparkDriverService(settings, CREDENTIALS, bind_address="127.0.0.1", runtime=runtime) as service:

        async def close_and_look() -> set[Any]:
            # A handshake that ends in the turn of the loop in which close() begins.
            service._door._shown(asyncio.current_task(), None, None)
            await service.close(release_seconds=0.0)
            return asyncio.all_tasks() - {asyncio.current_task()}

        assert service.call(close_and_look()) == set()
