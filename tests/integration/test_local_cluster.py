"""A cluster of local processes shrinks and grows while jobs train on it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import training
from jobs import Run, check

import spark_elastic
from spark_elastic import JobCancelledError
from spark_elastic.testing import LocalCluster, give_back, hang, inject, local_cluster, take_away

STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(slots=3) as made:
        spark_elastic.run(training.plain, (1,), local=made, num_proc=1)  # starts the process that slots are forked from
        yield made


def train(cluster: LocalCluster, fn: Any, *args: Any, faults: Any = (), on_event: Any = None, **settings: Any) -> Run:
    events: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    with inject(*faults):
        results = spark_elastic.run(fn, args, local=cluster, on_event=note, **{"min_np": 1, "num_proc": 3, **settings})
    return Run(results, events)


def count(cluster: LocalCluster, *faults: Any, **settings: Any) -> Run:
    result = train(cluster, training.count_steps, STEPS, 0.02, faults=faults, **settings)
    check(result, STEPS)
    return result


def train_until_it_has_grown(cluster: LocalCluster, stop: Path, *faults: Any, change: Any = None) -> Run:
    """Train until a world of three follows a smaller one."""
    sizes: list[int] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            sizes.append(event["size"])
            if change is not None:
                change(sizes)
            if len(sizes) > 1 and event["size"] == 3:
                stop.touch()

    result = train(cluster, training.train_until, str(stop), faults=faults, on_event=watch)
    assert len(set(result.results)) == 1
    return result


def test_a_slot_that_is_taken_away_is_left_without_a_lost_step_and_one_that_is_given_back_is_used(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    result = train_until_it_has_grown(cluster, tmp_path / "stop", take_away(rank=2, step=10), give_back(step=20))
    assert result.sizes == [3, 2, 3]
    assert not result.of("world_broken")
    assert len(result.of("host_draining")) == 1


def test_with_no_grace_it_is_killed_at_once_and_does_not_come_back(cluster: LocalCluster) -> None:
    result = count(cluster, take_away(rank=0, step=10, grace=0))
    assert result.sizes == [3, 2]
    assert [event["worker"] for event in result.of("worker_lost")] == [result.of("fault_injected")[0]["worker"]]
    assert cluster.slots == 2
    cluster.give_back()


def test_who_has_not_left_when_its_grace_is_over_is_killed(cluster: LocalCluster) -> None:
    result = count(
        cluster, hang(rank=1, step=10, at="recorded"), take_away(rank=1, step=10, grace=2.0), num_proc=2, max_np=2
    )
    assert result.faults == 2
    assert result.of("world_broken")
    cluster.give_back()


def test_from_another_thread_slots_are_taken_and_given_back_by_their_number(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def change(sizes: list[int]) -> None:
        if len(sizes) == 1:
            cluster.take_away(2)
        elif sizes[-1] == 1:
            cluster.give_back(2)

    result = train_until_it_has_grown(cluster, tmp_path / "stop", change=change)
    assert min(result.sizes) == 1
    assert not result.of("world_broken")


def test_two_jobs_on_too_few_slots_take_turns(cluster: LocalCluster) -> None:
    results: list[Run] = []
    threads = [
        threading.Thread(target=lambda: results.append(count(cluster, min_np=2, max_np=2, num_proc=2, yield_after=0.5)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == 2


def test_jobs_are_forked_from_one_process_as_long_as_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[int, bool, str | None]:
        import os

        import psutil

        above = psutil.Process().parents()
        return above[2].pid, above[0].cmdline() == above[2].cmdline(), os.environ.get("GREETING")

    def ask(**settings: Any) -> Any:
        return train(cluster, look, num_proc=1, max_np=1, **settings).results[0]

    with local_cluster(slots=1) as cluster:
        first, *rest = ask()
        assert rest == [True, None]
        assert ask() == (first, True, None)
        # What the user gives may be read when an interpreter starts.
        assert ask(env={"GREETING": "hello"}) == (first, False, "hello")
        monkeypatch.setenv("GREETING", "good day")
        other, *rest = ask()
        assert other != first
        assert rest == [True, "good day"]


def test_a_cluster_that_is_closed_ends_its_jobs() -> None:
    def close(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            cluster.close()

    with local_cluster(slots=2) as cluster, pytest.raises(JobCancelledError, match="the local cluster was closed"):
        count(cluster, num_proc=2, on_event=close)


def test_faults_of_a_cluster_are_refused_where_it_cannot_be_changed() -> None:
    with (
        inject(give_back(step=3), take_away(rank=1)),
        pytest.raises(ValueError, match="give_back and take_away need a cluster"),
    ):
        spark_elastic.run(training.plain, (1,), local=True)


def test_a_fault_that_has_not_struck_is_warned_of(cluster: LocalCluster) -> None:
    """A test with such a fault has tested nothing: it names a rank or a step that the job has not reached."""
    faults = (take_away(rank=2, step=10), hang(rank=1, step=STEPS + 1), hang(rank=7, at="return"))
    missing = re.escape(f"never struck: hang(rank=1, step={STEPS + 1}), hang(rank=7, at='return'). Did")
    with pytest.warns(UserWarning, match=missing):
        count(cluster, *faults)
