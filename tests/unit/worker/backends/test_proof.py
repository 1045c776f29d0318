"""Codes by which ranks prove to each other who they are."""

from __future__ import annotations

import pytest

from spark_elastic.worker.backends.proof import CODE_BYTES, check, codes

SIZE, SECRET = 3, b"secret"


def received(rank: int, secret: bytes = SECRET, group: str = "generation 1") -> bytes:
    """What arrives at a rank where all send their codes."""
    sent = [codes(secret, group, SIZE, sender=sender) for sender in range(SIZE)]
    return b"".join(one[rank * CODE_BYTES : (rank + 1) * CODE_BYTES] for one in sent)


@pytest.mark.parametrize("rank", range(SIZE))
def test_codes_of_all_ranks_are_accepted(rank: int) -> None:
    assert check(received(rank), rank, SIZE, SECRET, "generation 1") == ""


@pytest.mark.parametrize(
    "wrong",
    [
        received(1, secret=b"another"),
        received(1, group="generation 2"),
        received(0),
        received(1)[:CODE_BYTES] * SIZE,
        bytes(SIZE * CODE_BYTES),
        received(1)[:-1] + bytes([received(1)[-1] ^ 1]),
        b"",
    ],
    ids=["secret", "generation", "receiver", "sender", "zeros", "a bit", "nothing"],
)
def test_codes_for_another_secret_generation_sender_or_receiver_are_refused(wrong: bytes) -> None:
    assert "does not know the secret of generation 1" in check(wrong, 1, SIZE, SECRET, "generation 1")


def test_no_two_codes_are_alike() -> None:
    every = b"".join(codes(SECRET, "generation 1", SIZE, sender=sender) for sender in range(SIZE))
    assert len({every[start : start + CODE_BYTES] for start in range(0, len(every), CODE_BYTES)}) == SIZE * SIZE
