"""The writer: when it writes, that what it writes stays as it was committed, and what failures cost."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import pytest
import torch

from spark_elastic.checkpoint import writer as writer_module
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.newest import load_checkpoint
from spark_elastic.checkpoint.writer import CheckpointWriter
from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import CheckpointFailed, CheckpointSuperseded, CheckpointWritten, Report
from spark_elastic.protocol.ticket import CheckpointPlan
from spark_elastic.worker.state.snapshot import SnapshotPair

R = TypeVar("R")
Best = tuple[str, Literal["min", "max"]]

LOSS: Best = ("val_loss", "min")


def buffers(snapshots: SnapshotPair) -> set[int]:
    return set(map(id, (snapshots.spare, snapshots.current, snapshots._third)))


class Job:
    """Commits ``{"weight": n, "step": n}`` as (1, n), and offers each commit to the writer."""

    def __init__(self, url: str, clock: SimpleNamespace) -> None:
        self.url, self.clock = url, clock
        self.snapshots = SnapshotPair()
        self.reports: list[Report] = []
        self.writers: list[CheckpointWriter] = []
        self.writer = self.new_writer()

    def new_writer(
        self, interval: float = 60.0, attempt: int | None = None, keep: int = 2, best: Best | None = None
    ) -> CheckpointWriter:
        number = CheckpointDirectory(self.url).claim() if attempt is None else attempt
        self.writer = CheckpointWriter(
            CheckpointPlan(self.url, number, interval, keep, best=best), self.reports.append, int
        )
        self.writers.append(self.writer)
        return self.writer

    def save(self, step: int) -> CommitId:
        objects = {"weight": torch.full((3,), float(step)), "step": step}
        self.snapshots.spare.take({"steps": step, "size": 1, "objects": objects}, None)
        self.snapshots.switch()
        return CommitId(1, step)

    def commit(self, step: int, durable: bool = False, settle: bool = True) -> None:
        made = self.save(step)
        if durable:
            self.writer.ask()
        if self.writer.is_due():
            self.writer.begin(made, self.snapshots)
        if settle:
            self.settle()

    def score(self, step: int, value: float, settle: bool = True) -> None:
        self.writer.score(CommitId(1, step), value, self.snapshots, lambda: False)
        if settle:
            self.settle()

    def commit_and_score(self, values: dict[int, float]) -> None:
        for step, value in values.items():
            self.commit(step)
            self.score(step, value)

    def finish(self, step: int, over: bool = False) -> None:
        self.writer.finish(CommitId(1, step), self.snapshots, lambda: over)

    def settle(self) -> None:
        self.writer.wait(lambda: False)

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def kept(self) -> list[int]:
        return [name.index for name in CheckpointDirectory(self.url).list().newest_first]

    def score_file(self, step: int) -> Path:
        (found,) = Path(self.url).glob(f"*-000001-{step:09d}/score.json")
        return found

    @property
    def written(self) -> list[int]:
        return [report.step for report in self.of(CheckpointWritten)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(writer_module, "time", clock)
    job = Job(str(tmp_path / "saved"), clock)
    yield job
    for writer in job.writers:
        writer._pool.shutdown()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A store whose writes wait for ``go``; ``begun`` says that one has come."""
    store = SimpleNamespace(begun=threading.Event(), go=threading.Event())
    write = CheckpointDirectory.write

    def wait(*arguments: Any) -> int:
        store.begun.set()
        store.go.wait()
        return write(*arguments)

    monkeypatch.setattr(CheckpointDirectory, "write", wait)
    yield store
    store.go.set()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A disk without room, until ``failing`` is False."""
    disk = SimpleNamespace(failing=True)
    write = CheckpointDirectory._write

    def fail(self: CheckpointDirectory, path: str, *others: Any) -> Any:
        if disk.failing and path.endswith("tensors.safetensors"):
            raise OSError(28, "No space left on device")
        return write(self, path, *others)

    monkeypatch.setattr(CheckpointDirectory, "_write", fail)
    return disk


# ---------------------------------------------------------------- when


def test_a_new_writer_writes_at_once_and_then_once_an_interval(job: Job) -> None:
    for step, now in enumerate([0, 1, 59, 60, 61, 119, 121], 1):
        job.clock.now = 100.0 + now
        job.commit(step)
    assert job.written == [1, 4, 7]


def test_an_interval_of_zero_writes_whenever_the_last_write_has_ended(job: Job) -> None:
    job.new_writer(interval=0.0)
    for step in (1, 2, 3):
        job.commit(step)
    assert job.written == [1, 2, 3]


def test_a_durable_commit_is_written_whatever_the_interval_says(job: Job) -> None:
    for step in (1, 2, 3):
        job.commit(step, durable=step == 2)
    assert job.written == [1, 2]


def test_a_durable_commit_during_a_write_has_the_first_one_after_it_written(job: Job, slow: SimpleNamespace) -> None:
    job.commit(1, settle=False)
    job.commit(2, durable=True, settle=False)
    slow.go.set()
    job.settle()
    job.commit(3)
    job.commit(4)
    assert job.written == [1, 3]


def test_the_last_two_are_kept(job: Job) -> None:
    for step in (1, 2, 3, 4):
        job.commit(step, durable=True)
    assert [name.index for name in CheckpointDirectory(job.url).list().newest_first] == [4, 3]


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_the_user_asks_for(job: Job, keep: int) -> None:
    job.new_writer(keep=keep)
    for step in (1, 2, 3, 4, 5):
        job.commit(step, durable=True)
    assert [name.index for name in CheckpointDirectory(job.url).list().newest_first] == [5, 4, 3][:keep]


# ---------------------------------------------------------------- the best


def test_the_best_ones_are_written_at_once_and_as_many_kept_as_of_the_newest(job: Job) -> None:
    job.new_writer(keep=2, best=LOSS)
    job.commit_and_score({1: 5.0, 2: 1.0, 3: 6.0, 4: 3.0})
    assert job.written == [1, 2, 4]  # the interval is not over
    for step in (5, 6, 7):
        job.commit(step, durable=True)
    assert job.kept == [7, 6, 4, 2]
    assert load_checkpoint(job.url, best=True)["step"] == 2
    assert load_checkpoint(job.url)["step"] == 7
    assert json.loads(job.score_file(2).read_text()) == {"metric": "val_loss", "mode": "min", "value": 1.0}


def test_of_a_metric_that_should_be_large_the_largest_is_kept(job: Job) -> None:
    job.new_writer(keep=1, best=("auc", "max"))
    job.commit_and_score({1: 0.5, 2: 0.7, 3: 0.6})
    job.commit(4, durable=True)
    assert job.kept == [4, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_number_is_no_score(job: Job, value: float, caplog: pytest.LogCaptureFixture) -> None:
    job.new_writer(best=LOSS)
    job.commit_and_score({1: value})
    assert not CheckpointDirectory(job.url).list().scored
    job.finish(1)
    assert "gave state.report no finite val_loss" in caplog.text


def test_a_run_that_adds_nothing_to_the_best_of_earlier_ones_is_not_warned(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.new_writer(best=LOSS)
    job.commit_and_score({1: 2.0})
    job.finish(1)
    job.new_writer(best=LOSS)
    job.finish(1)
    assert "no finite val_loss" not in caplog.text


def test_a_score_during_its_own_write_does_not_wait(job: Job, slow: SimpleNamespace) -> None:
    job.new_writer(best=LOSS)
    job.commit(1, settle=False)
    slow.begun.wait()
    job.score(1, 1.0, settle=False)
    slow.go.set()
    job.settle()
    assert job.written == [1]
    assert job.score_file(1).exists()


def test_a_score_during_an_older_write_waits_for_it_and_is_of_its_own_commit(job: Job, slow: SimpleNamespace) -> None:
    job.new_writer(best=LOSS)
    job.commit(1, settle=False)
    slow.begun.wait()
    job.commit(2, settle=False)
    scoring = threading.Thread(target=job.score, args=(2, 1.0))
    scoring.start()
    assert scoring.is_alive()
    slow.go.set()
    scoring.join()
    assert job.written == [1, 2]
    assert load_checkpoint(job.url, best=True)["step"] == 2


def test_a_later_writer_goes_on_comparing_with_the_best_so_far(job: Job) -> None:
    job.new_writer(keep=1, best=LOSS)
    job.commit_and_score({1: 5.0, 2: 1.0, 3: 4.0})
    job.new_writer(keep=1, best=LOSS)
    job.commit_and_score({4: 2.0, 5: 3.0})
    assert job.kept == [4, 2]
    assert load_checkpoint(job.url, best=True)["step"] == 2
    job.commit_and_score({6: 0.5})
    job.commit(7, durable=True)
    assert job.kept == [7, 6]


def test_of_two_reports_about_one_commit_the_better_one_counts(job: Job) -> None:
    job.new_writer(keep=2, best=LOSS)
    job.commit_and_score({1: 1.0})
    job.score(1, 5.0)
    assert json.loads(job.score_file(1).read_text())["value"] == 1.0
    job.commit_and_score({2: 3.0})
    job.score(2, 2.0)
    assert json.loads(job.score_file(2).read_text())["value"] == 2.0
    assert load_checkpoint(job.url, best=True)["step"] == 1


def test_a_later_writer_knows_all_of_the_best(job: Job) -> None:
    job.new_writer(keep=2, best=("auc", "max"))
    job.commit_and_score({1: 0.5, 2: 0.7})
    job.new_writer(keep=2, best=("auc", "max"))
    job.commit_and_score({3: 0.4, 4: 0.6})
    job.commit(5, durable=True)
    job.commit(6, durable=True)
    assert job.kept == [6, 5, 4, 2]


def test_scores_of_another_metric_are_not_compared(job: Job) -> None:
    job.new_writer(keep=1, best=("val_error", "min"))
    job.commit_and_score({1: 0.1})
    job.new_writer(keep=1, best=LOSS)
    job.commit_and_score({2: 9.0})
    job.commit(3, durable=True)
    assert job.kept == [3, 2]
    assert load_checkpoint(job.url, best=True)["step"] == 2


@pytest.mark.parametrize(
    "content", [b"", b'{"metric": "val_loss", "mode"', b"[1]", b'{"metric": "val_loss", "value": NaN}', b"\xff"]
)
def test_a_damaged_score_is_none_with_a_warning(job: Job, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    job.new_writer(keep=2, best=LOSS)
    job.commit_and_score({1: 2.0})
    job.score_file(1).write_bytes(content)
    job.new_writer(keep=2, best=LOSS)
    job.commit_and_score({2: 3.0})
    assert job.kept == [2, 1]  # still one of the newest two
    assert "score.json of checkpoint 000002-000001-000000001" in caplog.text
    job.commit(3, durable=True)
    job.commit(4, durable=True)
    assert job.kept == [4, 3, 2]
    assert load_checkpoint(job.url, best=True)["step"] == 2


def test_a_store_that_does_not_answer_costs_no_best_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.new_writer(keep=1, best=LOSS)
    job.commit_and_score({1: 1.0})

    def fail(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(CheckpointDirectory, "scores", fail)
        job.commit(2, durable=True)
    assert job.kept == [2, 1]
    assert "could not be removed" in caplog.text
    job.commit(3, durable=True)
    assert job.kept == [3, 1]


def test_a_damaged_best_checkpoint_gives_way_to_the_next_best(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.new_writer(keep=2, best=LOSS)
    job.commit_and_score({1: 2.0, 2: 1.0})
    (job.score_file(2).parent / "tensors.safetensors").write_bytes(b"?")
    assert load_checkpoint(job.url, best=True)["step"] == 1
    assert "it is skipped" in caplog.text
    (job.score_file(1).parent / "tensors.safetensors").write_bytes(b"?")
    with pytest.raises(DamagedError, match="all 2 checkpoints"):
        load_checkpoint(job.url, best=True)


def test_a_best_that_cannot_be_written_is_a_warning_and_a_later_one_is_kept(
    job: Job, full: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    job.new_writer(best=LOSS)
    job.save(1)
    job.score(1, 1.0)
    assert "with one of the best val_loss so far, 1.0, is not kept for that" in caplog.text
    full.failing = False
    job.save(2)
    job.score(2, 3.0)
    assert load_checkpoint(job.url, best=True)["step"] == 2


def test_without_a_score_there_is_no_best_to_load(job: Job) -> None:
    job.commit(1)
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint with a score; run\(checkpoint_best=\) keeps one"
    ):
        load_checkpoint(job.url, best=True)


# ---------------------------------------------------------------- what


def test_commits_go_on_during_a_write_and_it_holds_what_was_committed(job: Job, slow: SimpleNamespace) -> None:
    job.commit(1, settle=False)
    slow.begun.wait()
    for step in (2, 3, 4, 5):
        job.commit(step, settle=False)
    slow.go.set()
    job.settle()
    saved = load_checkpoint(job.url)
    assert (saved["step"], saved["weight"].tolist()) == (1, [1.0] * 3)
    assert job.snapshots.current.content()["objects"]["step"] == 5


def test_a_third_buffer_is_made_only_when_a_commit_needs_it_and_kept(job: Job, slow: SimpleNamespace) -> None:
    job.commit(1, settle=False)
    assert job.snapshots._third is None
    job.commit(2, settle=False)
    assert job.snapshots._third is None
    job.commit(3, settle=False)
    assert job.snapshots._third is not None
    before = buffers(job.snapshots)
    slow.go.set()
    job.settle()
    for step in (4, 5, 6, 7):
        job.commit(step, durable=True, settle=False)
        job.commit(step, settle=False)
        assert buffers(job.snapshots) == before
        job.settle()


# ---------------------------------------------------------------- failures


def test_a_full_disk_is_a_warning_and_an_event_and_later_commits_try_again(
    job: Job, full: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit(1)
    assert "No space left on device" in caplog.text
    assert job.of(CheckpointFailed) == [
        CheckpointFailed("000001-000001-000000001", 1, "OSError: [Errno 28] No space left on device")
    ]
    assert not CheckpointDirectory(job.url).list().partial
    job.commit(2)
    assert len(job.of(CheckpointFailed)) == 1  # not in the same second
    job.clock.now += 1
    job.commit(3)
    assert len(job.of(CheckpointFailed)) == 2
    full.failing = False
    job.clock.now += 2
    job.commit(4)
    assert job.written == [4]


def test_failures_are_tried_again_at_the_interval_at_the_latest(job: Job, full: SimpleNamespace) -> None:
    job.new_writer(interval=0.0)
    for step in (1, 2, 3):
        job.commit(step)
    assert len(job.of(CheckpointFailed)) == 3


def test_an_object_that_cannot_be_pickled_fails_the_write_and_not_the_training(job: Job) -> None:
    job.snapshots.spare.take({"steps": 1, "size": 1, "objects": {}}, None)
    job.snapshots.spare.skeleton["objects"]["lock"] = threading.Lock()
    job.snapshots.switch()
    job.writer.begin(CommitId(1, 1), job.snapshots)
    job.settle()
    assert "pickle" in job.of(CheckpointFailed)[0].error


def test_a_superseded_writer_says_so_once_and_writes_no_more(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.commit(1)
    CheckpointDirectory(job.url).claim()
    for step in (2, 3):
        job.commit(step, durable=True)
    job.finish(3)
    assert job.written == [1]
    assert len(job.of(CheckpointSuperseded)) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_writer_that_is_superseded_before_it_removes_older_ones_says_that_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complete = CheckpointDirectory.complete

    def late(self: CheckpointDirectory, *what: Any) -> int:
        written = complete(self, *what)
        CheckpointDirectory(job.url).claim()
        return written

    with monkeypatch.context() as claiming:
        claiming.setattr(CheckpointDirectory, "complete", late)
        job.commit(1)
    job.commit(2, durable=True)
    job.finish(2)
    assert job.written == [1]
    assert len(job.of(CheckpointSuperseded)) == 1
    assert ["writes no more checkpoints there" in message for message in caplog.messages] == [True]


def test_a_writer_on_a_machine_that_sees_another_place_says_so(job: Job) -> None:
    job.new_writer(attempt=7)
    job.commit(1)
    assert "all machines share" in job.of(CheckpointFailed)[0].error


# ---------------------------------------------------------------- the end


def test_the_end_waits_until_the_last_commit_is_written(job: Job) -> None:
    for step in (1, 2, 3):
        job.commit(step, settle=False)
    job.finish(3)
    assert job.written == [1, 3]
    assert load_checkpoint(job.url)["step"] == 3


def test_what_was_removed_with_the_directory_is_not_what_the_next_run_finds(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit(1)
    shutil.rmtree(job.url)
    job.save(2)
    job.finish(2)
    assert job.written == [1]
    assert "the directory was removed while the job ran" in caplog.text
    assert "the next run finds none of this run" in caplog.text


def test_the_end_writes_nothing_twice(job: Job) -> None:
    job.commit(1)
    job.finish(1)
    assert job.written == [1]


def test_the_end_writes_nothing_that_was_restored(job: Job) -> None:
    job.commit(1)
    writer = job.new_writer()
    assert writer.restore(torch.device("cpu")).steps == 1
    job.save(1)
    job.finish(1)
    assert job.written == [1]


def test_the_end_gives_up_on_a_store_that_stands_still(
    job: Job, slow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "STALL_SECONDS", 0.0)
    job.commit(1, settle=False)
    job.finish(1)
    assert "the job's last commit could not be written" in caplog.text
    assert "the next run finds none of this run" in caplog.text


def test_the_end_of_a_broken_world_does_not_wait(job: Job, slow: SimpleNamespace) -> None:
    job.commit(1, settle=False)
    job.save(2)
    job.finish(2, over=True)
    assert not job.written


def test_secrets_of_the_url_are_in_no_event_and_in_no_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = Job(f"memory://AK:S3/CRET@{secrets.token_hex(4)}/x", job.clock)
    secret.new_writer(best=LOSS)
    job.writers += secret.writers
    url = secret.url

    def refuse(*arguments: Any, **others: Any) -> Any:
        raise OSError(f"no access to {url}, bucket AK:S3")

    for name in ("write", "prune", "scores"):
        monkeypatch.setattr(CheckpointDirectory, name, refuse)
    secret.commit(1)
    secret.score(1, 0.5)
    secret.finish(2)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "load_newest", refuse)
        patch.setattr(job.clock, "sleep", lambda seconds: None, raising=False)
        with pytest.raises(OSError, match="no access"):
            secret.writer.restore(torch.device("cpu"))
    told = [each.error for each in secret.of(CheckpointFailed)]
    assert told
    for text in (*told, *caplog.messages):
        assert "S3" not in text
    assert sum("…@" in text for text in caplog.messages) >= 4
