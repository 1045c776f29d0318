"""States and their checkpoints: what comes back in a new run, and that loading runs no code."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_stage import DAMAGES
from checkpointed_runs import commit, new_run
from hypothesis import given, settings
from tampered_checkpoint import Trap
from trained_state import equal, step, trained, values
from worker_stage import Stage

import spark_elastic
from spark_elastic import DistributedDataParallel, load_checkpoint
from spark_elastic.checkpoint import writer
from spark_elastic.checkpoint.content import OpaqueObject, decode, encode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.protocol.reports import CheckpointWritten
from spark_elastic.worker.state.base import State
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState
from tests.unit.worker.state.test_snapshot import same, taken, trees


class Counting:
    """Counts, and has a state dict."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state["count"]


class Progress:
    def __init__(self, count: int) -> None:
        self.count = count


# ---------------------------------------------------------------- a run that goes on


@pytest.mark.parametrize("make", [lambda: "plain", lambda: Counting()], ids=["a value", "an object"])
def test_what_the_script_has_made_each_ranks_own_is_not_restored(stage: Stage, url: str, make: Any) -> None:
    """Rank 0 alone began with what the checkpoint has."""
    first = new_run(stage, url, ObjectState(epoch=3, tag=make()))
    if isinstance(first.tag, Counting):
        first.tag.count = 5
    else:
        first.tag = "saved"
    commit(stage, first)
    again = new_run(stage, url, ObjectState(epoch=0, local={"tag": make()}))
    assert again.epoch == 3
    assert again.tag == "plain" or again.tag.count == 0


@pytest.mark.parametrize(
    ("form", "told"),
    [((5, torch.float32), "of shape [5] here"), ((3, torch.float64), "torch.float64 of shape [3] here")],
)
def test_a_learned_tensor_of_another_form_is_refused(
    stage: Stage, url: str, form: tuple[int, torch.dtype], told: str
) -> None:
    """The State went on with the saved one, and the optimizer with the script's, of which no checkpoint was written."""

    def state(length: int, dtype: torch.dtype) -> TorchState:
        prompt = torch.nn.Parameter(torch.zeros(length, dtype=dtype))
        return TorchState(prompt=prompt, optimizer=torch.optim.SGD([prompt], lr=0.1))

    commit(stage, new_run(stage, url, state(3, torch.float32)))
    with pytest.raises(
        CheckpointError, match=r"state\.prompt is learned, .* torch.float32 of shape \[3\], and"
    ) as error:
        new_run(stage, url, state(*form))
    assert told in str(error.value)


def test_a_new_run_goes_on_from_the_last_commit(stage: Stage, url: str) -> None:
    first, second = trained(), trained(steps=1)
    state = new_run(stage, url, first)
    commit(stage, state)
    expected = values(state)
    DistributedDataParallel(state.model)
    step(state)  # is not committed
    stage.models.clear()

    again = new_run(stage, url, second)
    assert equal(values(again), expected)
    DistributedDataParallel(again.model)
    step(state)
    state.restore()
    step(state)
    step(again)
    assert equal(values(again), values(state))


def test_steps_are_counted_on_from_those_before(stage: Stage, url: str) -> None:
    for _ in range(2):
        state = new_run(stage, url, ObjectState(epoch=0))
        for _ in range(3):
            state.epoch += 1
            commit(stage, state)
    written = [report for report in stage.control.reported if isinstance(report, CheckpointWritten)]
    assert [report.step for report in written] == [1, 2, 3, 4, 5, 6]
    assert state.epoch == 6


@pytest.mark.parametrize(
    "edited", ["class Mode(enum.Enum):\n    A = 2", "Mode = collections.namedtuple('Mode', 'value more')"]
)
def test_a_class_that_was_edited_meanwhile_is_no_damage(
    stage: Stage, url: str, edited: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All checkpoints were called damaged, and the advice was to remove them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    first = (
        "class Mode(enum.Enum):\n    A = 1" if "Enum" in edited else "Mode = collections.namedtuple('Mode', 'value')"
    )
    for code in (first, edited):
        (tmp_path / "edited.py").write_text(f"import collections, enum\n{code}\n")
        sys.modules.pop("edited", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        kind = importlib.import_module("edited").Mode
        if code == first:
            commit(stage, new_run(stage, url, ObjectState(mode=kind(1))))
    with pytest.raises(CheckpointError, match=r"do not fit the classes here: .* Restore the classes") as raised:
        new_run(stage, url, ObjectState(mode=None))
    assert not isinstance(raised.value, DamagedError)


def test_another_optimizer_and_parameters_in_another_order_do_not_fit(stage: Stage, url: str) -> None:
    def made(kind: Any = torch.optim.Adam, *names: str) -> Any:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names or "ab"})
        return TorchState(model=model, optimizer=kind(model.parameters()))

    first = made()
    first.model["a"](first.model["b"](torch.ones(1, 2))).sum().backward()
    first.optimizer.step()
    commit(stage, new_run(stage, url, first))
    for other, words in (
        (made(torch.optim.Adamax), "that of Adam, and it is Adamax"),
        (made(torch.optim.Adam, "b", "a"), "order"),
    ):
        with pytest.raises(
            CheckpointError,
            match=f"does not fit this state: .*{words}.*; make the State as it was .*, or give another checkpoint=",
        ):
            new_run(stage, url, other)
    new_run(stage, url, made())


