"""The driver's log tells who was lost, why, and what the job did about it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from machine_script import Script, reform, running

from spark_elastic.driver.narration import Narrator
from spark_elastic.protocol.records import NewcomersPaused


def told(script: Script) -> list[tuple[int, str]]:
    narrator = Narrator(script.job.settings.elastic)
    lines = [narrator.tell(record) for record in script.records]
    return [line for line in lines if line is not None]


def warnings(script: Script) -> list[str]:
    return [text for level, text in told(script) if level == logging.WARNING]


def test_a_loss_is_told_with_its_cause_and_how_the_job_goes_on() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(1)
    reform(script)
    assert warnings(script) == [
        "rank 1 (worker 1) on b was lost: its process died",
        "generation 1 ends: rank 1 on b was lost: its process died; its survivors go back to their last commit",
        "rank 1 (worker 1) on b killed by SIGKILL; if the kernel ran out of memory, raise spark.executor.memoryOverhead",
        "generation 2 of size 1 goes on from commit 1.1",
    ]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_fixed_world_is_said_to_run_again_only_where_it_does(limit: int) -> None:
    script = running("a", "b", min_np=2, max_np=2, elastic=False, reset_limit=limit)
    script.kill(1)
    again = ["all of generation 1 runs again, in new processes"]
    assert warnings(script)[1:3] == [
        "generation 1 ends: rank 1 on b was lost: its process died",
        *again[:limit],
    ]


def test_a_cause_that_is_known_is_not_told_again() -> None:
    script = running("a", "b")
    script.raises(1)
    assert warnings(script)[:1] == ["rank 1 (worker 1) on b was lost: raised ValueError: bad row"]
    assert len(warnings(script)) == 2


def test_the_loss_of_a_newcomer_is_told_and_breaks_nothing() -> None:
    script = running("a")
    newcomer: Any = script.worker_on(script.register("c"))
    script.kill(newcomer)
    assert warnings(script)[0] == "worker 1 (no rank yet) on c was lost: its process died"


def test_planned_changes_are_no_warnings() -> None:
    script = running("a", "b")
    script.commit()
    script.drain(1)
    script.obey_interrupt()
    script.acknowledge()
    assert warnings(script) == []
    assert [text for _, text in told(script)] == [
        "generation 1 of size 2 begins",
        "host 1 on b drains; its worker leaves at the next commit",
        "generation 1 ends at its next commit: a host drains",
        "generation 2 of size 1 goes on from commit 1.2",
    ]


def test_a_pause_of_the_driver_is_told() -> None:
    script = running("a")
    script.pass_time(100, step=100)
    assert warnings(script) == ["the driver stood still for 100 s"]


def test_newcomers_that_have_to_wait_are_told_of_with_the_reason() -> None:
    narrator = Narrator()
    assert narrator.tell(NewcomersPaused(None, 3, 15.0, "worker 4 on c raised ValueError: bad shape")) == (
        logging.WARNING,
        "newcomers have broken 3 worlds in a row, the last time because worker 4 on c raised ValueError: bad shape; training "
        "goes on without newcomers, it is tried again in 15 s",
    )
    assert narrator.tell(NewcomersPaused("c", 1, 15.0, "nobody could connect to them")) == (
        logging.WARNING,
        "newcomers on c are left out: nobody could connect to them; training goes on without them, it is tried again in 15 s",
    )
