"""Reporter: metrics and progress reach the driver, and few messages do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spark_elastic.worker.reporting import BURST, Reporter


class Log:
    """What was sent, on a clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [values for name, values in self.sent if name == kind]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def reporter(log: Log) -> Reporter:
    return Reporter(lambda kind, values: log.sent.append((kind, values)), lambda: log.now)


def test_a_survivor_says_how_long_it_was_idle_and_a_newcomer_does_not(log: Log, reporter: Reporter) -> None:
    reporter.entered(0, None)
    log.now += 3
    reporter.committed(1, None)
    log.now += 0.25
    reporter.entered(1, lambda: {"rows": 7})
    assert log.of("entered") == [{"step": 0}, {"step": 1, "idle": 0.25}]
    assert log.of("progress") == [{"step": 1, "rows": 7}]


def test_the_first_commit_of_each_generation_is_told(log: Log, reporter: Reporter) -> None:
    for first in (0, 2):
        reporter.entered(first, None)
        reporter.committed(first + 1, None)
        reporter.committed(first + 2, None)
    assert log.of("stepped") == [{"step": 1}, {"step": 3}]


def test_progress_is_sent_twice_a_second_and_at_the_end(log: Log, reporter: Reporter) -> None:
    for step in range(100):
        reporter.committed(step, lambda rows=step: {"rows": rows})
        log.now += 0.01
    reporter.finished(99, lambda: {"rows": 99})
    assert [values["rows"] for values in log.of("progress")] == [0, 50, 99]


def test_many_reports_become_few_and_the_last_value_arrives(log: Log, reporter: Reporter) -> None:
    for step in range(1000):
        reporter.metrics(step, {"loss": float(step), "even": step % 2 == 0} if step < 999 else {"loss": 999.0})
        log.now += 0.001
    reporter.finished(1000, None)
    sent = log.of("metrics")
    assert BURST <= len(sent) <= BURST + 6
    assert (sent[-1]["loss"], sent[-1]["even"]) == (999.0, 1)


def test_a_metric_that_had_to_wait_is_sent_with_a_later_commit(log: Log, reporter: Reporter) -> None:
    for value in range(BURST + 1):
        reporter.metrics(1, {"loss": value})
    log.now += 1
    reporter.committed(2, None)
    assert log.of("metrics")[-1] == {"step": 2, "loss": BURST}


def test_a_tensor_that_waits_is_what_it_was_when_reported(log: Log, reporter: Reporter) -> None:
    total = torch.tensor(1.0, requires_grad=True)
    for _ in range(BURST + 1):
        reporter.metrics(1, {"total": total})
    with torch.no_grad():
        total.zero_()
    reporter.finished(2, None)
    assert log.of("metrics")[-1]["total"] == 1.0


@pytest.mark.parametrize("value", [[1], torch.ones(2), None])
def test_what_is_no_single_value_is_refused_at_the_call(reporter: Reporter, value: object) -> None:
    with pytest.raises(TypeError, match="loss"):
        reporter.metrics(1, {"loss": value})
