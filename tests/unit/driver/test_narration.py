"""The driver's log tells who was lost, why, and what the job did about it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from machine_script import Script, reform, running

from spark_elastic.driver.narration import Narrator
from spark_elastic.protocol.records import (
    DriverPaused,
    HostCooling,
    NewcomersPaused,
    StateLost,
    WorkerLost,
    WorkerReported,
    WorkerTooSlow,
    WorldBroken,
    WorldFormed,
    WorldForming,
)
from spark_elastic.protocol.reports import Entered, SharesChanged


def told(script: Script) -> list[tuple[int, str]]:
    narrator = Narrator(script.job.settings.elastic)
    lines = [line for record in script.records for line in narrator.tell(record)]
    return [*lines, *narrator.flush()]


def warnings(script: Script) -> list[str]:
    return [text for level, text in told(script) if level == logging.WARNING]


KILLED = "killed by SIGKILL; if the kernel ran out of memory, raise spark.executor.memoryOverhead"


def test_a_loss_is_one_line_with_its_cause_and_how_the_job_goes_on() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(1)
    reform(script)
    assert warnings(script) == [
        f"rank 1 (worker 1) on b was lost: {KILLED}. Generation 2 of size 1 goes on from commit 1.1"
    ]


@pytest.mark.parametrize(
    ("before", "after", "seconds", "level", "text"),
    [
        ([50, 50], [75, 25], [0.1, 0.3], logging.WARNING,
         "rank 1 (worker 1) on b is slow: a row takes it 3.0 times as long as the fastest rank, and of the 100 rows of a step it "
         "takes 25 instead of 50"),
        ([75, 25], [55, 45], [0.15, 0.05], logging.INFO,
         "parts of a step follow speeds: of 100 rows ranks take 55, 45"),
    ],
)  # fmt: skip
def test_a_slow_rank_is_named_with_its_host_and_what_was_done(
    before: list[int], after: list[int], seconds: list[float], level: int, text: str
) -> None:
    narrator = Narrator()
    for record in running("a", "b").records:
        narrator.tell(record)
    change = SharesChanged(7, before, after, seconds)
    assert narrator.tell(WorkerReported(0, 0, 1, change)) == [(level, text)]
    assert narrator.tell(WorkerReported(0, 0, 1, change)) == [(logging.INFO, text)], "a warning is given once"


def test_what_is_not_known_in_time_is_told_when_it_is() -> None:
    script = running("a", "b")
    script.commit()
    script.kill(1)
    reform(script)
    narrator = Narrator()
    said: list[str] = []
    for record in script.records:
        said += [text for level, text in narrator.tell(record) if level == logging.WARNING]
        if isinstance(record, WorldBroken):
            said += [text for _, text in narrator.flush()]
    assert said == [
        "rank 1 (worker 1) on b was lost: its process died; its survivors go back to their last commit",
        f"rank 1 (worker 1) on b {KILLED}",
        "generation 2 of size 1 goes on from commit 1.1",
    ]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_fixed_world_is_said_to_run_again_only_where_it_does(limit: int) -> None:
    script = running("a", "b", min_np=2, max_np=2, elastic=False, reset_limit=limit)
    script.kill(1)
    end = f"{KILLED}. All of generation 1 runs again, in new processes" if limit else "its process died"
    assert warnings(script)[0] == f"rank 1 (worker 1) on b was lost: {end}"


def test_what_all_ranks_have_raised_is_shown_once() -> None:
    narrator = Narrator()
    for worker in (0, 1):
        narrator.hear_traceback(worker, "Traceback: the same\n")
        narrator.tell(WorkerLost(worker, worker, "b", "raised ValueError: bad row"))
    narrator.tell(WorldBroken(1, "rank 0 on b was lost: raised ValueError: bad row", lost=0))
    ((_, text),) = narrator.flush()
    assert text == (
        "rank 0 (worker 0) on b was lost: raised ValueError: bad row; rank 1 (worker 1) on b was lost: raised ValueError: bad "
        "row; its survivors go back to their last commit\nTraceback: the same"
    )
    assert narrator.flush() == []


@pytest.mark.parametrize("has_survivor", [False, True])
@pytest.mark.parametrize(
    ("step", "end"),
    [(40, "goes on from the durable checkpoint of step 40"), (0, "starts over: no checkpoint had been written")],
)
def test_a_lost_state_is_told_with_the_checkpoint_from_which_the_job_goes_on(
    step: int, end: str, has_survivor: bool
) -> None:
    script = running("a", "b", min_np=1, durable=True)
    script.commit()
    for worker in (0,) if has_survivor else (0, 1):
        script.kill(worker)
    narrator = Narrator()
    said = [line for record in script.records for line in narrator.tell(record)]
    lost = "all workers that held the newest commit were lost"
    said += narrator.tell(StateLost(1, lost)) if has_survivor else []
    said += narrator.tell(WorldForming(2, 1, 0, [2], None)) + narrator.tell(WorldFormed(2, 1, 0.1))
    said += narrator.tell(WorkerReported(2, 0, 2, Entered(step)))
    said += narrator.tell(WorkerReported(2, 0, 2, Entered(step)))
    told = [text for level, text in said if level == logging.WARNING]
    lost = lost if has_survivor else "all 2 workers of generation 1 were lost"
    assert told[0].endswith(
        f"; {lost}, so that the next world begins from the newest durable checkpoint. Generation 2 of size 1 begins"
    )
    assert "survivors" not in told[0]
    assert told[1:] == [f"generation 2 {end}"]


@pytest.mark.parametrize(
    ("step", "end"), [(7, ["generation 1 goes on from the durable checkpoint of step 7"]), (0, [])]
)
def test_a_run_that_resumes_says_from_where_and_another_elastic_function_does_not(step: int, end: list[str]) -> None:
    narrator = Narrator()
    said = [line for record in running("a").records for line in narrator.tell(record)]
    assert said == [(logging.INFO, "generation 1 of size 1 begins")]
    assert narrator.tell(WorkerReported(0, 0, 1, Entered(step))) == [(logging.INFO, text) for text in end]
    assert narrator.tell(WorkerReported(0, 0, 1, Entered(step + 9))) == []


def test_what_the_jobs_error_tells_is_not_told_before() -> None:
    script = running("a", "b")
    script.raises(1)
    narrator = Narrator()
    for record in script.records:
        narrator.tell(record)
    assert narrator.is_waiting
    narrator.forget()
    assert narrator.flush() == []


def test_a_break_without_a_loss_is_told() -> None:
    assert Narrator().tell(WorldBroken(3, "the ranks could not connect")) == [
        (logging.WARNING, "generation 3 ends: the ranks could not connect; its survivors go back to their last commit")
    ]


def test_the_loss_of_a_newcomer_is_told_and_breaks_nothing() -> None:
    script = running("a")
    newcomer: Any = script.worker_on(script.register("c"))
    script.kill(newcomer)
    assert warnings(script) == [f"worker 1 (no rank yet) on c was lost: {KILLED}"]


def test_a_host_whose_newcomers_keep_dying_is_said_to_get_none_for_a_while() -> None:
    """The first death costs it nothing, and each further one doubles the time."""
    script = running("a")
    host = script.register("c")
    for seconds in (0.0, 0.5, 1.0):
        newcomer: Any = script.worker_on(host)
        script.kill(newcomer)
        script.pass_time(seconds)
    assert [(cooling.host, cooling.name, cooling.seconds) for cooling in script.recorded(HostCooling)] == [
        (host, "c", 0.5),
        (host, "c", 1.0),
    ]
    assert f"host {host} on c gets no worker for 0.5 s, as its last ones died without a commit" in [
        text for level, text in told(script) if level == logging.INFO
    ]


def test_planned_changes_are_no_warnings() -> None:
    script = running("a", "b")
    script.commit()
    script.drain(1)
    script.obey_interrupt()
    script.acknowledge()
    assert warnings(script) == []
    assert [text for _, text in told(script)] == [
        "generation 1 of size 2 begins",
        "host 1 on b drains; its worker leaves at the next commit, unless it alone holds the state",
        "generation 1 ends at its next commit: a host drains",
        "generation 2 of size 1 goes on from commit 1.2",
    ]


def test_a_worker_that_is_too_slow_is_told_of_with_its_host_and_what_follows() -> None:
    beginning = (
        "rank 1 (worker 4) on west is too slow: a row takes it 12.5 times as long as the median of the other ranks; "
    )
    for seconds, follows in (
        (60.0, "it is replaced, and its executor gets no worker for 60 s"),
        (None, "it stays, because fewer than min_np workers would be left without it"),
    ):
        assert Narrator().tell(WorkerTooSlow(4, 1, "west", 12.5, seconds)) == [(logging.WARNING, beginning + follows)]


def test_a_pause_of_the_driver_is_told() -> None:
    script = running("a")
    script.pass_time(100, step=100)
    assert warnings(script) == ["the driver stood still for 100 s"]


def test_a_pause_after_the_end_is_of_no_interest() -> None:
    script = running("a")
    script.raises(0)
    assert script.job.over
    script.pass_time(100, step=100)
    assert not script.recorded(DriverPaused)


def test_newcomers_that_have_to_wait_are_told_of_with_the_reason() -> None:
    narrator = Narrator()
    assert narrator.tell(NewcomersPaused(None, 3, 15.0, "worker 4 on c raised ValueError: bad shape")) == [
        (
            logging.WARNING,
            "newcomers have broken 3 worlds in a row, the last time because worker 4 on c raised ValueError: bad shape; if "
            "min_np workers are left, training goes on without newcomers, and it is tried again in 15 s",
        )
    ]
    assert narrator.tell(NewcomersPaused("c", 1, 15.0, "nobody could connect to them")) == [
        (
            logging.WARNING,
            "newcomers on c are left out: nobody could connect to them; training goes on without them, it is tried again in 15 s",
        )
    ]
