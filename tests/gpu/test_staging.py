"""A device's tensors through the memory of the host: every piece arrives, however late the device makes its copies."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.worker.state import staging

CYCLES = 20_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 64, 65, 500])
def test_a_tensor_arrives_whole_whatever_its_number_of_pieces(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, count: int
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 64 * dtype.itemsize)
    sent = torch.randint(0, 2, (count,), device=device).to(dtype)
    received = torch.zeros_like(sent)
    coming = staging.pieces_of(sent)
    lengths = []

    def receive(room: torch.Tensor) -> None:
        piece = next(coming)
        if device.type == "cuda":
            torch.cuda._sleep(CYCLES)  # the copies of both sides come late, behind this
        lengths.append(len(piece))
        room.copy_(piece)
        assert room.device.type == "cpu"

    staging.fill(received, receive)
    assert next(coming, None) is None
    assert torch.equal(received, sent)
    assert len(lengths) == (max(1, -(-count // 64)) if device.type == "cuda" else 1)
