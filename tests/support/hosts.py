"""Hosts with networks of their own: network namespaces of this machine, joined by a bridge. Takes root and ``ip``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

INTERFACE = "eth0"


class Hosts:
    """A context manager. ``__enter__`` raises ``OSError``, with what the system says, where such hosts cannot be made.

    driver: this machine's address in the hosts' network. addresses: those of the hosts. cables: the end of each host's cable on
    this machine, by the host's address.
    """

    def __init__(self, count: int) -> None:
        self.driver = f"10.213.{os.getpid() % 250}.1"
        self.addresses = [f"{self.driver[:-1]}{2 + number}" for number in range(count)]
        self.cables: dict[str, str] = {}
        self._spaces = {address: _name(f"h{number}") for number, address in enumerate(self.addresses)}
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            for space in self._spaces.values():
                as_root("ip", "netns", "add", space)
                undo.callback(as_root, "ip", "netns", "del", space)
                as_root("ip", "-n", space, "link", "set", "lo", "up")
            self._stack = undo.pop_all()
        with ExitStack() as undo:
            undo.push(self)
            cables = self.plug(INTERFACE, [f"{address}/24" for address in self.addresses], f"{self.driver}/24")
            self.cables = dict(zip(self.addresses, cables, strict=True))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prefix(self, host: str) -> list[str]:
        """Return what runs a command on a host."""
        return ["ip", "netns", "exec", self._spaces[host]]

    def plug(self, interface: str, addresses: Sequence[str], own: str | None = None) -> list[str]:
        """Give each host another interface, with these addresses in a network of their own; return the cables' other ends.

        own: an address of this machine in that network.
        """
        bridge = _name(f"b{interface}")
        as_root("ip", "link", "add", bridge, "type", "bridge")
        self._stack.callback(as_root, "ip", "link", "del", bridge)
        if own is not None:
            as_root("ip", "addr", "add", own, "dev", bridge)
        as_root("ip", "link", "set", bridge, "up")
        cables = []
        for number, (space, address) in enumerate(zip(self._spaces.values(), addresses, strict=True)):
            cable = _name(f"{interface}-{number}")
            as_root("ip", "link", "add", cable, "type", "veth", "peer", "name", interface, "netns", space)
            # Left to the end of its namespace, it would be there for a while after that.
            self._stack.callback(as_root, "ip", "link", "del", cable)
            as_root("ip", "link", "set", cable, "master", bridge, "up")
            # A new IPv6 address is of no use until nobody has claimed it for a second or two.
            at_once = ["nodad"] if ":" in address else []
            as_root("ip", "-n", space, "addr", "add", address, "dev", interface, *at_once)
            as_root("ip", "-n", space, "link", "set", interface, "up")
            cables.append(cable)
        return cables

    def block(self, host: str, other: str) -> None:
        """Cut two hosts off from each other in the first network; both reach the driver and all other hosts as before."""
        for here, there in ((host, other), (other, host)):
            as_root(*self.prefix(here), "ip", "route", "add", "blackhole", f"{there}/32")


def _name(what: str) -> str:
    return f"se{os.getpid()}{what}"


def as_root(*command: str) -> None:
    """Run a command that needs root. Raises ``OSError`` with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
