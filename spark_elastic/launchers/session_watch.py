"""SessionWatch: notices that a session of Spark Connect, or its server, has ended."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

# How often the session and its server are checked.
WATCH_SECONDS = 1.0
CONNECT_SECONDS = 5.0
# A server that refuses this many connections in a row is gone. If it is restarted, it has another session.
REFUSALS = 3
# How many seconds pass between two connections of ``find_end``.
PROBE_SECONDS = 0.2
DEFAULT_PORT = 15002


class SessionWatch:
    """Watches a session on a thread of its own, from ``__enter__`` to ``__exit__``, and calls ``on_end`` once, with the reason.

    Neither a running query nor a request may notice: Spark Connect's own client retries for many minutes before it gives up.
    """

    def __init__(self, session: SparkSession, on_end: Callable[[str], None]) -> None:
        self._session = session
        self._on_end = on_end
        self._host, self._port = endpoint_of(session)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-session", daemon=True)

    def __enter__(self) -> SessionWatch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def find_end(self) -> str:
        """Return why the session cannot be used any more; empty if it can. A single refusal may be chance, so this may wait."""
        refusals = 0
        while refusals < REFUSALS and not self._session.is_stopped and self._is_refused():
            refusals += 1
            time.sleep(PROBE_SECONDS)
        return self._reason(refusals)

    def _run(self) -> None:
        refusals = 0
        while not self._done.wait(WATCH_SECONDS):
            refusals = refusals + 1 if self._is_refused() else 0
            if reason := self._reason(refusals):
                self._on_end(reason)
                return

    def _reason(self, refusals: int) -> str:
        if self._session.is_stopped:
            return "its Spark Connect session was stopped"
        return f"the Spark Connect server at {self._host}:{self._port} is gone" if refusals >= REFUSALS else ""

    def _is_refused(self) -> bool:
        """Whether nothing listens at the server's address. A server that does not answer in time may only be busy."""
        if not self._host:
            return False
        try:
            socket.create_connection((self._host, self._port), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def find_end(session: SparkSession) -> str:
    """Return why a session cannot be used any more; empty if it can. This may wait for a second."""
    return SessionWatch(session, on_end=lambda reason: None).find_end()


def endpoint_of(session: SparkSession) -> tuple[str, int]:
    """Return host and port of a session's server; an empty host if the session was not made from an address."""
    builder = getattr(session.client, "_builder", None)
    found = re.fullmatch(r"\[?(.+?)\]?:(\d+)", str(getattr(builder, "endpoint", "")))
    return (found.group(1), int(found.group(2))) if found else ("", DEFAULT_PORT)
