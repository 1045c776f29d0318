"""LoggerFeed: what of a job's events reaches loggers, and that none of them can harm the job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from threads import find_thread

from spark_elastic.driver import logger_feed
from spark_elastic.driver.logger_feed import LoggerFeed
from spark_elastic.loggers import Logger
from spark_elastic.protocol.records import Entry, JobFinished, JobStarted, WorkerReported, WorldBroken, WorldForming
from spark_elastic.protocol.reports import Entered, Metrics


class Noted(Logger):
    """Notes what it is called with, and raises where it is told to."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.fails, self.calls = fails, []  # type: tuple[str, list[Any]]
        self.error = error or ValueError("mine")

    def start(self, resumes: str | None) -> None:
        self._note("start", resumes)

    def named(self, run_id: str) -> None:
        self._note("named", run_id)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._note("log", step, dict(values), seconds)

    def finish(self, error: str | None) -> None:
        self._note("finish", error)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise self.error


BROKEN = Entry(9.0, WorldBroken(1, "rank 1 was lost"))


def metrics(rank: int | None, time: float = 1.0, generation: int = 1, **values: float | int | str) -> Entry:
    return Entry(time, WorkerReported(7, rank, generation, Metrics(values)))


def entered(rank: int, step: int) -> Entry:
    return Entry(8.0, WorkerReported(7, rank, 1, Entered(step)))


def started(run_id: str) -> Entry:
    return Entry(9.0, JobStarted(run_id, min_np=1, num_proc=2, max_np=4, attempt=None, application="app"))


def formed(size: int) -> Entry:
    return Entry(9.0, WorldForming(1, size, 0, [], None))


def test_rank_0s_numbers_world_sizes_and_resets_are_logged_by_the_number_of_commits() -> None:
    noted = Noted()
    with LoggerFeed([noted], "/data/run") as feed:
        feed.see(started("abc"))
        feed.see(formed(4))
        feed.see(entered(1, step=0))
        feed.see(entered(0, step=0))
        feed.see(metrics(0, step=3, loss=0.5, phase="warm-up", epoch=1))
        feed.see(metrics(1, step=3, loss=0.5))
        feed.see(metrics(None, step=0, loss=0.5))
        feed.see(BROKEN)
        feed.see(Entry(9.0, JobFinished([7], resets=1)))
    assert noted.calls == [
        ("start", "/data/run"),
        ("named", "abc"),
        ("log", 0, {"job/world_size": 4.0}, 8.0),
        ("log", 3, {"loss": 0.5, "epoch": 1.0}, 1.0),
        ("log", 3, {"job/resets": 1.0}, 9.0),
        ("finish", None),
    ]


def test_what_the_driver_tells_of_a_resumed_job_has_the_step_at_which_it_goes_on() -> None:
    noted = Noted()
    with LoggerFeed([noted], "/data/run") as feed:
        feed.see(formed(4))
        feed.see(BROKEN)
        feed.see(formed(3))
        feed.see(entered(0, step=40))
    assert noted.calls[1] == ("log", 40, {"job/world_size": 3.0, "job/resets": 1.0}, 8.0)


def test_a_job_that_falls_back_to_a_checkpoint_still_tells_its_resets_and_sizes() -> None:
    noted = Noted()
    with LoggerFeed([noted], "/data/run") as feed:
        for size, step in ((4, 40), (3, 20)):
            feed.see(formed(size))
            feed.see(entered(0, step))
        feed.see(metrics(0, step=21, loss=0.5))
    assert [call[1:3] for call in noted.calls if call[0] == "log"] == [
        (40, {"job/world_size": 4.0}),
        (40, {"job/world_size": 3.0}),
        (21, {"loss": 0.5}),
    ]


def test_what_is_done_again_is_not_logged_again_and_a_value_may_come_twice_at_a_step() -> None:
    noted = Noted()
    with LoggerFeed([noted], None) as feed:
        for step, loss in ((4, 4.0), (5, 5.0), (4, 4.5), (5, 5.5), (6, 6.0)):
            feed.see(metrics(0, step=step, loss=loss))
        feed.see(metrics(0, step=5, accuracy=0.5))
    logged = [call[1:3] for call in noted.calls if call[0] == "log"]
    assert logged == [
        *((step, {"loss": loss}) for step, loss in ((4, 4.0), (5, 5.0), (5, 5.5), (6, 6.0))),
        (5, {"accuracy": 0.5}),
    ]


def test_the_step_that_was_under_way_when_a_world_broke_is_logged_once() -> None:
    noted = Noted()
    with LoggerFeed([noted], None) as feed:
        for generation, step in ((1, 2), (1, 3), (2, 3), (2, 4)):
            feed.see(metrics(0, generation=generation, step=step, loss=float(generation)))
        feed.see(metrics(0, generation=2, step=3, accuracy=0.5))
    logged = [call[1:3] for call in noted.calls if call[0] == "log"]
    assert logged == [(2, {"loss": 1.0}), (3, {"loss": 1.0}), (4, {"loss": 2.0}), (3, {"accuracy": 0.5})]


