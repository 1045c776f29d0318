"""What load_checkpoint and load_model return, and by which names."""

from __future__ import annotations

import shutil
from collections import Counter, OrderedDict
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
from spark_elastic.errors import CheckpointError, DamagedError
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


def saved_models(folder: Path, **objects: Any) -> None:
    content = {"steps": 1, "size": 1, "objects": objects}
    CheckpointDirectory(str(folder)).write(CheckpointName(1, 1, 1), encode(taken(content)))


def test_models_in_containers_have_names(tmp_path: Path) -> None:
    nets = OrderedDict(critic=torch.nn.Linear(2, 1), others=[torch.nn.Linear(3, 1)])
    saved_models(tmp_path, nets=nets)
    for name, width in (("nets['critic']", 2), ("nets['others'][0]", 3)):
        assert load_model(tmp_path, torch.nn.Linear(width, 1), name).in_features == width
    with pytest.raises(CheckpointError, match=r"has no model named 'critic', only .nets\['critic'\]"):
        load_model(tmp_path, torch.nn.Linear(2, 1), "critic")


def test_a_learned_tensor_is_returned_as_its_values(tmp_path: Path) -> None:
    saved_models(tmp_path, one=torch.ones(2, requires_grad=True), more=OrderedDict(x=torch.ones(1, requires_grad=True)))
    loaded = load_checkpoint(tmp_path)
    assert loaded["one"].numpy().tolist() == [1.0, 1.0]
    assert loaded["more"]["x"].numpy().tolist() == [1.0]


class OfItsOwn(torch.nn.Linear):
    """Has a state dict without torch's metadata."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(super().state_dict(*args, **kwargs))


def test_a_module_with_a_plain_dict_as_its_state_takes_weights(tmp_path: Path) -> None:
    saved_models(tmp_path, model=torch.nn.Linear(2, 1))
    assert load_model(tmp_path, OfItsOwn(2, 1)).in_features == 2


class Counting(torch.nn.Module):
    """Has a state that only code could bring back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = Counter()

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_a_model_of_which_only_code_could_bring_back_a_part_is_not_loaded_in_part(tmp_path: Path) -> None:
    saved_models(tmp_path, model=torch.nn.Sequential(Counting()))
    here = torch.nn.Sequential(Counting())
    with pytest.raises(CheckpointError, match=r"the model 'model' of .* has a collections\.Counter, which needs code"):
        load_model(tmp_path, here)
    assert here[0].seen == Counter()


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def compiled_in_part() -> torch.nn.Module:
    net = small()
    assert isinstance(net, torch.nn.Sequential)
    net[1] = torch.compile(net[1])  # type: ignore[assignment]
    return net


@pytest.mark.parametrize(
    "make",
    [
        compiled_in_part,
        lambda: DistributedDataParallel(torch.compile(small())),
        lambda: torch.compile(DistributedDataParallel(small())),
        lambda: torch.nn.Sequential(DistributedDataParallel(compiled_in_part())),
    ],
    ids=["in part", "wrapped compiled", "compiled wrapper", "within"],
)
def test_load_model_takes_the_network_that_was_trained_however_it_is_compiled(tmp_path: Path, make: Any) -> None:
    model, here = make(), make()
    for number, value in enumerate(model.state_dict().values()):
        value.fill_(number)
    saved_models(tmp_path, model=model)
    assert load_model(tmp_path, here) is here
    assert same(dict(here.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_that_a_running_job_removes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = CheckpointDirectory(str(tmp_path))
    attempt = job.claim()
    written = 0

    def goes_on() -> None:
        nonlocal written
        written += 1
        content = {"steps": written, "size": 1, "objects": {"step": written}}
        job.write(CheckpointName(attempt, 1, written), encode(taken(content)))
        job.prune(attempt, keep=1)

    goes_on()
    listed, ahead = CheckpointDirectory.list, 3

    def slow(self: CheckpointDirectory) -> Any:
        nonlocal ahead
        found = listed(self)
        if self is not job and ahead:
            ahead -= 1
            goes_on()
        return found

    monkeypatch.setattr(CheckpointDirectory, "list", slow)
    assert load_checkpoint(tmp_path) == {"step": 4}
    assert not caplog.records
    ahead = 100
    with pytest.raises(CheckpointError, match=r"10 checkpoints of .* were removed while they were read") as raised:
        load_checkpoint(tmp_path)
    assert not isinstance(raised.value, DamagedError)


def test_what_is_removed_altogether_while_it_is_read_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_models(tmp_path / "job", step=1)

    def gone(*what: Any) -> Any:
        shutil.rmtree(tmp_path / "job")
        raise DamagedError("tree.json is missing")

    monkeypatch.setattr("spark_elastic.checkpoint.newest.decode", lambda *what, **how: gone())
    with pytest.raises(CheckpointError, match=r"what .*job held was removed while it was read: tree.json is missing"):
        load_checkpoint(tmp_path / "job")


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
