"""What a reset has cost, from the log of a run: when it began, where the time went, and what was lost."""

from __future__ import annotations

import pytest
import story
from story import entries

from spark_elastic.driver.joining import InterruptCause
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.resets import Kind, Part, find_resets
from spark_elastic.timeline.summary import summary_text


def test_a_loss_is_taken_apart_from_the_fault_to_the_first_step() -> None:
    loss = find_resets(entries(story.killed()))[0]
    assert (loss.kind, loss.old_size, loss.new_size, loss.victim) == (Kind.LOSS, 2, 1, 1)
    assert loss.parts == {
        Part.DETECT: 0.05,
        Part.ABORT: 0.2,
        Part.REGROUP: 0.1,
        Part.CONNECT: 0.1,
        Part.SYNC: 0.2,
        Part.STEP: 0.2,
    }
    assert (loss.lost, loss.steps_lost) == (0.7, 0)


def test_where_no_fault_was_injected_a_loss_begins_at_the_survivors_last_commit() -> None:
    events = [event for event in story.killed() if event["event"] != "fault_injected"]
    assert find_resets(entries(events))[0].parts[Part.DETECT] == pytest.approx(0.1)


def test_a_join_begins_when_those_who_train_have_committed_and_waits_for_no_newcomers_sync() -> None:
    join = find_resets(entries(story.killed()))[1]
    assert (join.kind, join.lost) == (Kind.JOIN, 0.5)
    assert join.parts[Part.DETECT] == 0
    assert join.parts[Part.ABORT] == pytest.approx(0.1)
    assert join.parts[Part.SYNC] == pytest.approx(0.2)


def test_a_world_that_breaks_before_it_trains_belongs_to_the_reset_before() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "entered" and event["generation"] == 2)
    again = [
        story.event("world_broken", 10.45, generation=2, reason="rank 0 did not connect"),
        story.ready(10.46, 0, 2, "1.69"),
    ]
    later = [{**event, "generation": 3} if event.get("generation") == 2 else event for event in events[place:]]
    later = [event for event in later if event["event"] in ("entered", "stepped")][:2]
    found = find_resets(entries([*events[:place], *again, *story.world(10.5, 3, [0], 2, "1.69"), *later]))
    assert [(reset.generation, reset.new_generation) for reset in found] == [(1, 3)]


def test_a_first_step_that_is_noted_before_its_world_has_formed_loses_nothing() -> None:
    """The last rank's word that it has connected may come after the first step of another one."""
    events = story.killed()
    in_order = find_resets(entries(events))
    for loss in (2, 3):
        (formed,) = [event for event in events if event["event"] == "world_formed" and event["generation"] == loss]
        events.remove(formed)
        stepped = next(n for n, e in enumerate(events) if e["event"] == "stepped" and e["generation"] == loss)
        events.insert(stepped + 1, formed)
    assert find_resets(entries(events)) == in_order


def test_a_drain_that_turns_into_a_failure_is_a_loss() -> None:
    events = story.killed()
    broken = next(n for n, event in enumerate(events) if event["event"] == "world_broken")
    drain = story.event("world_interrupted", 9.96, generation=1, reason="a host drains")
    assert find_resets(entries([*events[:broken], drain, *events[broken:]]))[0].kind is Kind.LOSS


def test_a_first_step_that_comes_after_the_interruption_of_its_world_ends_no_reset() -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "stepped" and event["generation"] == 3)
    arrived = story.event("world_interrupted", 15.05, generation=3, reason="workers arrived")
    last = find_resets(entries([*events[:place], arrived, *events[place:]]))[-1]
    assert (last.generation, last.new_generation) == (3, None)


def test_commits_that_nobody_holds_any_more_are_steps_lost() -> None:
    """All workers were lost, and the durable checkpoint is older than what they had."""
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "entered" and event["generation"] == 2)
    restored = story.told("entered", 10.6, 2, 0, 2, step=50)
    stepped = story.told("stepped", 10.8, 2, 0, 2, step=51)
    kept = [event for event in events[:place] if not (event["event"] == "worker_ready" and event["generation"] == 1)]
    found = find_resets(entries([*kept, restored, stepped]))[0]
    assert (found.steps_lost, found.lost) == (19, None)


