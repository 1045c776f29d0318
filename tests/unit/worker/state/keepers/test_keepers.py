"""The table of keepers: a further way to keep commits is a class and a line."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from worker_stage import on_stage

from spark_elastic.checkpoint.skeleton import StateDict, map_tree
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.state.keepers import KEEPERS
from spark_elastic.worker.state.keepers.copies import OnDevice
from spark_elastic.worker.state.snapshot import KeptPart
from spark_elastic.worker.state.torch_state import TorchState


class Packed(KeptPart):
    """A state dict whose tensors are kept as compressed bytes."""

    def __init__(self, content: Any) -> None:
        self.content = map_tree(_pack, content)

    def load_into(self, target: Any) -> None:
        target.load_state_dict(map_tree(_unpack, self.content))


def _pack(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Bytes(value.dtype, value.shape, zlib.compress(value.detach().numpy().tobytes()))
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, _Bytes):
        return torch.frombuffer(bytearray(zlib.decompress(value.data)), dtype=value.dtype).view(value.shape)
    return value


class _Bytes:
    def __init__(self, dtype: torch.dtype, shape: torch.Size, data: bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


class Compressed(OnDevice):
    name = "compressed"

    def part_of(self, value: Any) -> Any:
        kept = super().part_of(value)
        return Packed(kept.content) if isinstance(kept, StateDict) else kept


def test_a_commit_mode_of_ones_own_is_a_class_and_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEEPERS, "compressed", Compressed)
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


@pytest.mark.parametrize("commit", KEEPERS)
def test_errors_call_a_keeper_by_its_name_in_the_table(commit: str) -> None:
    assert KEEPERS[commit].name == commit


def test_an_unknown_keeper_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(ValueError, match="one of copy, host, in_place, not 'copies'"):
        TorchState(commit="copies")