def test_of_a_step_with_many_values_those_that_had_not_been_logged_before_a_loss_are_logged_after_it() -> None:
    noted = Noted()
    with LoggerFeed([noted], None) as feed:
        for generation, values in ((1, (0.1, 0.2)), (2, (0.1,)), (3, (0.1, 0.2, 0.3))):
            for value in values:
                feed.see(metrics(0, generation=generation, step=1, loss=value))
    assert [call[2]["loss"] for call in noted.calls if call[0] == "log"] == [0.1, 0.2, 0.3]


def test_a_function_without_commits_is_logged_when_it_runs_again() -> None:
    noted = Noted()
    with LoggerFeed([noted], None) as feed:
        for generation in (1, 2):
            feed.see(metrics(0, generation=generation, step=0, loss=float(generation)))
    assert [call[1:3] for call in noted.calls if call[0] == "log"] == [(0, {"loss": 1.0}), (0, {"loss": 2.0})]


def test_the_error_of_the_job_is_what_loggers_end_with() -> None:
    noted = Noted()
    with pytest.raises(RuntimeError), LoggerFeed([noted], None):
        raise RuntimeError("out of hosts")
    assert noted.calls[-1] == ("finish", "RuntimeError: out of hosts")


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit()])
@pytest.mark.parametrize("fails", ["named", "log", "finish"])
def test_a_logger_that_raises_is_left_out_and_told_of_and_the_others_go_on(
    fails: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Noted(fails, error), Noted()
    with caplog.at_level(logging.ERROR), LoggerFeed([bad, good], None) as feed:
        feed.see(started("abc"))
        feed.see(metrics(0, step=1, loss=1.0))
        feed.see(metrics(0, step=2, loss=2.0))
    assert fails in [call[0] for call in bad.calls]
    assert [call[0] for call in bad.calls].count("finish") == 1, "what it holds is let go"
    assert bad.calls[-1][0] == "finish"
    assert [call[0] for call in good.calls] == ["start", "named", "log", "log", "finish"]
    assert [record.getMessage() for record in caplog.records] == [
        "Noted raised; it is not called any more, the job goes on"
    ]


def test_a_logger_that_cannot_start_ends_those_before_it_and_is_the_callers_error() -> None:
    first, bad, never = Noted(), Noted("start"), Noted()
    with pytest.raises(ValueError, match="mine"), LoggerFeed([first, bad, never], None):
        pass
    assert [first.calls, never.calls] == [[("start", None), ("finish", "ValueError: mine")], []]


class Blocks(Noted):
    """Blocks in its first ``log`` until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self.inside.set()
        assert self.go_on.wait(30)
        super().log(step, values, seconds)


def test_the_end_does_not_wait_for_a_logger_that_blocks_which_ends_once_it_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger_feed, "END_SECONDS", 0.1)
    blocks = Blocks()
    with LoggerFeed([blocks], None) as feed:
        feed.see(metrics(0, step=1, loss=1.0))
        assert blocks.inside.wait(30)
        thread = find_thread("spark_elastic-loggers")
        for step in range(2, 50):
            feed.see(metrics(0, step=step, loss=float(step)))
    assert blocks.calls == [("start", None)]
    assert "loggers have not ended" in caplog.text
    blocks.go_on.set()
    thread.join(30)
    assert [call[1] for call in blocks.calls if call[0] == "log"] == [1, 49], "the last value is not lost"
    assert blocks.calls[-1] == ("finish", None)


def test_a_slow_logger_gets_the_newest_values_and_the_backlog_stays_small(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger_feed, "WAITING_LIMIT", 20)
    blocks = Blocks()
    with LoggerFeed([blocks], None) as feed:
        feed.see(metrics(0, step=1, loss=1.0))
        assert blocks.inside.wait(30)
        feed.see(metrics(0, step=2, accuracy=0.5))
        for step in range(3, 500):
            feed.see(metrics(1, step=step, loss=-1.0))
            feed.see(metrics(0, step=step, loss=float(step)))
            assert len(feed._waiting) < 20
        blocks.go_on.set()
    logged = [call[1:3] for call in blocks.calls if call[0] == "log"]
    assert logged[:2] == [(1, {"loss": 1.0}), (2, {"accuracy": 0.5})]
    assert logged[-1] == (499, {"loss": 499.0})
    assert caplog.text.count("values are left out") == 1


@pytest.mark.parametrize("loggers", ["tensorboard", Noted(), None])
def test_what_is_no_list_is_refused(loggers: Any) -> None:
    with pytest.raises(TypeError, match="loggers must be a list of loggers, not "):
        LoggerFeed(loggers, None)


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(TypeError, match="<built-in function print> is not a logger"):
        LoggerFeed([print], None)  # type: ignore[list-item]
