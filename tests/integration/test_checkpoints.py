"""Durable checkpoints: a job goes on after the loss of its driver, of its writer, of its newest checkpoint, of everything."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from data_jobs import EPOCHS, ROWS, STEPS
from jobs import check
from other_processes import wait_until

import spark_elastic
from spark_elastic import CheckpointError, TrainingFailedError, load_checkpoint, load_model
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.launchers.local import LocalSlots
from spark_elastic.testing import Point, kill


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def wait_for_event(log: Path, kind: str, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: log.exists() and f'"{kind}"' in log.read_text(), f"{kind} in {log}", process)


def test_after_the_drivers_death_the_same_call_goes_on_and_counts_every_row_once(
    script: Any, run: Any, dataset: str, tmp_path: Path
) -> None:
    (tmp_path / "dataset").write_text(dataset)
    first = script("local[2]", "checkpointed")
    for kind in ("fault_injected", "checkpoint_written"):
        wait_for_event(tmp_path / "checkpointed" / "log", kind, first)
    first.kill()
    steps = []
    for _ in range(2):  # the second of these has nothing left to do
        result = run(
            training.count_rows, dataset, ROWS, EPOCHS, {"global_batch_size": 64}, min_np=2, max_np=2,
            checkpoint=tmp_path / "checkpointed" / "saved",
        )  # fmt: skip
        steps.append(result.of("checkpoint_restored")[0]["values"]["step"])
        for entry in result.results:
            assert entry["seen"] == pytest.approx([EPOCHS] * ROWS)
            assert entry["val"] == pytest.approx(EPOCHS * ROWS)
    assert 0 < steps[0] <= 10  # rank 0 may have made the commit at which rank 1 got stuck
    assert steps[1] == EPOCHS * STEPS


def test_another_rank_writes_on_and_a_damaged_checkpoint_is_passed_over(run: Any, tmp_path: Path) -> None:
    place = {"storage_options": {"path": str(tmp_path), "target_protocol": "file"}}
    durable = {"checkpoint": "dir://", "checkpoint_interval": 0, "min_np": 1, "max_np": 2, "num_proc": 2, **place}
    told = tmp_path / "told"

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint_written":
            told.touch()

    result = run(
        training.count_steps, 30, 0.02, kwargs={"held": (14, str(tmp_path), told.name)}, faults=[kill(rank=0, step=15)],
        on_event=tell, **durable,
    )  # fmt: skip
    told.unlink()
    check(result, 30)
    written = result.of("checkpoint_written")
    assert len({event["worker"] for event in written}) == 2
    assert {event["rank"] for event in written} == {0}
    assert len(checkpoints(tmp_path)) == 2

    saved = load_checkpoint("dir://", **place)
    assert saved["step"] == 30
    assert saved["model"]["counter"].item() == 30
    assert saved["optimizer"]["param_groups"][0]["lr"] == 1.0

    tensors = checkpoints(tmp_path)[-1] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    again = run(training.count_steps, 40, 0.02, **durable)
    check(again, 40)
    assert again.of("checkpoint_damaged")[0]["values"]["name"] == tensors.parent.name
    restored = again.of("checkpoint_restored")[0]["values"]
    assert restored["step"] < 30
    sizes = {event["generation"]: event["size"] for event in result.of("world_formed")}
    writers = sizes[int(restored["name"].split("-")[1])]
    assert [entry["resets"][0] for entry in again.results] == [(writers, 2)] * 2


def test_a_job_whose_workers_are_all_lost_goes_on_from_its_checkpoint(run: Any, tmp_path: Path) -> None:
    result = run(
        training.count_steps, 30, 0.02, kwargs={"held": (19, str(tmp_path), "*/manifest.json")},
        faults=[kill(rank=0, step=20)], checkpoint=tmp_path, min_np=1, max_np=1,
    )  # fmt: skip
    check(result, 30)
    assert len(result.of("state_lost")) == 1
    assert result.of("checkpoint_restored")[0]["values"]["step"] == 1  # the interval is a minute


@pytest.mark.parametrize("commit", ["copy", "in_place", "sharded"])
def test_a_sync_by_user_code_gives_ranks_equal_values_and_takes_no_step_back(
    run: Any, tmp_path: Path, commit: str
) -> None:
    """It restored the durable checkpoint in each call, and a slow rank read what was sent by the call after it."""
    run(training.sync_by_hand, commit, 3, min_np=3, max_np=3, checkpoint=tmp_path)
    result = run(
        training.sync_by_hand, commit, 9, min_np=3, max_np=3, checkpoint=tmp_path, checkpoint_interval=1000.0,
        faults=[kill(rank=1, step=6)],
    )  # fmt: skip
    assert len(result.of("world_broken")) == 1
    for each in result.results:
        steps = [step for _, step in each["found"]]
        assert steps == sorted(set(steps))
        assert steps[-3:] == [7, 8, 9]
        assert each["weights"] == result.results[0]["weights"]


def test_the_best_is_kept_through_a_kill_and_by_runs_that_go_on(run: Any, tmp_path: Path) -> None:
    def best() -> float:
        return load_model(str(tmp_path), torch.nn.Linear(1, 1, bias=False), best=True).weight.item()

    settings = {
        "checkpoint": tmp_path, "checkpoint_interval": 0, "checkpoint_keep": 1, "checkpoint_best": "val_loss",
        "min_np": 1, "max_np": 2, "num_proc": 2,
    }  # fmt: skip
    losses = [5.0, 1.0, 4.0, 3.0]
    result = run(training.keep_best, losses, str(tmp_path), faults=[kill(rank=0, step=3)], **settings)
    assert len(result.of("world_broken")) == 1
    assert {entry["weight"] for entry in result.results} == {4.0}
    assert best() == 2.0
    assert load_checkpoint(tmp_path)["epoch"] == 4
    assert len(checkpoints(tmp_path)) == 2

    for more, kept in ([2.0, 1.5], 2.0), ([0.5, 0.7], 7.0):
        losses += more
        run(training.keep_best, losses, str(tmp_path), **settings)
        assert best() == kept
        assert load_checkpoint(tmp_path)["epoch"] == len(losses)
        assert len(checkpoints(tmp_path)) == 2


def test_the_best_is_kept_where_rank_0_is_lost_before_it_has_begun_to_write_it(run: Any, tmp_path: Path) -> None:
    result = run(
        training.commit_after_rank_1, [5.0, 1.0, 4.0], min_np=1, max_np=2, num_proc=2,
        faults=[kill(rank=0, step=2, at=Point.RECORDED)],
        checkpoint=tmp_path / "kept", checkpoint_interval=1000, checkpoint_keep=1, checkpoint_best="val_loss",
    )  # fmt: skip
    assert set(result.results) == {3.0}
    assert len(result.of("world_broken")) == 1
    best = load_model(str(tmp_path / "kept"), torch.nn.Linear(1, 1, bias=False), best=True)
    assert best.weight.item() == 2.0


def test_a_script_that_was_changed_is_told_which_settings_go_on(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"checkpoint": tmp_path, "min_np": 1, "max_np": 1}
    run(training.with_optimizer, "SGD", {"lr": 0.5}, **settings)
    changed = run(training.with_optimizer, "SGD", {"lr": 0.1}, **settings)
    assert changed.results == [0.5]
    assert "state.optimizer has lr=0.5 as saved, not 0.1 as given here" in capfd.readouterr().err
    with pytest.raises(TrainingFailedError, match="is that of SGD, and it is Adam here"):
        run(training.with_optimizer, "Adam", {"lr": 0.1}, **settings)


def test_a_checkpoint_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/below' cannot be written: NotADirectoryError"):
        spark_elastic.run(training.plain, args=(1,), checkpoint=tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"driver_port": None}, "driver_port"),
        ({"max_np": 2, "num_proc": 3}, "max_np"),
        ({"host_discovery_script": "/bin/false"}, "failed with code 1"),
    ],
)
def test_a_run_that_is_refused_leaves_the_checkpoint_to_the_job_that_writes_there(
    wrong: dict[str, Any], told: str, tmp_path: Path
) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    attempt = directory.claim()
    with socket.create_server(("", 0)) as taken:
        wrong = {name: taken.getsockname()[1] if value is None else value for name, value in wrong.items()}
        with pytest.raises((spark_elastic.SparkElasticError, ValueError, TypeError), match=told):
            spark_elastic.run(training.plain, args=(1,), local=True, checkpoint=tmp_path, **wrong)
    assert [claim.attempt for claim in directory.check_claim(attempt).claims] == [attempt]


def test_a_job_that_cannot_start_its_slots_has_an_end_in_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_processes(self: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(LocalSlots, "__enter__", no_more_processes)
    events: list[dict[str, Any]] = []
    with pytest.raises(OSError, match="no more processes"):
        spark_elastic.run(training.plain, args=(1,), local=True, num_proc=1, on_event=events.append)
    assert [event["event"] for event in events] == ["job_started", "job_failed"]
