"""Serves the page of a running job on this machine, to whoever has the printed address.

The address holds a token, so that other users of the machine, and pages of other sites in the same browser, learn nothing.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from spark_elastic._json import Json
from spark_elastic._plain import all_plain
from spark_elastic.protocol.records import Entry, JobFailed, JobFinished
from spark_elastic.timeline.follower import LogFollower
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import facts, render, waiting
from spark_elastic.timeline.summary import clock

ADDRESS = "127.0.0.1"
REFRESH_SECONDS = 1.0
# If facts take long to compute, because the log is long, the page waits this many times as long before it fetches them again.
REFRESH_PAUSE = 5
LONGEST_REFRESH_SECONDS = 20.0
# A job that trains reports about every second. A job that has been silent for longer than this is drawn up to its last event.
SILENT_SECONDS = 30.0
REQUEST_SECONDS = 30.0

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest, so that a saved page has it, too
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # addresses hold the token
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class LiveRun:
    """One run of a growing log, by default the last; a run that begins later takes its place. Thread-safe.

    now: seconds since 1970, by the clock of this machine's files
    """

    path: Path
    run_id: str | None = None
    now: Callable[[], float] = time.time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _follower: LogFollower = field(init=False)
    _version: str = ""
    _facts: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._follower = LogFollower(self.path)

    def facts(self) -> tuple[str, dict[str, Json]]:
        """Read what is new in the log, and return the facts of the page with their version."""
        with self._lock:
            sentence = self._read()
            begun = time.monotonic()
            entries = self._follower.run(self.run_id)
            silent = 0 if _is_over(entries) else self._silent_seconds()
            # While a run is not over, time passes on the page even if nothing happens.
            version = f"{hash((self._follower.place, sentence, silent)):x}"
            if version != self._version:
                unread = self._follower.unread
                if sentence or not entries:
                    why = f" {unread}." if unread.count else ""
                    self._facts = waiting((sentence or f"No run has begun in {self.path} yet.") + why)
                else:
                    until = self.now() if silent < SILENT_SECONDS else 0.0
                    self._facts = facts(read_history(entries, until), unread, present="goes on")
                refresh = min(max(REFRESH_PAUSE * (time.monotonic() - begun), REFRESH_SECONDS), LONGEST_REFRESH_SECONDS)
                self._version = version
                self._facts["live"] = {
                    "version": version,
                    "refresh": round(refresh, 1),
                    "silent": f"nothing was written for {clock(silent)}" if silent >= SILENT_SECONDS else "",
                }
            return self._version, self._facts

    def _read(self) -> str:
        """Read further. Return what the page waits for; an empty string if there is something to see."""
        try:
            if not self._follower.read():
                return f"Waiting for {self.path}: there is no such file yet."
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}."
        if self.run_id is not None and not self._follower.run(self.run_id):
            return f"Waiting for the run {self.run_id}, which is not in {self.path} yet."
        return ""

    def _silent_seconds(self) -> int:
        """Return for how many seconds nothing has been written."""
        with suppress(OSError):
            return max(int(self.now() - self.path.stat().st_mtime), 0)
        return 0


def _is_over(entries: Sequence[Entry]) -> bool:
    # An event about dropped events may follow the job's last one.
    return any(isinstance(entry.record, (JobFinished, JobFailed)) for entry in entries[-2:])


class PageServer(ThreadingHTTPServer):
    """Serves one run from ``__enter__`` to ``__exit__``, at ``address``. Raises ``OSError`` if the port is not available."""

    daemon_threads = True

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"--port must be a port, or 0 for a free one, not {port}")
        self.run = run
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(f"port {port} is in use: give --port another, or leave it out for a free one") from error
            raise OSError(f"port {port} cannot be opened: {error.strerror}") from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that has closed its connection. Anything else is a bug, whose traceback is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def serve(self, ready: Callable[[str], object]) -> None:
        """Call ``ready`` with the address, and serve until SIGINT or SIGTERM. Must be called in the main thread."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            ready(self.address)
            self.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page, its newest facts, and the page as a file."""

    server: PageServer
    timeout = REQUEST_SECONDS

    def version_string(self) -> str:
        return "spark_elastic"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses hold the token, and a live page sends a request every second."""

    def do_GET(self) -> None:
        """Answer a request that has the token and was made to this address."""
        hosts = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host") not in hosts:  # a foreign name that was made to resolve to this address
            self._refuse(HTTPStatus.FORBIDDEN, "This page is served at the address that the command has printed.")
            return
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "The address that the command has printed has a token, which this one lacks."
            )
        elif not slash:
            self._answer(HTTPStatus.PERMANENT_REDIRECT, b"", "text/plain", {"Location": f"/{token}/"})
        elif name in _CONTENTS:
            _CONTENTS[name](self)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def do_HEAD(self) -> None:
        """Answer like GET, without the content."""
        self.do_GET()

    def _send_page(self) -> None:
        _, present = self.server.run.facts()
        self._answer(HTTPStatus.OK, render(present).encode(), "text/html")

    def _send_facts(self) -> None:
        version, present = self.server.run.facts()
        if self.headers.get("If-None-Match") == version:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json")
        else:
            self._answer(HTTPStatus.OK, json.dumps(all_plain(present), allow_nan=False).encode(), "application/json")

    def _send_file(self) -> None:
        _, present = self.server.run.facts()
        kept = {name: value for name, value in present.items() if name != "live"}
        name = {"Content-Disposition": 'attachment; filename="timeline.html"'}
        self._answer(HTTPStatus.OK, render(kept).encode(), "text/html", name)

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, f"{sentence}\n".encode(), "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, further: dict[str, str] | None = None) -> None:
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        with suppress(ConnectionError):  # a closed browser does not wait for its answer
            self.send_response(status)
            for name, value in {**headers, **(further or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)


_CONTENTS: dict[str, Callable[[_Handler], None]] = {
    "": _Handler._send_page,
    "facts.json": _Handler._send_facts,
    "save": _Handler._send_file,
}
