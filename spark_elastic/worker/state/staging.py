"""Staging: a device's tensors on their way over the network, through the memory of the host, piece by piece.

The device copies one piece while the network works on another, and two pieces of pinned memory are all the room that it takes.
Sender and receiver cut a tensor into the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# Large enough that a piece's own cost, some tens of microseconds, does not count.
PIECE_BYTES = 16 << 20


def pieces_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat tensor's pieces in the memory of the host. Each is valid until the next one is requested.

    A CPU tensor is its own only piece.
    """
    if flat.device.type == "cpu":
        yield flat
        return
    pieces = _cut(flat)
    rooms = _rooms(pieces)
    begun = _copy(pieces[0], rooms[0])
    for number in range(len(pieces)):
        ready, copied = begun
        copied.synchronize()
        if number + 1 < len(pieces):
            begun = _copy(pieces[number + 1], rooms[(number + 1) % 2])
        yield ready


def fill(flat: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
    """Fill a flat tensor piece by piece: ``receive`` fills a tensor of the host with the next piece.

    Returns when the device has the whole tensor.
    """
    if flat.device.type == "cpu":
        receive(flat)
        return
    pieces = _cut(flat)
    rooms = _rooms(pieces)
    copies: list[torch.cuda.Event] = []
    for number, piece in enumerate(pieces):
        room = rooms[number % 2][: len(piece)]
        if number >= 2:
            copies[number - 2].synchronize()  # until then, the device reads this room
        receive(room)
        copies.append(_copy(room, piece)[1])
    copies[-1].synchronize()


def _cut(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(max(1, PIECE_BYTES // flat.element_size())))


def _rooms(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    first = pieces[0]
    return [torch.empty(len(first), dtype=first.dtype, pin_memory=True) for _ in pieces[:2]]


def _copy(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Let the current stream copy ``source`` to the beginning of ``target``; return that part, and the end of the copy."""
    target = target[: len(source)]
    target.copy_(source, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record()
    return target, copied
