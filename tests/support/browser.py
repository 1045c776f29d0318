"""A headless Chromium, driven through a pipe in the DevTools protocol. ``make browser`` fetches one; see ``find_chromium``."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

FETCHED = Path(__file__).parents[2] / ".browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
# A browser that is root, in a container, has no sandbox of its own to make; what it shows here is ours.
OPTIONS = [
    "--headless=shell",
    "--no-sandbox",
    "--no-zygote",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--remote-debugging-pipe",
]


def find_chromium() -> str | None:
    """Return the Chromium that ``make browser`` has fetched, else one that is installed, else None."""
    fetched = FETCHED / "chromium"
    return str(fetched) if fetched.exists() else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless browser, from ``__enter__`` to ``__exit__``. Each call blocks until the browser has answered."""

    def __init__(self, width: int = 1240, height: int = 900, dark: bool = False) -> None:
        self.complaints: list[str] = []  # errors of scripts, and what the page's policy has refused
        self._size = {"width": width, "height": height}
        self._dark = dark
        self._number = 0
        self._rest = b""
        self._session: str | None = None

    def __enter__(self) -> Browser:
        chromium = find_chromium()
        assert chromium is not None, "make browser"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        libraries = ":".join(filter(None, (str(FETCHED / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
        environment = {**os.environ, "HOME": self._profile.name}
        if chromium.startswith(str(FETCHED)):
            environment |= {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_PATH": str(FETCHED / "fonts")}
        reads, self._writing = os.pipe()
        self._reading, writes = os.pipe()
        # The protocol wants descriptors 3 and 4, which a shell can move to where Python's own descriptors do not collide.
        command = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, chromium, *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            env=environment,
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        target = self._call("Target.createTarget", url="about:blank", **self._size)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", **self._size, deviceScaleFactor=1, mobile=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._writing)
        os.close(self._reading)
        self._process.terminate()
        self._process.wait(timeout=20)
        self._profile.cleanup()

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page has loaded and its script has run."""
        self._call("Page.navigate", url=address)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Return what JavaScript in the page gives, as plain data; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true, looked at whenever the page changes."""
        script = f"""new Promise((done, failed) => {{
          const holds = () => {condition};
          if (holds()) return done(true);
          const seen = new MutationObserver(() => holds() && (seen.disconnect(), done(true)));
          seen.observe(document, {{ subtree: true, childList: true, characterData: true, attributes: true }});
          setTimeout(() => failed(new Error("it did not come true: " + {json.dumps(condition)})), {1000 * seconds});
        }})"""
        self.evaluate(script)

    def text(self) -> str:
        """Return the text that the page shows."""
        shown: str = self.evaluate("document.body.innerText")
        return shown

    def picture(self, path: Path) -> None:
        """Write what the page shows, all of its height, into a PNG file."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._reading, 2**16)
            assert data, "the browser has ended"
            self._rest += data
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(message["params"]["entry"]["text"])
        return message
