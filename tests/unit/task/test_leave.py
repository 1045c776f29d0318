"""``spark-elastic leave`` and a task: the worker leaves, the command hears of it, and the slot is held until the job ends."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from played_driver import Driver, runtime_for

from spark_elastic.protocol import messages as m
from spark_elastic.task.leave import LeaveCommand, asked_to_leave, hold
from spark_elastic.task.service import TaskPlace, serve


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of its own, as far as the command is concerned. Nothing is left there."""
    folder = tmp_path / ("long" * 30)  # the path of a socket must not be
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_a_task_drains_tells_when_its_worker_is_gone_and_holds_its_slot_until_the_job_ends() -> None:
    async def job(command: LeaveCommand) -> tuple[bool, int, int]:
        driver, ticket = Driver(), SimpleNamespace(addresses=[], credentials=None, run_id="run")
        task = asyncio.ensure_future(serve(ticket, TaskPlace(0), runtime_for(driver)))  # type: ignore[arg-type]
        assert isinstance(await driver.told.get(), m.TaskHello)
        assert isinstance(await driver.told.get(), m.TaskDraining)
        waiting = asyncio.ensure_future(asyncio.to_thread(command.wait, 60.0))
        assert not waiting.done(), "the worker has not left yet"
        driver.orders.put_nowait(m.ReleaseTask())
        done = await waiting
        driver.orders.put_nowait(m.Ping(1))
        assert await driver.told.get() == m.Pong(1), "the slot would have been started again here"
        driver.orders.put_nowait(m.ReleaseTask())
        await task
        return done, command.asked, command.left

    with LeaveCommand() as command:
        assert asyncio.run(job(command)) == (True, 1, 1)


def test_a_task_that_was_not_asked_ends_when_it_is_released() -> None:
    async def job() -> None:
        driver, ticket = Driver(), SimpleNamespace(addresses=[], credentials=None, run_id="run")
        driver.orders.put_nowait(m.ReleaseTask())
        await serve(ticket, TaskPlace(0), runtime_for(driver))  # type: ignore[arg-type]

    asyncio.run(job())


def test_the_slot_is_held_until_the_command_has_ended() -> None:
    async def held() -> bool:
        with LeaveCommand() as command:
            end = await asked_to_leave()
            holding = asyncio.ensure_future(hold(end, 0.0))
            assert await asyncio.to_thread(command.wait, 60.0)
            was_held = not holding.done()
        await holding
        end.close()
        return was_held

    assert asyncio.run(held())