def test_commits_lost_once_are_not_lost_again_by_the_next_reset() -> None:
    """After the fall back to step 50, a newcomer joins before the old step has been reached again."""
    events = [event for event in story.killed() if event["event"] not in ("progress", "metrics")]
    for event in events:
        if event["event"] in ("entered", "stepped") and event["generation"] > 1:
            event["values"]["step"] -= 19
        if event["event"] == "worker_ready" and event["generation"] == 1:
            event["commit"] = None
    place = next(n for n, event in enumerate(events) if event["event"] == "fault_injected")
    found = find_resets(entries([*events[:place], story.rows(9.9, 1, 69), *events[place:]]))
    assert [reset.steps_lost for reset in found] == [19, 0]


def test_a_fault_explains_one_loss() -> None:
    events = story.killed()
    again = [
        story.event("world_broken", 10.9, generation=2, reason="rank 0 on east was lost: its process died"),
        *story.world(11.0, 3, [2], 2, None),
        story.told("entered", 11.1, 2, 0, 3, step=70, idle=0.3),
        story.told("stepped", 11.2, 2, 0, 3, step=71),
    ]
    place = next(n for n, event in enumerate(events) if event["event"] == "world_interrupted")
    first, second = find_resets(entries([*events[:place], *again]))
    assert (first.victim, second.victim) == (1, None)
    assert second.begin == pytest.approx(1010.8)


def test_a_run_that_ends_in_a_reset_shows_that_it_did_not_go_on() -> None:
    events = story.killed()
    broken = next(n for n, event in enumerate(events) if event["event"] == "world_broken")
    failed = story.event("job_failed", 12, error="NotEnoughHostsError", message="only 1 of 2")
    history = read_history(entries([*events[: broken + 1], failed]))
    assert [reset.new_generation for reset in history.resets] == [None]
    assert history.outcome == "failed: NotEnoughHostsError: only 1 of 2"
    assert "did not go on" in summary_text(history)


@pytest.mark.parametrize("cause", InterruptCause)
def test_a_planned_end_is_of_the_kind_that_the_driver_has_recorded(cause: InterruptCause) -> None:
    events = story.killed()
    place = next(n for n, event in enumerate(events) if event["event"] == "world_interrupted")
    events[place] = {**events[place], "reason": "in other words", "cause": cause.value}
    assert [reset.kind for reset in read_history(entries(events)).resets] == [Kind.LOSS, Kind(cause.value)]


def test_a_reset_tells_why_its_workers_were_lost_where_survivors_noticed_something_else_first() -> None:
    events = story.killed()
    broken = next(event for event in events if event["event"] == "world_broken")
    broken["reason"] = "rank 0 reports: Connection closed by peer\nand a trace"
    (reset, _) = read_history(entries(events)).resets
    assert reset.reason == "rank 1 on west was lost: killed by SIGKILL"
    unexplained = [event for event in events if event["event"] != "worker_exited"]
    assert read_history(entries(unexplained)).resets[0].reason == "rank 1 on west was lost: its process died"
    nobody = read_history(
        entries([event for event in events if event["event"] not in ("worker_lost", "worker_exited")])
    )
    assert nobody.resets[0].reason == broken["reason"]
    assert "  rank 0 reports: Connection closed by peer  2 → 1 " in summary_text(nobody)


def test_a_worker_that_is_lost_after_it_has_left_its_world_is_no_reason_for_its_end() -> None:
    events = story.killed()
    lost = next(place for place, event in enumerate(events) if event["event"] == "worker_lost")
    broken = story.event("world_broken", 9.96, generation=1, reason="rank 0 reports: NCCL error")
    both = [story.ready(9.97, 0, 1, "1.69"), story.ready(9.97, 1, 1, "1.69")]
    events = [event for event in events if event["event"] != "world_broken"]
    events[lost:lost] = [broken, *both]
    assert read_history(entries(events)).resets[0].reason == "rank 0 reports: NCCL error"


def test_of_several_losses_each_is_told_in_a_line_and_old_logs_do_not_say_what_explains() -> None:
    events = story.killed()
    place = next(place for place, event in enumerate(events) if event["event"] == "worker_lost")
    events.insert(place, story.event("worker_lost", 10.0, worker=0, rank=0, host="east", cause="raised\nin line 3"))
    del next(event for event in events if event["event"] == "worker_exited")["explains"]
    reason = read_history(entries(events)).resets[0].reason
    assert reason == "rank 0 on east was lost: raised; rank 1 on west was lost: killed by SIGKILL"
