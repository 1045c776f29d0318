"""Checkpoints of every format are read for ever: those in ``tests/kept`` were written by the releases of then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kept_state
import numpy
import pytest
import torch

from spark_elastic import load_checkpoint
from spark_elastic.checkpoint.content import OpaqueObject, SavedState, decode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.skeleton import StateDict
from tests.unit.worker.state.test_snapshot import same

KEPT = Path(__file__).parents[2] / "kept"
FORMATS = sorted(path.name for path in KEPT.glob("format-*"))
# What NumPy and sets were in the first format.
OPAQUE = {"format-1": {"array", "number", "names"}}


def kept(folder: str) -> Any:
    return KEPT / folder / "checkpoint"


def read(url: Path, unpickle: bool) -> SavedState:
    directory = CheckpointDirectory(str(url))
    (name,) = directory.list().newest_first
    return decode(directory, name, unpickle=unpickle)


@pytest.mark.parametrize("folder", FORMATS)
def test_all_plain_values_and_tensors_of_a_kept_checkpoint_are_as_they_were(folder: str) -> None:
    loaded = load_checkpoint(kept(folder))
    for name, value in kept_state.plain().items():
        assert repr(loaded[name]) == repr(value), name
        assert type(loaded[name]) is type(value)
    assert same(loaded["tensors"], kept_state.plain()["tensors"])


@pytest.mark.parametrize("folder", FORMATS)
def test_weights_of_a_kept_checkpoint_fit_the_plain_network(folder: str) -> None:
    loaded, model = load_checkpoint(kept(folder)), kept_state.network()
    model.load_state_dict(loaded["model"])
    assert kept_state.digest(dict(model.state_dict())) == kept_state.MODEL
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    assert kept_state.digest(loaded["optimizer"]) == kept_state.OPTIMIZER
    assert loaded["scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize("folder", FORMATS)
def test_objects_of_a_kept_checkpoint_come_back_for_a_job_that_goes_on_from_it(folder: str) -> None:
    saved, odd = read(kept(folder), unpickle=True), kept_state.odd()
    assert (saved.name.generation, saved.name.index, saved.steps, saved.size) == (2, 3, 1, 1)
    assert isinstance(saved.objects["model"], StateDict)
    for name in ("names", "counts", "money", "store", "number"):
        assert saved.objects[name] == odd[name]
        assert type(saved.objects[name]) is type(odd[name])
    assert saved.objects["array"].tolist() == odd["array"].tolist()
    assert saved.objects["array"].dtype == odd["array"].dtype
    assert vars(saved.objects["stopping"]) == vars(odd["stopping"])
    assert saved.objects["nested"][0]["generator"].random() == numpy.random.default_rng(5).random()


@pytest.mark.parametrize("folder", FORMATS)
def test_a_kept_checkpoint_is_read_without_running_code(folder: str) -> None:
    loaded = load_checkpoint(kept(folder))
    opaque = {name for name in kept_state.odd() if isinstance(loaded[name], OpaqueObject)}
    assert opaque == {"counts", "money", "store", "stopping"} | OPAQUE.get(folder, set())
    assert isinstance(loaded["nested"][0]["generator"], OpaqueObject)


@pytest.mark.parametrize("folder", FORMATS)
def test_a_job_goes_on_from_a_kept_checkpoint(folder: str, tmp_path: Path) -> None:
    from checkpointed_runs import commit, new_run
    from worker_stage import on_stage

    shutil.copytree(kept(folder), tmp_path / "saved")
    with on_stage() as stage:
        stage.add_model = stage.models.append  # type: ignore[attr-defined]
        state = new_run(stage, str(tmp_path / "saved"), kept_state.trained(steps=0))
        assert kept_state.digest(dict(state.model.module.state_dict())) == kept_state.MODEL
        assert kept_state.digest(state.optimizer.state_dict()) == kept_state.OPTIMIZER
        assert state.pair == kept_state.plain()["pair"]
        state.epoch += 1
        commit(stage, state)
        stage.checkpoints._pool.shutdown()
    assert load_checkpoint(tmp_path / "saved")["epoch"] == 8


@pytest.mark.parametrize("folder", ["format-1", "format-2"])
def test_the_checkpoint_of_a_kept_fit_is_read(folder: str) -> None:
    loaded = load_checkpoint(KEPT / folder / "runs" / "kept" / "checkpoints")
    assert [entry["epoch"] for entry in loaded["history"]] == [0, 1]
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    network.load_state_dict(loaded["model"])
    network.load_state_dict(loaded["best"])
