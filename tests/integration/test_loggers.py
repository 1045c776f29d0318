"""Loggers of whole jobs: what rank 0 reports arrives once, through losses and from one run to the next."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from spark_elastic import TrainingFailedError
from spark_elastic.driver import event_log
from spark_elastic.loggers import Logger
from spark_elastic.testing import inject, kill


class Noted(Logger):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, resumes: str | None) -> None:
        self.calls.append(("start", resumes))

    def named(self, run_id: str) -> None:
        self.calls.append(("named", run_id))

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self.calls.append(("log", step, dict(values)))

    def finish(self, error: str | None) -> None:
        self.calls.append(("finish", error))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(call[1], call[2][name]) for call in self.calls if call[0] == "log" and name in call[2]]


def job(steps: int, fails: bool = False) -> Any:
    def train_fn() -> None:
        state = spark_elastic.ObjectState(step=0)

        @spark_elastic.elastic
        def train(state: Any) -> None:
            while state.step < steps:
                spark_elastic.barrier()
                state.step += 1
                state.commit()
                state.report(value=state.step, rank=spark_elastic.rank())
            if fails:
                raise ValueError("mine")

        train(state)

    return train_fn


def test_what_rank_0_reports_is_logged_once_through_a_loss_and_a_later_run_goes_on(
    cluster: Any, tmp_path: Path
) -> None:
    url, first, second = str(tmp_path), Noted(), Noted()
    with inject(kill(rank=0, step=20)):
        spark_elastic.run(
            job(40),
            num_proc=2,
            min_np=2,
            max_np=2,
            local=cluster,
            loggers=[first],
            checkpoint=url,
            checkpoint_interval=0,
        )
    assert [call[0] for call in first.calls if call[0] != "log"] == ["start", "named", "finish"]
    assert (first.calls[0], first.calls[-1]) == (("start", url), ("finish", None))
    values = first.of("value")
    assert values == sorted(values)
    assert all(step == value for step, value in values)
    assert values[-1] == (40, 40.0)
    assert {rank for _, rank in first.of("rank")} == {0.0}
    assert [value for _, value in first.of("job/resets")] == [1.0]
    assert {size for _, size in first.of("job/world_size")} == {2.0}

    spark_elastic.run(job(50), num_proc=1, max_np=1, local=cluster, loggers=[second], checkpoint=url)
    assert second.calls[0] == ("start", url)
    assert second.of("value")[0][0] > 40
    assert second.of("job/world_size") == [(40, 1.0)]
    assert second.of("value")[-1] == (50, 50.0)


@pytest.mark.parametrize(("elastic", "trains"), [(True, True), (False, True), (False, False)])
def test_what_is_reported_last_arrives_however_often_was_reported_before(elastic: bool, trains: bool) -> None:
    def fn() -> None:
        state = spark_elastic.ObjectState(step=0)

        @spark_elastic.elastic
        def train(state: Any) -> None:
            state.step += 1
            state.commit()

        if trains:
            train(state)
        for value in range(100):
            state.report(value=value)
        state.report(last=0.9)

    noted, size = Noted(), {"max_np": 1} if elastic else {"elastic": False}
    spark_elastic.run(fn, num_proc=1, local=True, loggers=[noted], **size)
    assert (noted.of("value")[-1], noted.of("last")) == ((trains, 99.0), [(trains, 0.9)])


def test_loggers_hear_why_a_job_failed_and_one_that_cannot_start_keeps_it_from_starting(cluster: Any) -> None:
    noted = Noted()
    with pytest.raises(TrainingFailedError, match="mine"):
        spark_elastic.run(job(3, fails=True), num_proc=1, max_np=1, local=cluster, loggers=[noted])
    assert noted.calls[-1][0] == "finish"
    assert "TrainingFailedError: " in noted.calls[-1][1]

    class Unreachable(Noted):
        def start(self, resumes: str | None) -> None:
            raise ConnectionError("no server")

    events: list[Any] = []
    with pytest.raises(ConnectionError, match="no server"):
        spark_elastic.run(job(3), num_proc=1, max_np=1, local=cluster, loggers=[Unreachable()], on_event=events.append)
    assert not events


def test_a_slow_callable_costs_the_file_of_events_and_the_loggers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "END_SECONDS", 0.2)
    log, may_go_on = tmp_path / "log.jsonl", threading.Event()
    try:
        spark_elastic.run(
            lambda: None, num_proc=1, max_np=1, local=True, event_log=log, on_event=lambda _: may_go_on.wait(30)
        )
    finally:
        may_go_on.set()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[-1] == "job_finished"
    assert "events_dropped" not in events
