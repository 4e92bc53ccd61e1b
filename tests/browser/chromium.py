"""Chromium: a headless browser over its DevTools pipe, with nothing but the standard library.

Opens pages, tells what they logged and asked for, evaluates expressions and takes pictures. Judges nothing.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Chromium", "View", "chromium"]

_DEADLINE_S = 90.0
_HEIGHT = 900
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Above all that bash moves below: its redirections must not close what they read from.
_LEAST_FD = 10
_FLAGS = (
    "--headless=new",
    # Tests run as root, and root has no sandbox.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


class View(NamedTuple):
    """How a page is looked at: width in CSS pixels, and which colours the reader prefers (`light`, `dark`)."""

    width: int
    colours: str = "light"


class Chromium:
    """One browser with one tab."""

    def __init__(self, reading: int, writing: int) -> None:
        self.complaints: list[str] = []  # what pages wrote to the console as an error, and what they threw
        self.asked: list[str] = []  # every URL that a page asked for, the page's own first
        self._reading, self._writing = reading, writing
        self._left = b""
        self._number = 0
        self._loaded = False
        self._view = View(1280)
        self._session: str | None = None
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, view: View) -> None:
        """Load a file, and wait until it and its charts stand; what was heard of an earlier page is forgotten."""
        self.complaints.clear()
        self.asked.clear()
        self._view, self._loaded = view, False
        prefers = {"name": "prefers-color-scheme", "value": view.colours}
        self._call("Emulation.setEmulatedMedia", {"features": [prefers]})
        self._resize(_HEIGHT)
        self._call("Page.navigate", {"url": path.as_uri()})
        deadline = time.monotonic() + _DEADLINE_S
        while not self._loaded:
            self._hear(deadline)
        # Charts are drawn a frame or two after the page has loaded.
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise what it brings."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, height: int | None = None) -> None:
        """A PNG of the page's first so many CSS pixels; without `height` of the whole page."""
        self._resize(height or int(self.evaluate("document.scrollingElement.scrollHeight")))
        taken = self._call("Page.captureScreenshot", {"format": "png"})
        path.write_bytes(base64.b64decode(taken["data"]))

    def _resize(self, height: int) -> None:
        size = {"width": self._view.width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            answer = self._hear(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _hear(self, deadline: float) -> dict[str, Any]:
        """The next message; an event is noted."""
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {_DEADLINE_S:.0f} s"
            data = os.read(self._reading, 1 << 20)
            assert data, "the browser has ended"
            self._left += data
        line, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
            self.complaints.append(json.dumps(params["args"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser whose profile lies in a folder, and end it and its children."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    assert program, "there is no Chromium on PATH: scripts/setup --tests installs it"
    to_browser, from_browser = _pipe(), _pipe()
    # Chromium reads its descriptor 3 and writes 4; bash puts ours there.
    moved = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", moved, program, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for theirs in (to_browser[0], from_browser[1]):
        os.close(theirs)
    try:
        yield Chromium(from_browser[0], to_browser[1])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=_DEADLINE_S)
        for ours in (from_browser[0], to_browser[1]):
            os.close(ours)


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, for reading and for writing, out of the way of 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
