"""What is known of a process that may end at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process | None) -> str:
    """Its command line; empty where it has just ended, and where there is none."""
    try:
        return " ".join(process.cmdline()) if process is not None else ""
    except psutil.Error:
        return ""


def ports_of(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses and ports at which it listens; none where it has just ended."""
    try:
        connections = process.net_connections()
    except psutil.Error:
        return set()
    return {(entry.laddr.ip, entry.laddr.port) for entry in connections if entry.status == psutil.CONN_LISTEN}
