"""What is wished of a checkpoint, how a directory is claimed for it, and what a job's workers are given."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import msgspec
import pytest
from checkpoint_stage import SECRET_URL

from spark_elastic.checkpoint.best import Metric
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.driver.driver_place import CheckpointWish, begin_job
from spark_elastic.driver.event_log import EventLog
from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import CheckpointError
from spark_elastic.protocol.records import Entry, JobStarted
from spark_elastic.protocol.ticket import CheckpointPlan, Payload


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "saved")


def test_what_a_store_says_is_told_without_the_secrets_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CheckpointDirectory) -> None:
        raise PermissionError("bucket AK:S3 refuses")

    monkeypatch.setattr(CheckpointDirectory, "try_to_write", refuse)
    with pytest.raises(CheckpointError, match="cannot be written: PermissionError: bucket … refuses") as raised:
        CheckpointWish(SECRET_URL, 1.0).check()
    assert "S3" not in str(raised.value)


def test_a_run_keeps_as_many_checkpoints_as_it_was_told_to(url: str) -> None:
    assert CheckpointWish(url, 0.0, keep=3).claim() == CheckpointPlan(url, 1, 0.0, keep=3)


def test_each_claim_is_another_attempt_and_a_check_is_none(url: str) -> None:
    wish = CheckpointWish(url, 0.0)
    wish.check()
    assert [wish.claim().attempt, wish.claim().attempt] == [1, 2]
    wish.check()
    assert wish.claim().attempt == 3


def test_workers_get_the_options_and_the_metric_that_the_user_has_given() -> None:
    plan = CheckpointWish("memory://bucket/job", 5.0, {"skip_instance_cache": True}, best=Metric("acc", "max")).claim()
    assert cloudpickle.loads(plan.storage_options) == {"skip_instance_cache": True}
    assert plan.best == ("acc", "max")


def begin(wish: CheckpointWish | None) -> tuple[list[Entry], Payload]:
    entries: list[Entry] = []
    settings = JobSettings(min_np=1, num_proc=2, max_np=3, form_timeout=7.0, elastic=wish is not None)
    with EventLog(None, [entries.append]) as log:
        encoded = begin_job(log, "run", settings, b"call", (), wish, "application")
    return entries, msgspec.msgpack.decode(encoded, type=Payload)


def test_a_job_begins_with_its_sizes_in_the_log_and_its_workers_get_the_call() -> None:
    (first,), payload = begin(None)
    assert first.record == JobStarted("run", min_np=1, num_proc=2, max_np=3, attempt=None, application="application")
    assert payload == Payload(b"call", 7.0, 3, elastic=False)


def test_a_job_with_a_checkpoint_names_the_same_attempt_in_the_log_and_to_its_workers(url: str) -> None:
    begin(CheckpointWish(url, 0.0))
    (first,), payload = begin(CheckpointWish(url, 0.0))
    assert isinstance(first.record, JobStarted)
    assert payload.checkpoint is not None
    assert first.record.attempt == payload.checkpoint.attempt == 2


def test_no_job_is_told_to_have_begun_where_its_checkpoint_cannot_be_claimed() -> None:
    entries: list[Entry] = []
    with EventLog(None, [entries.append]) as log, pytest.raises(CheckpointError, match="cannot be opened"):
        begin_job(log, "run", JobSettings(), b"call", (), CheckpointWish("odd://bucket", 1.0), "application")
    assert entries == []
