"""A real browser for tests: Chromium without a window, driven over two pipes by its own protocol
(DevTools), with nothing else installed. It opens a page at a width, says what the page complained
about, and whether anything is cut off.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (1400, 800)
"""pixels: a screen, and half of one"""
HEIGHT = 900
TIMEOUT_S = 60.0
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
COMPLAINTS = ("error", "warning", "assert")
SETTLED = "document.readyState === 'complete' && (%s)"
CUT_OFF = """
(() => {
  const root = document.querySelector('article') || document.body;
  const found = [];
  const name = e => `${e.tagName} ${e.className.baseVal ?? e.className}: ${e.textContent.trim().slice(0, 60)}`;
  for (const e of root.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const style = getComputedStyle(e);
    const hides = style.overflowX === 'hidden' || style.overflowX === 'clip';
    if (hides && e.clientWidth > 1 && e.scrollWidth > e.clientWidth + 1) found.push('hidden part, ' + name(e));
    if (e.tagName === 'text') {
      const frame = e.ownerSVGElement.getBoundingClientRect();
      if (box.right > frame.right + 1 || box.left < frame.left - 1) found.push('outside of its picture, ' + name(e));
    }
  }
  const needed = document.documentElement.scrollWidth;
  if (needed > innerWidth) found.push(`the page needs ${needed} of ${innerWidth} pixels`);
  return found;
})()
"""


@dataclass(frozen=True)
class Shown:
    """What a page was like at one width."""

    errors: list[str]
    """what it wrote to the console as an error or a warning, exceptions, files that were not there"""
    cut_off: list[str]
    text: str


class Browser:
    """One process of Chromium; a context manager."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        # the protocol has fixed numbers of files: 3 to read from, 4 to write to
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)

    def look(
        self, address: str, width: int, ready: str = "true", picture: Path | None = None
    ) -> Shown:
        """Opens a page at a width of so many pixels, waits until the expression `ready` is true, and
        writes a picture of the whole page if it is given a file.
        """
        self._events.clear()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        self._call("Page.navigate", session, url=address)
        deadline = time.monotonic() + TIMEOUT_S
        while not self._value(session, SETTLED % ready):
            assert time.monotonic() < deadline, f"{address} is not ready: {self._errors()}"
            time.sleep(0.05)
        cut_off = self._value(session, CUT_OFF)
        text = self._value(session, "document.body.innerText")
        if picture is not None:
            shot = self._call("Page.captureScreenshot", session, captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        self._call("Target.closeTarget", targetId=target)
        return Shown(self._errors(), cut_off, text)

    def _value(self, session: str, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _errors(self) -> list[str]:
        found = []
        for event in self._events:
            method = event["method"]
            parameters = event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in COMPLAINTS:
                found.append(json.dumps(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] != "info":
                found.append(json.dumps(parameters["entry"]))
            elif method == "Network.loadingFailed" and not parameters.get("canceled"):
                found.append(json.dumps(parameters))
        return found

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer; events on the way are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self._events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser is gone"
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found
