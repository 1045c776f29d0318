"""Strangers: whoever connects to a port of the product and is none of its processes."""

from __future__ import annotations

import socket

CALLERS = 2000


def call(address: tuple[str, int]) -> bool:
    """Connect and go. Whether the kernel answered; on this machine it does so before ``connect`` returns, or never."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        return caller.connect_ex(address) in (0, 106) or _is_connected(caller)


def _is_connected(caller: socket.socket) -> bool:
    try:
        return bool(caller.getpeername())
    except OSError:
        return False
