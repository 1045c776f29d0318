"""Ranks prove to each other, over the connections that they have just made, that they are the members of the generation.

Gloo takes whoever connects first for the rank that it expects. So before a group counts as formed, each rank sends every other
rank a code that only a holder of the group's secret can compute. The secret comes from the control store, which serves members
alone. A code is bound to generation, group, sender and receiver, so a stranger cannot reuse the codes that it receives.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CODE_BYTES = 32


def prove(gloo: Any, rank: int, size: int, secret: bytes, group: str, guard: Callable[[dist.Work], dist.Work]) -> str:
    """Exchange codes with every other rank, over the connection to that rank. This is a collective of all ranks.

    ``gloo`` is a ``ProcessGroupGloo``, whose collectives torch's stubs leave out. ``guard`` returns what to wait for.

    Returns what is wrong; an empty string if nothing is. Does not raise, because an error's frames would keep the group alive.
    """
    if size == 1:
        return ""
    mine = torch.frombuffer(bytearray(codes(secret, group, size, sender=rank)), dtype=torch.uint8)
    theirs = torch.empty_like(mine)
    try:
        guard(gloo.alltoall_base(theirs, mine, [], [])).wait()
    except RuntimeError as error:
        return f"the ranks of {group} could not prove to each other who they are: {error}"
    return check(theirs.numpy().tobytes(), rank, size, secret, group)


def codes(secret: bytes, group: str, size: int, *, sender: int) -> bytes:
    """Return the codes that a rank sends, in the order of the receivers; there is one for itself, too."""
    return b"".join(_code(secret, group, sender, receiver) for receiver in range(size))


def check(received: bytes, rank: int, size: int, secret: bytes, group: str) -> str:
    """Say which rank has not sent its code for this one; an empty string if all have."""
    for sender in range(size):
        found = received[sender * CODE_BYTES : (sender + 1) * CODE_BYTES]
        if not hmac.compare_digest(found, _code(secret, group, sender, rank)):
            return (
                f"who is connected to rank {rank} as rank {sender} does not know the secret of {group}: somebody else has taken "
                "the place of a worker; see docs/security.md"
            )
    return ""


def _code(secret: bytes, group: str, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, f"{group}/{sender}/{receiver}".encode(), hashlib.sha256)
