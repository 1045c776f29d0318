"""Fingerprints: all ranks compare what should be equal on all of them, while training continues.

At commits 1, 2, 4, 8 … of a generation, and every few seconds when rank 0 asks for it, each rank takes a fingerprint of the
parameters and the optimizer state of that commit. The fingerprint's digest, one number, travels cheaply in the commit's control
collective, and is compared when that is read, at the next commit. Only if digests differ do all ranks exchange the figures
behind them, through the control store.

What is compared: when rank 0 asks, the bits of all elements, which takes about a millisecond for 10 MB; rank 0 asks so seldom
that this takes no more than ``SHARE`` of the time. At the first commits, which follow each other closely, only a piece of up to
``PIECE`` elements of each tensor, a different one each time: ranks that each train on their own rows differ everywhere.

How it is compared: bit for bit if all ranks run on CPUs of one kind with one version of torch, because Gloo's reductions leave
the same bits on all ranks. Otherwise the last bits of an optimizer's step may differ from rank to rank (AVX2 and AVX-512, other
GPUs, atomic additions on a GPU), which adds up to less than 1e-4 over a million steps. So sums and norms of pieces are compared
with a tolerance of ``TOLERANCE`` times the norm: more than such noise, and less than the difference between ranks that each
train on their own rows.

Buffers are compared only with shards: else running statistics are each rank's own unless the wrapper broadcasts them.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from spark_elastic.errors import RanksDifferError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.checks.unsupported import why_unsupported

# How many elements of a tensor a fingerprint covers, unless rank 0 asks for the bits of all of them.
PIECE = 16_384
# Rank 0 asks for a fingerprint at most this often, and so seldom that checks take at most this share of the time.
SECONDS = 5.0
SHARE = 0.002
# If ranks run on machines of several kinds, digests always differ and all figures have to be exchanged, so rank 0 asks less
# often.
MIXED_SECONDS = 60.0
TOLERANCE = 1e-3

# How names of buffers begin.
BUFFER = "the buffer"
_CAUSES = (
    "The usual causes: gradients that are not averaged (a model that is called or stepped without se.DistributedDataParallel, a "
    "step or commit under no_sync()), an optimizer, scheduler or model that trains and is not in the State, or that has an "
    "attribute beside its state_dict, weights that one rank changes alone (if se.rank() == 0), an optimizer that decides by this "
    "rank's loss or random numbers. Objects that are meant to differ go into TorchState(local=…)"
)
_CAUSES_OF_BUFFERS = (
    "The usual causes: a model without se.DistributedDataParallel, such as a teacher, or the module inside the wrapper, is "
    "called while in training mode, so that its running statistics follow this rank's rows: call its eval()"
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = Sequence[tuple[str, torch.Tensor]]


class Figures(msgspec.Struct, frozen=True):
    """What ranks compare: the name of each tensor, the sum of its bits, the sum and norm of a piece, the kind of machine."""

    commit: CommitId
    kind: str
    names: tuple[str, ...]
    bits: tuple[int, ...]
    sums: tuple[float, ...]
    norms: tuple[float, ...]

    @property
    def digest(self) -> int:
        """A positive number that is equal for equal names and bits."""
        data = msgspec.msgpack.encode((self.names, self.bits))
        return 1 + int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


# The decoder is made once, here, because msgspec must not inspect a type for the first time on two threads at once.
_shown = msgspec.msgpack.Decoder(tuple[int, Figures])


def take_figures(tensors: Named, commit: CommitId, of_all: bool = False) -> Figures:
    """Take the figures of a commit's tensors, with the bits of all elements or of pieces. Waits for the GPU that holds them."""
    pieces = [_piece(tensor.detach(), commit.index) for _, tensor in tensors]
    with torch.no_grad():
        bits = (
            [_sum_of_bits(_flat(tensor.detach())) for _, tensor in tensors] if of_all else [*map(_sum_of_bits, pieces)]
        )
        floats = [piece.to(torch.float64) for piece in pieces]
        values = _to_numbers([torch.stack([piece.sum(), piece.norm()]) for piece in floats])
    return Figures(
        commit,
        machine_kind(any(tensor.is_cuda for _, tensor in tensors)),
        tuple(name for name, _ in tensors),
        tuple(_to_numbers(bits)),
        tuple(value[0] for value in values),
        tuple(value[1] for value in values),
    )


def _to_numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of tensors of one shape, in one transfer from each device: Adam counts its steps on the CPU."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    found: list[object] = [None] * len(tensors)
    for of_device in places.values():
        values = torch.stack([tensors[place] for place in of_device]).tolist()
        for place, value in zip(of_device, values, strict=True):
            found[place] = value
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).contiguous()


