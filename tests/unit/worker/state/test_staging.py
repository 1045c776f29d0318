"""Tensors on their way over the network: those of the host go as they are; tests/gpu/test_staging.py has those of a device."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.worker.state import staging


@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_tensor_of_the_host_is_sent_as_it_is_in_one_piece(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)
    flat = torch.arange(count)
    (piece,) = staging.pieces_of(flat)
    assert piece is flat, "a copy would take the memory of the largest tensor once more"


def test_a_tensor_of_the_host_is_received_where_it_stays_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)
    flat = torch.zeros(100)
    rooms: list[torch.Tensor] = []

    def receive(room: torch.Tensor) -> None:
        rooms.append(room)
        room.fill_(7)

    staging.fill(flat, receive)
    assert [room is flat for room in rooms] == [True]
    assert torch.equal(flat, torch.full((100,), 7.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32, torch.int64])
def test_pieces_are_of_so_many_bytes_whatever_the_type_and_make_up_the_whole_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    flat = (torch.arange(101) % 2).to(dtype)
    pieces = staging._cut(flat)
    assert {piece.nbytes for piece in pieces[:-1]} == {64}
    assert 0 < pieces[-1].nbytes <= 64
    assert torch.equal(torch.cat(pieces), flat)


def test_an_element_that_is_larger_than_a_piece_still_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 4)
    flat = torch.arange(3)
    assert [piece.tolist() for piece in staging._cut(flat)] == [[0], [1], [2]]
