"""What a process needs to join a job: where the driver is, and the key that proves membership."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.credentials import Credentials


@dataclass(frozen=True, slots=True)
class Ticket:
    """Travels to tasks in Spark's closure and to workers over a private socket, never by environment or arguments."""

    run_id: str
    addresses: tuple[tuple[str, int], ...]
    credentials: Credentials
    network_interface: str | None = None
