"""Reporter: metrics and progress reach the driver, and few messages do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
import torch

from spark_elastic.protocol.reports import Entered, GpuUsed, Metrics, Progress, Report, Stepped
from spark_elastic.worker.gpu import use_of_gpu
from spark_elastic.worker.reporting import BURST, Reporter, check_metrics

R = TypeVar("R")


class Log:
    """What was sent, on a clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[Report] = []

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.sent if isinstance(report, kind)]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def reporter(log: Log) -> Reporter:
    return Reporter(log.sent.append, lambda: log.now)


def test_a_survivor_says_how_long_it_was_idle_and_a_newcomer_does_not(log: Log, reporter: Reporter) -> None:
    reporter.entered(0, None)
    log.now += 3
    reporter.committed(1, None)
    log.now += 0.25
    reporter.entered(1, Progress)
    assert log.of(Entered) == [Entered(0), Entered(1, idle=0.25)]
    assert log.of(Progress) == [Progress(1)]


def test_the_first_commit_of_each_generation_is_told(log: Log, reporter: Reporter) -> None:
    for first in (0, 2):
        reporter.entered(first, None)
        reporter.committed(first + 1, None)
        reporter.committed(first + 2, None)
    assert log.of(Stepped) == [Stepped(1), Stepped(3)]


def test_progress_is_sent_twice_a_second_and_at_the_end(log: Log, reporter: Reporter) -> None:
    for step in range(100):
        reporter.committed(step, Progress)
        log.now += 0.01
    reporter.finished(99, Progress)
    assert log.of(Progress) == [Progress(0), Progress(50), Progress(99)]


def test_how_far_a_rank_has_come_is_told_when_its_code_raises(log: Log, reporter: Reporter) -> None:
    def progress(step: int) -> Progress:
        return Progress(step, 0, 10 * step, 1000)

    for step in range(1, BURST + 11):
        reporter.metrics(step - 1, {"loss": float(step)})
        reporter.committed(step, progress)
    reporter.left_early()
    assert log.of(Progress) == [progress(1), Progress(BURST + 10)]
    assert log.of(Metrics)[-1].values["loss"] == BURST + 10
    told = len(log.sent)
    reporter.left_early()
    assert len(log.sent) == told


class OnFailedGpu(torch.Tensor):
    def item(self) -> float:
        raise RuntimeError("CUDA error")


def test_a_value_that_cannot_be_read_after_an_error_is_left_out(log: Log, reporter: Reporter) -> None:
    for step in range(BURST + 1):
        reporter.metrics(step, {"loss": torch.zeros(()).as_subclass(OnFailedGpu) if step == BURST else 0.0})
    reporter.left_early()
    assert len(log.of(Metrics)) == BURST


def test_what_a_worker_uses_of_its_gpu_is_told_every_five_seconds_and_more_seldom_in_large_and_long_jobs(
    log: Log,
) -> None:
    readings = iter(range(10_000))
    reporter = Reporter(log.sent.append, lambda: log.now, lambda: GpuUsed(next(readings), 50))

    def told_in(seconds: int, workers: int) -> int:
        before = len(log.of(GpuUsed))
        reporter.entered(0, None, workers)
        for step in range(seconds):
            log.now += 1
            reporter.committed(step, None)
        return len(log.of(GpuUsed)) - before

    assert told_in(400, 20) == 80
    assert told_in(400, 80) == 20
    log.now += 100_000
    assert told_in(10_000, 1) <= 11
    assert [used.memory for used in log.of(GpuUsed)] == list(range(len(log.of(GpuUsed))))


def test_a_worker_without_a_gpu_tells_nothing_of_it(log: Log) -> None:
    Reporter(log.sent.append, lambda: log.now, use_of_gpu).committed(1, None)
    assert log.of(GpuUsed) == []


