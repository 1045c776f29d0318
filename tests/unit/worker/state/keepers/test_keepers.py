"""The table of keepers: a further way to keep commits is a class and a line."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from trained_state import equal, trained, values
from worker_stage import on_stage

from spark_elastic.checkpoint.skeleton import StateDict, map_tree
from spark_elastic.checkpoint.tensors import raw
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.state.keepers import KEEPERS
from spark_elastic.worker.state.keepers.copies import PartlyCopied
from spark_elastic.worker.state.loading import Loading
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import KeptPart, Snapshot
from spark_elastic.worker.state.torch_state import TorchState


@dataclass(frozen=True)
class PackedTensor:
    data: bytes
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    def unpacked(self) -> torch.Tensor:
        content = bytearray(zlib.decompress(self.data))
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return flat.view(self.dtype).view(self.shape).to(self.device)


def pack(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    content = raw(value.detach().cpu().contiguous()).numpy().data
    return PackedTensor(zlib.compress(content), value.dtype, value.device, value.shape)


@dataclass(frozen=True)
class Packed(KeptPart):
    """A state dict whose tensors are kept as compressed bytes."""

    content: Any

    def unpacked(self) -> StateDict:
        return StateDict(
            map_tree(lambda value: value.unpacked() if isinstance(value, PackedTensor) else value, self.content)
        )

    def load_into(self, target: Any) -> None:
        live = {"it": target}
        dict(Loading(Places(live), is_own=True).load(live, {"it": self.unpacked()}))


class Compressed(PartlyCopied):
    name = "compressed"

    def part_of(self, value: Any) -> Any:
        kept = super().part_of(value)
        return Packed(map_tree(pack, kept.content)) if isinstance(kept, StateDict) else kept

    def copy_whole(self, values: Mapping[str, object]) -> Snapshot:
        whole = Snapshot()
        parts = map_tree(lambda part: part.unpacked() if isinstance(part, Packed) else part, self.current.view())
        whole.take(parts, None)
        return whole


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEEPERS, "compressed", Compressed)


def test_a_commit_mode_of_ones_own_is_a_class_and_a_line_in_the_table(compressed: None) -> None:
    with on_stage() as stage:
        model = torch.nn.Linear(3, 2)
        state = TorchState(model=model, epoch=0, commit="compressed")
        stage.begin(state)
        state.epoch = 1
        state.commit()
        held = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.fill_(7.0)
        state.epoch = 2
        state.restore()
        assert stage.control.commit == CommitId(1, 1)
        assert (state.epoch, state.model) == (1, model)
        assert torch.equal(model.weight, held)
        assert not state._keeper.current.buffer.views, "tensors are kept compressed"


def test_checkpoints_and_other_ranks_get_state_dicts_from_it(compressed: None) -> None:
    state = trained(commit="compressed")
    state.commit()
    weight = values(state)[0]
    for whole in (state._lend().lend(), state._keeper.for_repair({}, is_sender=True).current):
        content = whole.content()["objects"]
        assert type(content["model"]) is StateDict
        assert equal([content["model"].content["weight"]], [weight])


def keep_and_go_back(commit: str, model: torch.nn.Module) -> None:
    state = TorchState(model=model, commit=commit)
    state.commit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for buffer in model.buffers():
        buffer.zero_()
    state.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("commit", [*KEEPERS, "compressed"])
def test_every_keeper_takes_every_dtype_and_shape(commit: str, compressed: None) -> None:
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    model.register_buffer("one", torch.tensor(True))
    keep_and_go_back(commit, model)


@pytest.mark.parametrize("commit", [*KEEPERS, "compressed"])
def test_a_newcomer_takes_over_what_any_keeper_sends(commit: str, compressed: None) -> None:
    donor, newcomer = trained(commit=commit), trained(0, commit=commit)
    donor.commit()
    objects = donor._values(shared=True)
    arriving = donor._keeper.for_repair(objects, is_sender=True).current.content()
    with on_stage() as stage:
        stage.arriving = arriving
        stage.begin(newcomer)
        assert equal(values(newcomer), values(donor))


@pytest.mark.parametrize("commit", KEEPERS)
def test_errors_call_a_keeper_by_its_name_in_the_table(commit: str) -> None:
    assert KEEPERS[commit].name == commit


def test_an_unknown_keeper_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(ValueError, match=f"one of {', '.join(KEEPERS)}, not 'copies'"):
        TorchState(commit="copies")
