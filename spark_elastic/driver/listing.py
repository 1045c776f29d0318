"""HostListing: which machines may be used, according to the discovery script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spark_elastic.driver.hosts import Host


@dataclass(slots=True)
class HostListing:
    """The last listing: machines by name or address, each with the number of workers that it may run, None for any number.

    A machine that has never been listed is left alone, because Spark decides where tasks run.
    """

    slots: Mapping[str, int | None] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)

    def update(self, slots: Mapping[str, int | None]) -> None:
        """Take the discovery script's present listing: slots by host, None if it gives no number."""
        self.slots = slots
        self._known.update(slots)

    def plan(self, hosts: Iterable[Host]) -> tuple[list[Host], list[Host]]:
        """Return the hosts to drain (the youngest of a machine that has too many) and the drained hosts to use again."""
        if not self._known:
            return [], []
        machines: dict[str, list[Host]] = {}
        for host in hosts:
            name = self._name_of(host)
            if name is not None:
                machines.setdefault(name, []).append(host)
        drain: list[Host] = []
        use: list[Host] = []
        for name, group in machines.items():
            limit = self.slots.get(name, 0)
            allowed = len(group) if limit is None else limit
            active = [host for host in group if not host.draining]
            drain += active[allowed:]
            use += [host for host in group if host.unlisted][: max(allowed - len(active), 0)]
        return drain, use

    def _name_of(self, host: Host) -> str | None:
        names = (host.name, host.name.partition(".")[0], host.address)
        return next((name for name in names if name in self._known), None)
