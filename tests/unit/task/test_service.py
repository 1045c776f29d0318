"""A task's service: how it begins and ends, what it obeys, and what it tells its driver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from played_driver import Driver, Supervisor, never, runtime_for

from spark_elastic.protocol import messages as m
from spark_elastic.protocol.connection import ConnectionLostError
from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE, TASK_VARIABLE
from spark_elastic.task import service
from spark_elastic.task.service import TaskPlace, TaskRestartError, TaskRuntime, run_task

SECONDS = 30.0
TICKET: Any = SimpleNamespace(addresses=(("east", 1), ("10.0.0.1", 2)), credentials=None, run_id="run")


class Heard(Driver):
    """A driver whose closing is noted."""

    def __init__(self, *orders: m.Message) -> None:
        super().__init__()
        self.is_closed = False
        for order in orders:
            self.orders.put_nowait(order)

    async def close(self) -> None:
        self.is_closed = True

    def all_told(self) -> list[m.Message]:
        return [self.told.get_nowait() for _ in range(self.told.qsize())]


def serve(driver: Heard, **changes: Any) -> bool:
    async def in_time() -> bool:
        return await asyncio.wait_for(service.serve(TICKET, TaskPlace(3, 1, ("GPU-a",), 2), runtime), SECONDS)

    runtime = replace(runtime_for(driver), asked_to_leave=never, **changes)
    return asyncio.run(in_time())


def test_a_task_offers_its_slot_answers_pings_and_ends_well_when_it_is_released() -> None:
    driver = Heard(m.Ping(4), m.ReleaseTask())
    assert serve(driver)
    hello, pong = driver.all_told()
    assert isinstance(hello, m.TaskHello)
    assert (hello.slot, pong) == (3, m.Pong(4))
    assert driver.is_closed


def test_a_worker_is_started_and_killed_as_the_driver_says_in_an_environment_that_names_task_and_executor() -> None:
    done: list[object] = []

    class Noting(Supervisor):
        def __init__(self, ticket: object, driver: object, environment: dict[str, str]) -> None:
            super().__init__()
            done.append({name: environment[name] for name in (EXECUTOR_VARIABLE, TASK_VARIABLE, "USERS")})

        def start(self, worker: int, token: str) -> None:
            done.append(("start", worker, token))

        def kill(self, worker: int) -> None:
            done.append(("kill", worker))

    driver = Heard(m.StartWorker(7, "token"), m.KillWorker(7), m.ReleaseTask())
    given: list[object] = []

    def environment(inherited: object, env: dict[str, str], gpus: object, cpus: object, path: object) -> dict[str, str]:
        given.append((gpus, cpus))
        return {"USERS": "own", **env}

    assert serve(driver, supervisor=Noting, environment=environment)
    assert done == [
        {EXECUTOR_VARIABLE: "1", TASK_VARIABLE: "2", "USERS": "own"}, ("start", 7, "token"), ("kill", 7),
    ]  # fmt: skip
    assert given == [(("GPU-a",), 2)]


def failing(error: Exception) -> Callable[..., Coroutine[object, object, Any]]:
    async def fail(*_: object) -> Any:
        raise error

    return fail


def test_a_driver_that_listens_no_more_is_a_job_that_is_over() -> None:
    assert not serve(Heard(), connect=failing(ConnectionRefusedError()))


def test_a_driver_that_cannot_be_reached_is_told_with_its_addresses_and_what_to_look_at() -> None:
    with pytest.raises(TaskRestartError, match=r"east:1, 10\.0\.0\.1:2: no route.*spark\.driver\.host.*driver_port"):
        serve(Heard(), connect=failing(OSError("no route")))


@pytest.mark.parametrize("kind", [ConnectionResetError, ConnectionAbortedError])
def test_a_driver_that_was_reached_and_ended_the_connection_is_not_said_to_be_out_of_reach(
    kind: type[ConnectionError],
) -> None:
    with pytest.raises(
        TaskRestartError, match=r"east:1, 10\.0\.0\.1:2 was reached, .*\(it was closed\)\. .*too many"
    ) as raised:
        serve(Heard(), connect=failing(kind()))
    assert "spark.driver.host" not in str(raised.value)


@pytest.mark.parametrize("answer", [m.ReleaseTask(), ConnectionLostError("gone")])
def test_a_task_that_is_not_welcome_is_no_host(answer: Any) -> None:
    class Unfriendly(Heard):
        async def receive(self) -> m.Message:
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

    driver = Unfriendly()
    assert not serve(driver)
    assert driver.is_closed


def test_a_task_that_is_to_restart_raises_what_the_driver_says() -> None:
    driver = Heard(m.RestartTask("its workers keep failing"))
    with pytest.raises(TaskRestartError, match="its workers keep failing"):
        serve(driver)
    assert driver.is_closed


def test_a_host_that_cannot_run_workers_tells_why_before_it_raises() -> None:
    class Broken(Supervisor):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.broken.set_result("its Python has no torch")

    driver = Heard()
    with pytest.raises(TaskRestartError, match="its Python has no torch"):
        serve(driver, supervisor=Broken)
    assert driver.all_told()[-1] == m.TaskFailed("its Python has no torch")


def test_a_task_whose_executor_has_ended_ends_by_itself() -> None:
    async def gone() -> None:
        pass

    assert serve(Heard(), orphaned=gone)


def test_an_executor_that_is_decommissioned_is_told_of_and_the_task_goes_on() -> None:
    executors: list[int] = []

    class Released(Heard):
        def __init__(self) -> None:
            super().__init__()
            self.send = self.hear  # type: ignore[assignment]

        def hear(self, message: m.Message) -> None:
            self.told.put_nowait(message)
            if isinstance(message, m.TaskDraining):
                self.orders.put_nowait(m.ReleaseTask())

    async def leaving(executor: int) -> None:
        executors.append(executor)

    driver = Released()
    assert serve(driver, leaving=leaving)
    assert driver.all_told()[-1] == m.TaskDraining()
    assert executors == [1]


def test_what_a_task_has_left_on_its_loop_ends_with_it() -> None:
    """Spark may run other code in this process next."""
    ended: list[str] = []

    async def connect(*_: object) -> Any:
        async def wait() -> None:
            try:
                await never()
            finally:
                ended.append("cancelled")

        left.append(asyncio.ensure_future(wait()))
        await asyncio.sleep(0)
        raise ConnectionRefusedError

    left: list[object] = []
    assert not run_task(TICKET, TaskPlace(0), TaskRuntime(connect=connect))
    assert ended == ["cancelled"]


ORPHAN = """
import asyncio, os, subprocess, sys
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
    sys.stdin.read()  # until the test says so
else:
    from spark_elastic.task.service import ancestors_gone

    async def wait():
        waiting = asyncio.ensure_future(ancestors_gone(1))
        await asyncio.sleep(0)
        print("waiting", flush=True)
        await asyncio.wait_for(waiting, 30)
        print("gone", flush=True)

    asyncio.run(wait())
"""


def test_the_end_of_an_ancestor_is_noticed_though_its_child_lives_on(tmp_path: Any) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == "waiting\n"
        parent.kill()
        assert parent.stdout.readline() == "gone\n"
