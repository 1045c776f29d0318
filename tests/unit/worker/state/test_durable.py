"""Which commits of a state are written to durable checkpoints, by which rank, and with which score."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from trained_state import step, trained, values
from worker_stage import Stage, on_writing_stage

from spark_elastic import DistributedDataParallel, load_checkpoint
from spark_elastic.checkpoint.best import Metric
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.writer import CheckpointWriter
from spark_elastic.driver.driver_place import CheckpointWish
from spark_elastic.errors import CheckpointError
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "saved")


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_writing_stage() as stage:
        yield stage


def test_a_metric_is_about_the_last_commit_unless_an_optimizer_has_stepped_since(stage: Stage, url: str) -> None:
    state = best_run(stage, url, trained())
    DistributedDataParallel(state.model)
    step(state)
    state.commit()
    at_commit = values(state)[0]
    state.report(val_loss=3.0)
    assert torch.equal(best_weight(stage, url), at_commit)

    step(state)
    state.report(val_loss=numpy.array([2.0]))
    assert torch.equal(best_weight(stage, url), at_commit)
    state.commit()
    assert torch.equal(best_weight(stage, url), values(state)[0])

    state.report(val_loss=9.0, loss=1.0)
    step(state)
    state.commit()
    assert not torch.equal(best_weight(stage, url), values(state)[0])


@pytest.mark.parametrize("kind", ["copy", "host", "in_place"])
def test_the_best_is_kept_however_commits_are(stage: Stage, url: str, kind: str) -> None:
    state = best_run(stage, url, trained(commit=kind))
    DistributedDataParallel(state.model)
    kept = []
    for loss in (3.0, 1.0, 2.0):
        step(state)
        state.commit()
        state.report(val_loss=loss)
        kept.append(values(state)[0])
    assert torch.equal(best_weight(stage, url), kept[1])


def test_a_survivor_writes_the_best_also_from_a_later_commit_of_the_same_weights(stage: Stage, url: str) -> None:
    state = best_run(stage, url, trained(), rank=1, others=[None])
    DistributedDataParallel(state.model)
    step(state)
    state.commit()
    state.report(val_loss=1.0)
    state.commit()
    best = values(state)[0]
    stage.begin(state)  # as rank 0, which is lost before it has written anything
    assert torch.equal(best_weight(stage, url), best)


def commit_of_which_others_know_the_score(stage: Stage, state: TorchState) -> None:
    """Have ranks 2 and 3 report for the commit after the next step, before the next world forms."""
    DistributedDataParallel(state.model)
    step(state)
    state.commit()
    stage.gathered = [msgspec.msgpack.encode((rank, ((stage.control.commit,), float(rank)))) for rank in (3, 2)]


@pytest.mark.parametrize("commits_until_the_next_loss", [None, 0, 1, 2])
def test_rank_0_writes_the_best_of_a_commit_for_which_only_others_have_reported(
    stage: Stage, url: str, commits_until_the_next_loss: int | None
) -> None:
    """They were ahead when a further rank was lost, and the best weights were kept by nobody."""
    state = best_run(stage, url, trained())
    commit_of_which_others_know_the_score(stage, state)
    best = values(state)[0]
    if commits_until_the_next_loss is not None:
        stage.begin(state, rank=1, others=[stage.control.commit])
        stage.gathered = []
        for _ in range(commits_until_the_next_loss):
            state.commit()
    stage.begin(state)
    assert torch.equal(best_weight(stage, url), best)
    assert [json.loads(path.read_text())["value"] for path in Path(url).glob("*/score.json")] == [2.0]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_score_is_not_that_of_weights_after_as_many_steps_as_the_last_world_had_made(
    stage: Stage, url: str, steps: int
) -> None:
    state = best_run(stage, url, trained())
    commit_of_which_others_know_the_score(stage, state)
    stage.begin(state, rank=1, others=[stage.control.commit])
    stage.gathered = []
    for _ in range(steps):
        step(state)
        state.commit()
    stage.begin(state)
    with pytest.raises(CheckpointError, match="no complete checkpoint with a score"):
        best_weight(stage, url)


@pytest.mark.parametrize("rank_0_before", [True, False])
def test_weights_are_kept_once_among_the_best_although_their_job_goes_on_from_a_later_commit(
    stage: Stage, url: str, rank_0_before: bool
) -> None:
    """They were scored a second time, and another good checkpoint had to go."""
    plan = CheckpointWish(url, 1e9, keep=3, best=Metric("val_loss", "min")).claim()
    writer = stage.checkpoints = CheckpointWriter(plan, stage.control.report, int)
    state = trained()
    stage.begin(state)
    DistributedDataParallel(state.model)
    for value in (3.0, 2.0, 1.0):
        step(state)
        state.commit()
        state.report(val_loss=value)
        writer.wait(lambda: False)
    state.commit()
    if not rank_0_before:
        stage.checkpoints = CheckpointWriter(plan, stage.control.report, int)
    stage.begin(state)
    stage.checkpoints.wait(lambda: False)
    scores = [json.loads(path.read_text())["value"] for path in Path(url).glob("*/score.json")]
    assert sorted(scores) == [1.0, 2.0, 3.0]


def test_a_survivor_gives_no_score_to_a_commit_after_a_further_step(stage: Stage, url: str) -> None:
    state = best_run(stage, url, trained(), rank=1, others=[None])
    DistributedDataParallel(state.model)
    for _ in range(2):
        step(state)
        state.commit()
        if not state._commits._durable._scored:
            state.report(val_loss=1.0)
    stage.begin(state)
    with pytest.raises(CheckpointError, match="no complete checkpoint with a score"):
        best_weight(stage, url)


def test_only_what_rank_0_reports_counts(stage: Stage, url: str) -> None:
    state = best_run(stage, url, ObjectState(epoch=3), rank=1, others=[None])
    state.commit()
    state.report(val_loss=1.0)
    stage.checkpoints.wait(lambda: False)
    assert not CheckpointDirectory(url).list().complete


def test_a_word_is_no_score(stage: Stage, url: str) -> None:
    state = best_run(stage, url, ObjectState(epoch=3))
    with pytest.raises(
        TypeError, match=r"report\(val_loss=…\) has to be a number, because of checkpoint_best='val_loss'"
    ):
        state.report(val_loss="low")


def best_run(stage: Stage, url: str, state: Any, **others: Any) -> Any:
    """A run that writes only its first commit, and the best."""
    plan = CheckpointWish(url, 1e9, best=Metric("val_loss", "min")).claim()
    stage.checkpoints = CheckpointWriter(plan, stage.control.report, int)
    stage.begin(state, **others)
    return state


def best_weight(stage: Stage, url: str) -> torch.Tensor:
    stage.checkpoints.wait(lambda: False)
    weight: torch.Tensor = load_checkpoint(url, best=True)["model"]["weight"]
    return weight
