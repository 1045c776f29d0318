"""The start of a run is taken apart into what it waited for."""

from __future__ import annotations

from typing import Any

import story

from spark_elastic.protocol.event_format import read_event
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.start import Stage, Wait, find_start

BEGUN, *REST = story.killed()


def host(time: float, number: int) -> dict[str, Any]:
    return story.event("host_registered", time, host=number, slot=number, name="east")


def starting(time: float, worker: int) -> dict[str, Any]:
    return story.event("worker_starting", time, worker=worker, host=worker, name="east")


def started(time: float, worker: int) -> dict[str, Any]:
    return story.event("worker_started", time, worker=worker, host=worker, pid=worker)


GATHERED = [
    host(1, 0), starting(1, 0), host(4, 1), starting(4, 1), started(5, 0), started(9, 1), story.ready(10, 0), story.ready(12, 1),
]  # fmt: skip
TRAINED = [
    *story.world(12, 1, [0, 1], 0, None),
    story.told("entered", 13.0, 0, 0, 1, step=0),
    story.told("entered", 13.1, 1, 1, 1, step=0),
    story.told("stepped", 15.0, 0, 0, 1, step=1),
]


def start_of(*events: dict[str, Any]) -> list[tuple[Stage, float, float, str]]:
    entries = [read_event(event) for event in (BEGUN, *events)]
    return [
        (wait.stage, round(wait.start - 1000, 3), round(wait.end - 1000, 3), wait.detail)
        for wait in find_start(entries)
    ]


def test_each_stage_lasts_until_the_last_of_the_first_world_has_passed_it() -> None:
    assert start_of(*GATHERED, *TRAINED, host(17, 2)) == [
        (Stage.SLOTS, 0, 4, "2 of 2 slots are there"),
        (Stage.IMPORTS, 4, 9, "2 of 2 workers run"),
        (Stage.FIRST_LINES, 9, 12, "2 of 2 workers are ready"),
        (Stage.CONNECT, 12, 12.1, ""),
        (Stage.SYNC, 12.1, 13, ""),
        (Stage.STEP, 13, 15, ""),
    ]


def test_who_arrives_or_is_noted_while_the_first_world_forms_does_not_take_the_start_back() -> None:
    in_time = [event for event in GATHERED if event != started(9, 1)]
    late = [started(12.2, 1), host(12.3, 2), starting(12.3, 2)]
    assert start_of(*in_time, *TRAINED[:2], *late, *TRAINED[2:])[-3:] == [
        (Stage.CONNECT, 12, 12.1, ""),
        (Stage.SYNC, 12.1, 13, ""),
        (Stage.STEP, 13, 15, ""),
    ]


def test_a_start_that_is_not_over_says_who_is_there_so_far() -> None:
    assert start_of(host(1, 0), starting(1, 0)) == [(Stage.SLOTS, 0, 1, "1 of 2 slots are there")]
    assert start_of(*GATHERED[:6])[-1] == (Stage.FIRST_LINES, 9, 9, "0 of 2 workers are ready")


def test_a_world_that_breaks_before_its_first_step_belongs_to_the_start() -> None:
    broken = [
        story.event("worker_lost", 12.5, worker=1, rank=1, host="east", cause="its process died"),
        story.event("world_broken", 12.5, generation=1, reason="its process died"),
        story.event("host_lost", 12.5, host=1, name="east", reason="its task ended"),
        host(14, 2),
        starting(14, 2),
        started(15, 2),
    ]
    assert start_of(*GATHERED, *TRAINED[:2], *broken, story.ready(16, 2))[-3:] == [
        (Stage.SLOTS, 12.5, 14, "2 of 2 slots are there"),
        (Stage.IMPORTS, 14, 15, "2 of 2 workers run"),
        (Stage.FIRST_LINES, 15, 16, "2 of 2 workers are ready"),
    ]


def test_a_function_without_an_elastic_part_has_no_first_lines() -> None:
    result = story.event("result_arrived", 60, worker=0)
    assert [wait[0] for wait in start_of(*GATHERED[:6], result)] == [Stage.SLOTS, Stage.IMPORTS]


def test_the_history_has_the_start_from_the_beginning_of_the_run_on() -> None:
    entries = [read_event(event) for event in (BEGUN, *GATHERED[:3])]
    assert read_history(entries, until=1007.0).start == [
        Wait(Stage.SLOTS, 0.0, 4.0, "2 of 2 slots are there"),
        Wait(Stage.IMPORTS, 4.0, 7.0, "0 of 2 workers run"),
    ]
