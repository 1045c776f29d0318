"""What load_checkpoint and load_model return, and by which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import commit, new_run
from trained_state import equal, trained, values
from worker_stage import Stage

from spark_elastic import DistributedDataParallel, load_checkpoint, load_model
from spark_elastic.checkpoint.content import encode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import CheckpointError
from spark_elastic.worker.state.objects import ObjectState
from tests.unit.worker.state.test_snapshot import same, taken


def test_load_checkpoint_returns_state_dicts_by_name(stage: Stage, url: str) -> None:
    state = new_run(stage, url, trained())
    commit(stage, state)
    loaded = load_checkpoint(url)
    assert set(loaded) == {"model", "optimizer", "epoch"}
    assert same(dict(loaded["model"]), dict(state.model.state_dict()))
    again = trained(steps=0)
    again.model.load_state_dict(loaded["model"])
    again.optimizer.load_state_dict(loaded["optimizer"])
    assert equal(values(again), values(state))


def test_load_model_puts_the_weights_into_a_plain_module(stage: Stage, url: str) -> None:
    state = new_run(stage, url, trained())
    commit(stage, state)
    plain = trained(steps=0).model
    assert not same(dict(plain.state_dict()), dict(state.model.state_dict()))
    assert load_model(url, plain) is plain
    assert same(dict(plain.state_dict()), dict(state.model.state_dict()))
    wrapped = DistributedDataParallel(trained(steps=0).model)
    assert load_model(url, wrapped) is wrapped
    assert same(dict(wrapped.module.state_dict()), dict(state.model.state_dict()))
    other = trained(steps=0).model
    load_model(url, torch.compile(other))
    assert same(dict(other.state_dict()), dict(state.model.state_dict()))


def test_load_model_names_what_does_not_fit(stage: Stage, url: str) -> None:
    commit(stage, new_run(stage, url, trained()))
    with pytest.raises(CheckpointError, match=r"has no model named 'optimizer', only 'model'$"):
        load_model(url, torch.nn.Linear(1, 1), "optimizer")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, not 5"):
        load_model(url, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"url must be the folder that run\(checkpoint=\) was given, not 5"):
        load_model(5, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, not <class"):
        load_model(url, torch.nn.Linear)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="module is on the meta device"):
        load_model(url, torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(CheckpointError, match=r"(?s)the model 'model' of .* does not fit the module: .*size mismatch"):
        load_model(url, torch.nn.Linear(1, 1))


def test_load_model_of_a_state_without_a_model_says_so(stage: Stage, url: str) -> None:
    commit(stage, new_run(stage, url, ObjectState(epoch=3)))
    with pytest.raises(CheckpointError, match=r"has no model named 'model', none$"):
        load_model(url, torch.nn.Linear(1, 1))


def test_load_checkpoint_of_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file, and checkpoints are in a folder"):
        load_checkpoint(tmp_path / "file")


class Holder(torch.nn.Module):
    """A user's module whose only part is named as ours is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("saved", "plain"),
    [
        (small, small),
        (lambda: DistributedDataParallel(small()), small),
        (lambda: torch.compile(small()), small),
        (lambda: torch.compile(DistributedDataParallel(small())), small),
        (lambda: DistributedDataParallel(torch.compile(small())), small),
        (Holder, Holder),
        (lambda: DistributedDataParallel(Holder()), Holder),
        (
            lambda: torch.nn.ModuleDict({"a": DistributedDataParallel(small()), "b": Holder()}),
            lambda: torch.nn.ModuleDict({"a": small(), "b": Holder()}),
        ),
        (lambda: torch.optim.swa_utils.AveragedModel(Holder()), lambda: torch.optim.swa_utils.AveragedModel(Holder())),
    ],
    ids=[
        "plain",
        "wrapped",
        "compiled",
        "compiled wrapper",
        "wrapped compiled",
        "own",
        "own wrapped",
        "parts",
        "average",
    ],
)
def test_weights_are_loaded_by_the_names_of_the_plain_module(tmp_path: Path, saved: Any, plain: Any) -> None:
    model, directory, target = saved(), CheckpointDirectory(str(tmp_path)), plain()
    content = {"one": StateDict(model.state_dict()), "many": [{"x": StateDict(model.state_dict())}]}
    directory.write(CheckpointName(1, 1, 1), encode(taken({"steps": 1, "size": 1, "objects": content})))
    loaded = load_checkpoint(tmp_path)
    target.load_state_dict(loaded["one"])
    target.load_state_dict(loaded["many"][0]["x"])
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))