def test_what_was_set_to_another_object_comes_back_as_a_copy(stage: Stage, url: str) -> None:
    """The content of the one stage went into the other one of the new job's table."""

    def made() -> tuple[list[dict[str, float]], Any]:
        stages = [{"rate": 0.1}, {"rate": 0.2}]
        first = {"stage": stages[0], 1: stages[0]}
        return stages, ObjectState(stage=stages[0], config=first, last=numpy.zeros(1), all=stages, log=[])

    for commits in range(3):
        stages, state = made()
        log = state.log
        new_run(stage, url, state)
        assert stages == [{"rate": 0.1}, {"rate": 0.2}]
        assert state.log is log
        assert len(log) == commits
        assert state.all is stages
        if commits:
            assert state.stage is state.config["stage"] is stages[1]
            assert state.config[1] is stages[0]
            assert state.last.tolist() == [commits]
        state.log.append(1)
        state.stage = state.config["stage"] = stages[1]
        state.last = state.last + 1
        commit(stage, state)


def test_objects_of_every_kind_come_back_with_their_types(stage: Stage, url: str) -> None:
    objects = {"own": Progress(3), "array": numpy.arange(3), "odd": {frozenset([1]): torch.ones(2)}, "pair": (1, [2])}
    commit(stage, new_run(stage, url, ObjectState(**objects)))
    again = new_run(stage, url, ObjectState(own=None, array=None, odd=None, pair=None))
    assert again.own.count == 3
    assert again.array.tolist() == [0, 1, 2]
    assert same(again.odd[frozenset([1])], torch.ones(2))
    assert again.pair == (1, [2])


def test_what_the_checkpoint_does_not_know_stays_as_the_script_has_made_it(stage: Stage, url: str) -> None:
    state = new_run(stage, url, ObjectState(epoch=3, mine=1, local="mine"))
    commit(stage, state)
    again = new_run(stage, url, ObjectState(epoch=0, mine=2, new="x", local="mine"))
    assert (again.epoch, again.mine, again.new) == (3, 2, "x")


def test_reset_callbacks_get_the_size_of_the_world_that_wrote_the_checkpoint(stage: Stage, url: str) -> None:
    calls: list[tuple[int, int]] = []

    def called(state: Any) -> Any:
        state.register_reset_callbacks([lambda old, new: calls.append((old, new))])
        return state

    commit(stage, new_run(stage, url, called(ObjectState(epoch=0)), others=[None, None]))
    assert calls == []
    new_run(stage, url, called(ObjectState(epoch=0)), others=[None])
    assert calls == [(3, 2)]


