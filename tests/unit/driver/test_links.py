"""What the driver's connections tell: which library of collectives suits the machines behind them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.driver.links import Standby, TaskLink, choose_backend


def task(name: str, *gpus: str, torch: str = "2.13.0") -> TaskLink:
    facts: Any = SimpleNamespace(name=name, gpus=gpus, torch=torch)
    connection: Any = None
    return TaskLink(0, facts, connection)


@pytest.mark.parametrize(
    ("tasks", "backend"),
    [
        ([task("a", "0"), task("a", "1"), task("b", "0")], "nccl"),
        ([task("a", "0")], "nccl"),
        ([task("a", "0"), task("a", "0")], "gloo"),
        ([task("a", "0"), task("a")], "gloo"),
        ([task("a", "0"), None], "gloo"),
        ([task("a")], "gloo"),
        ([task("a", "0"), task("b", "0", torch="2.13.0+cpu")], "gloo"),
    ],
)
def test_nccl_is_taken_where_every_worker_has_a_gpu_of_its_own(tasks: list[TaskLink | None], backend: str) -> None:
    assert choose_backend(tasks) == backend


@pytest.mark.parametrize("is_vacated", [True, False])
def test_a_duplicate_takes_a_slot_that_is_vacated_and_none_when_waiting_ends(is_vacated: bool) -> None:
    async def wait() -> bool:
        standby = Standby()
        connection: Any = SimpleNamespace(receive=asyncio.Event().wait)
        waiting = asyncio.ensure_future(standby.wait(3, connection))
        await asyncio.sleep(0)
        standby.vacate(3) if is_vacated else standby.close()
        return await waiting

    assert asyncio.run(wait()) == is_vacated
