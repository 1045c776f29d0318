"""HostDiscovery: asks the user's script every second which machines may be used."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping

from spark_elastic.errors import DiscoveryError

logger = logging.getLogger("spark_elastic")

POLL_SECONDS = 1.0
SCRIPT_SECONDS = 30.0


def parse_hosts(text: str) -> dict[str, int | None]:
    """Read lines of ``host`` or ``host:slots`` into slots by host, None if a line has no number. Blank lines are skipped.

    An IPv6 address followed by slots has to be in brackets. Raises ``DiscoveryError`` naming the line.
    """
    slots: dict[str, int | None] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        host, colon, number = line.rpartition(":")
        if not colon or (line.count(":") > 1 and not host.endswith("]")):
            host, number = line, ""
        host = host.strip("[]")
        if not host or " " in host or (colon and number and not number.isdigit()):
            raise DiscoveryError(f"host_discovery_script must print 'host' or 'host:slots' a line, not {line!r}")
        slots[host] = int(number) if number else None
    return slots


class HostDiscovery:
    """Runs ``script`` every second on a thread of its own, from ``__enter__`` to ``__exit__``.

    ``__enter__`` waits for the first run, and raises ``DiscoveryError`` if it fails. Later failures are warnings, and the last
    list stays in force. The thread calls ``on_listed`` with each list that differs from the one before.
    """

    def __init__(self, script: str | os.PathLike[str], on_listed: Callable[[Mapping[str, int | None]], None]) -> None:
        self._script = os.path.expanduser(os.fspath(script))
        self._on_listed = on_listed
        self._listed: Mapping[str, int | None] = {}
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-discovery", daemon=True)

    def __enter__(self) -> HostDiscovery:
        if shutil.which(self._script) is None:
            raise DiscoveryError(f"host_discovery_script={self._script!r} is not an executable file")
        self._tell(self._ask())
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopping.set()
        process = self._process
        if process is not None:
            _kill(process)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        warned = ""
        while not self._stopping.wait(POLL_SECONDS):
            try:
                self._tell(self._ask())
                warned = ""
            except Exception as error:  # e.g. no file descriptor is left, or the output is not text
                if not self._stopping.is_set() and str(error) != warned:
                    warned = str(error)
                    logger.warning("%s; the hosts listed before stay", error)

    def _tell(self, slots: Mapping[str, int | None]) -> None:
        if slots != self._listed:
            self._listed = slots
            self._on_listed(slots)

    def _ask(self) -> dict[str, int | None]:
        try:
            self._process = subprocess.Popen(
                [self._script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise DiscoveryError(f"host_discovery_script={self._script!r} cannot be run: {error}") from error
        try:
            with self._process as process:
                try:
                    out, err = process.communicate(timeout=SCRIPT_SECONDS)
                except subprocess.TimeoutExpired:
                    _kill(process)
                    raise DiscoveryError(
                        f"host_discovery_script={self._script!r} did not end within {SCRIPT_SECONDS:g} s"
                    ) from None
        finally:
            self._process = None  # its number may soon be another's
        if process.returncode != 0:
            raise DiscoveryError(
                f"host_discovery_script={self._script!r} failed with code {process.returncode}: {err.strip()[-500:]}"
            )
        return parse_hosts(out)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the script and everything that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