def test_many_reports_become_few_and_the_last_value_arrives(log: Log, reporter: Reporter) -> None:
    for step in range(1000):
        reporter.metrics(step, {"loss": float(step), "even": step % 2 == 0} if step < 999 else {"loss": 999.0})
        log.now += 0.001
    reporter.finished(1000, None)
    sent = [metrics.values for metrics in log.of(Metrics)]
    assert BURST <= len(sent) <= BURST + 6
    last = {name: value for values in sent for name, value in values.items()}
    assert (last["loss"], last["even"]) == (999.0, 1)


def test_a_metric_that_had_to_wait_is_sent_with_a_later_commit(log: Log, reporter: Reporter) -> None:
    for value in range(BURST + 1):
        reporter.metrics(1, {"loss": value})
    log.now += 1
    reporter.committed(2, None)
    assert log.of(Metrics)[-1] == Metrics({"step": 1, "loss": BURST})


def test_a_metric_that_waits_keeps_the_step_at_which_it_was_reported(log: Log, reporter: Reporter) -> None:
    for step in range(BURST + 10):
        reporter.metrics(step, {"loss": step, "val_loss": 0.5} if step == BURST + 2 else {"loss": step})
    reporter.finished(100, None)
    assert log.of(Metrics)[-2:] == [
        Metrics({"step": BURST + 2, "val_loss": 0.5}),
        Metrics({"step": BURST + 9, "loss": BURST + 9}),
    ]


def test_what_waits_is_sent_once_when_the_users_function_has_returned(log: Log, reporter: Reporter) -> None:
    for value in range(BURST + 5):
        reporter.metrics(1, {"loss": value})
    for _ in range(2):
        reporter.flush()
    assert log.of(Metrics)[BURST:] == [Metrics({"step": 1, "loss": BURST + 4})]


def test_a_name_that_utf8_cannot_encode_is_sent_with_escapes_as_values_are(log: Log, reporter: Reporter) -> None:
    reporter.metrics(1, {"rows/caf\udce9.csv": "caf\udce9"})
    assert log.of(Metrics) == [Metrics({"step": 1, "rows/caf\\udce9.csv": "caf\\udce9"})]


def test_a_script_that_makes_no_commits_was_not_idle_while_it_ran(log: Log, reporter: Reporter) -> None:
    reporter.entered(0, None)
    reporter.committed(0, None)
    log.now += 3600
    reporter.worked()
    log.now += 0.5
    reporter.entered(0, None)
    assert log.of(Entered)[-1].idle == 0.5


def test_a_tensor_that_waits_is_what_it_was_when_reported(log: Log, reporter: Reporter) -> None:
    total = torch.tensor(1.0, requires_grad=True)
    for _ in range(BURST + 1):
        reporter.metrics(1, {"total": total})
    with torch.no_grad():
        total.zero_()
    reporter.finished(2, None)
    assert log.of(Metrics)[-1].values["total"] == 1.0


@pytest.mark.parametrize(
    "value",
    [
        [1],
        torch.ones(2),
        None,
        1j,
        torch.tensor(1j),
        torch.ones(1, device="meta"),
        torch.ones(1, 1).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(1)]),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        np.complex64(1),
        np.datetime64("2020"),
        np.datetime64(1, "ns"),
        np.timedelta64(1, "ns"),
        np.array([None]),
        np.array([10**400]),
        np.zeros(1, dtype=[("a", int)]),
        10**400,
        SimpleNamespace(item=lambda: 1.0),
    ],
)
def test_what_is_no_single_number_is_refused_at_the_call_in_a_job_and_outside(
    reporter: Reporter, value: object
) -> None:
    for report in (lambda: reporter.metrics(1, {"loss": value}), lambda: check_metrics({"loss": value})):
        with pytest.raises(TypeError, match="loss"):
            report()
    reporter.metrics(1, {"loss": 1.0})


@pytest.mark.parametrize(
    "value",
    [
        np.longdouble(1),
        np.array([1], dtype=object),
        np.float16(1),
        torch.ones(1).to_sparse(),
        torch.ones(1).bfloat16(),
        True,
    ],
)
def test_single_numbers_of_any_kind_are_sent(log: Log, reporter: Reporter, value: object) -> None:
    reporter.metrics(1, {"loss": value})
    assert log.of(Metrics)[-1].values["loss"] == 1