def _piece(tensor: torch.Tensor, number: int) -> torch.Tensor:
    flat = _flat(tensor)
    if len(flat) <= PIECE:
        return flat
    start = number * PIECE % len(flat)
    return flat[start : start + PIECE]


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """Add up a tensor's memory, eight bytes at a time, so that a single element that differs changes the sum."""
    a_word = max(1, 8 // flat.element_size())
    if flat.storage_offset() % a_word:
        flat = flat.clone()  # ranks may hold the tensor at different alignments, but have to add up the same words
    words = len(flat) - len(flat) % a_word
    rest = flat[words:].view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
    return flat[:words].view(torch.int64).sum() + rest


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor, equal for equal tensors, that a change of any element changes. Waits once a device."""
    return _to_numbers([_sum_of_bits(_flat(tensor.detach())) for tensor in tensors])


def digest_of_bits(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors with equal first elements; 0 for tensors that are not dense."""
    if why_unsupported(tensor) is not None:
        return 0
    return int(_sum_of_bits(_flat(tensor.detach())[:PIECE]))


def machine_kind(on_gpu: bool) -> str:
    """Describe what the bits of an optimizer's step depend on; empty if they may differ between machines of one kind."""
    if on_gpu:
        return ""
    return " ".join(
        [torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor(), str(torch.get_num_threads())]
    )


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def find_difference(everybody: Sequence[Figures]) -> tuple[str, int] | None:
    """Return the first name whose tensor differs between ranks, and the first rank that differs from rank 0; None if none do.

    Pure. ``everybody`` is in rank order.
    """
    first = everybody[0]
    is_exact = first.kind != "" and all(figures.kind == first.kind for figures in everybody)
    for rank, figures in enumerate(everybody):
        if figures.names != first.names:
            odd = [name for name in (*first.names, *figures.names) if (name in first.names) != (name in figures.names)]
            return (odd or list(figures.names))[0], rank
    for place, name in enumerate(first.names):
        for rank, figures in enumerate(everybody):
            if figures.bits[place] != first.bits[place] and (is_exact or not _is_near(first, figures, place)):
                return name, rank
    return None


def _is_near(one: Figures, other: Figures, place: int) -> bool:
    room = TOLERANCE * max(one.norms[place], other.norms[place])
    differences = (one.sums[place] - other.sums[place], one.norms[place] - other.norms[place])
    unknown = [number != number for number in (one.norms[place], other.norms[place])]
    return all(unknown) or all(abs(difference) <= room for difference in differences)


class Comparison:
    """Compares fingerprints on one rank, in one generation. Used by the thread that commits.

    ``gather`` takes this rank's encoded figures and returns those of all ranks, in any order.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[[str, bytes], Sequence[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._size = size
        self._gather = gather
        self._figures: Figures | None = None
        self._equal_at: CommitId | None = None
        self._is_asked = False
        self._asks_at = clock() + SECONDS
        self._pause = SECONDS
        self._verdict: RanksDifferError | None = None

    def wants(self, commit: CommitId) -> bool:
        """Whether the ranks are to compare fingerprints of this commit. All ranks answer alike."""
        return self._is_asked or commit.index & (commit.index - 1) == 0

    def report(self, commit: CommitId, tensors: Callable[[], Named], is_commit: bool) -> tuple[int, int]:
        """Return this rank's values for the control collective: a digest or 0, and whether the next commit is to have one.

        ``is_commit`` is false if the ranks only check whether the world changes.
        """
        if self._size == 1:
            return 0, 0
        self._figures = None
        now = self._clock()
        if is_commit and self.wants(commit):
            self._figures = take_figures(tensors(), commit, of_all=self._is_asked)
            if self._is_asked:
                self._is_asked = False
                self._asks_at = now + max(self._pause, (self._clock() - now) / SHARE)
        asks = self._rank == 0 and now >= self._asks_at
        return 0 if self._figures is None else self._figures.digest, int(asks)

    def read(self, digests: Sequence[int], asked: bool) -> None:
        """Compare the digests of all ranks. Raises ``RanksDifferError`` on all ranks, and from then on at every call."""
        if self._verdict is not None:
            raise self._verdict
        self._is_asked = self._is_asked or asked
        figures, self._figures = self._figures, None
        if figures is None:
            return
        if len(set(digests)) > 1:
            self._look_closer(figures)
        self._equal_at = figures.commit

    def _look_closer(self, mine: Figures) -> None:
        packed = msgspec.msgpack.encode((self._rank, mine))
        shown = self._gather(f"fingerprint/{mine.commit.index}", packed)
        everybody = dict(map(_shown.decode, shown))
        found = find_difference([everybody[rank] for rank in range(self._size)])
        if found is None:
            self._pause = MIXED_SECONDS
            return
        name, rank = found
        before = (
            f"it was still equal at commit {self._equal_at}"
            if self._equal_at is not None
            else f"no commit of generation {mine.commit.generation} is known at which it was equal"
        )
        causes = _CAUSES_OF_BUFFERS if name.startswith(BUFFER) else _CAUSES
        self._verdict = RanksDifferError(
            f"{name} has not been the same on rank {rank} as on rank 0 since commit {mine.commit} at the latest; {before}. "
            f"Ranks that should be equal differ, so training was wrong. {causes}"
        )
        raise self._verdict