def test_a_store_that_fails_for_a_moment_while_a_run_begins_is_asked_again(
    stage: Stage, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = new_run(stage, url, ObjectState(epoch=0))
    state.epoch = 3
    commit(stage, state)
    check_claim, failures = CheckpointDirectory.check_claim, iter(range(2))

    def fail_twice(self: CheckpointDirectory, attempt: int) -> Any:
        for _ in failures:
            raise OSError(5, "connection reset")
        return check_claim(self, attempt)

    monkeypatch.setattr(CheckpointDirectory, "check_claim", fail_twice)
    monkeypatch.setattr(writer, "RESTORE_PAUSES", (0.0, 0.0))
    assert new_run(stage, url, ObjectState(epoch=0)).epoch == 3
    assert caplog.text.count("connection reset") == 2


def test_random_numbers_differ_from_run_to_run(stage: Stage, url: str) -> None:
    drawn = []
    for _ in range(3):
        torch.manual_seed(7)
        state = new_run(stage, url, trained(0))
        drawn.append(torch.rand(1).item())
        commit(stage, state)
    assert len(set(drawn)) == 3


def test_only_rank_0_writes(stage: Stage, url: str) -> None:
    CheckpointDirectory(url).claim()
    state = ObjectState(epoch=0)
    state.save()  # stands for what rank 0 sends
    state._keeper.current.skeleton["size"] = 0
    new_run(stage, url, state, rank=1, others=[None])
    commit(stage, state)
    assert not CheckpointDirectory(url).list().complete


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("file", ["manifest.json", "tree.json", "tensors.safetensors", "objects.pickle"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    stage: Stage, url: str, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = new_run(stage, url, ObjectState(epoch=0, tensor=torch.ones(2), own=Progress(1)))
    for _ in range(2):
        state.epoch += 1
        commit(stage, state)
    DAMAGES[how](Path(url, "000001-000001-000000002", file))
    again = new_run(stage, url, ObjectState(epoch=0, tensor=torch.zeros(2), own=None))
    assert again.epoch == 1
    partial = (file, how) == ("manifest.json", "missing")
    assert ("000001-000001-000000002" in caplog.text) != partial
    commit(stage, again)
    assert [str(name) for name in CheckpointDirectory(url).list().newest_first] == [
        "000002-000001-000000001",
        "000001-000001-000000001",
    ]


def test_a_run_does_not_begin_anew_where_all_checkpoints_are_damaged(stage: Stage, url: str) -> None:
    commit(stage, new_run(stage, url, ObjectState(epoch=1)))
    Path(url, "000001-000001-000000001", "tree.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove them to start over"):
        new_run(stage, url, ObjectState(epoch=0))


def test_a_checkpoint_of_another_model_is_refused(stage: Stage, url: str) -> None:
    commit(stage, new_run(stage, url, TorchState(model=torch.nn.Linear(3, 1))))
    with pytest.raises(CheckpointError, match=r"(?s)does not fit this state: .*size mismatch"):
        new_run(stage, url, TorchState(model=torch.nn.Linear(4, 1)))


def test_objects_that_a_checkpoint_has_no_place_for_go_with_a_warning(stage: Stage, url: str) -> None:
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    commit(stage, new_run(stage, url, ObjectState(models={"a": first}, average=None)))
    state = ObjectState(models={"a": first, "b": second}, average=second, new=second)
    with pytest.warns(
        UserWarning, match=r"no object at the place of state.models\['b'\], here Linear, state.average, here Lin"
    ):
        new_run(stage, url, state)
    assert state.models == {"a": first}
    assert state.average is None
    assert state.new is second


def test_a_state_of_the_users_own_is_refused(stage: Stage, url: str) -> None:
    class Own(State):
        def save(self) -> None: ...

        def restore(self) -> None: ...

        def sync(self) -> None: ...

    with pytest.raises(CheckpointError, match="needs an ObjectState or a TorchState, not Own"):
        new_run(stage, url, Own())


# ---------------------------------------------------------------- load_checkpoint


@given(trees)
@settings(max_examples=30, deadline=None)
def test_what_is_plain_is_loaded_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    directory = CheckpointDirectory(str(tmp_path_factory.mktemp("tree")))
    name = CheckpointName(1, 1, 1)
    directory.write(name, encode(taken({"steps": 2, "size": 3, "objects": {"tree": tree}})))
    saved = decode(directory, name, unpickle=False)
    assert (saved.name, saved.steps, saved.size) == (name, 2, 3)
    assert same(saved.objects, {"tree": tree})


def test_storage_options_reach_all_who_open_the_directory(stage: Stage, tmp_path: Path) -> None:
    url, options = "dir://saved", {"path": str(tmp_path), "target_protocol": "file"}
    commit(stage, new_run(stage, url, ObjectState(epoch=3), storage_options=options))
    assert list((tmp_path / "saved").glob("*/manifest.json"))
    assert new_run(stage, url, ObjectState(epoch=0), storage_options=options).epoch == 3
    assert load_checkpoint(url, storage_options=options) == {"epoch": 3}


def test_load_checkpoint_puts_a_placeholder_where_an_object_would_need_code(
    stage: Stage, url: str, tmp_path: Path
) -> None:
    sprung = tmp_path / "sprung"
    commit(stage, new_run(stage, url, ObjectState(weight=torch.ones(2), nested=[1, {"trap": Trap(sprung)}])))
    loaded = load_checkpoint(url)
    assert same(loaded["weight"], torch.ones(2))
    assert loaded["nested"] == [1, {"trap": OpaqueObject(f"{Trap.__module__}.Trap", 0)}]
    assert not sprung.exists()
    new_run(stage, url, ObjectState(weight=None, nested=None))
    assert sprung.exists()  # a job trusts its own directory


# ---------------------------------------------------------------- how many, and which


@pytest.mark.parametrize("keep", [0, 1.5, True])
def test_a_number_of_checkpoints_that_makes_no_sense_is_refused(url: str, keep: Any) -> None:
    with pytest.raises(ValueError, match=f"checkpoint_keep must be a whole number from 1 on, not {keep}"):
        spark_elastic.run(int, local=True, checkpoint=url, checkpoint_keep=keep)


def test_what_cannot_be_the_best_is_refused_before_anything_starts(url: str) -> None:
    for best, message in (("ndcg", "write 'ndcg:min'"), ("", "must be the name of a metric"), (3, "not 3")):
        with pytest.raises(ValueError, match=message):
            spark_elastic.run(int, local=True, checkpoint=url, checkpoint_best=best)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_best='val_loss' needs checkpoint="):
        spark_elastic.run(int, local=True, checkpoint_best="val_loss")
