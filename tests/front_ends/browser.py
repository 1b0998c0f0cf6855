"""A headless Chromium for tests of pages: started as it is, spoken to over its own pipe, without a package between."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PATIENCE = 120.0
"""Seconds for any answer; a busy machine is slow, and slow is not broken."""


def installed() -> str:
    """The path of a browser, or empty. ``ATTN_BROWSER`` names one that is not on the path."""
    return os.environ.get("ATTN_BROWSER") or next(filter(None, map(shutil.which, NAMES)), "")


class DoesNotStart(Exception):
    """There is a browser, and it does not run here."""


class Page:
    """One tab. Whatever the page logs as an error, and what it raises, is in ``errors``."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            heard, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert heard, "the browser is silent"
            found = os.read(self._from, 1 << 20)
            assert found, "the browser is gone"
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path) -> float:
        """Load a file, and return the seconds until its script had ended."""
        self._loaded = False
        started = time.monotonic()
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._hear()
        self.wait("document.readyState === 'complete'")
        return time.monotonic() - started

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited, and a click counts as the user's."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def screen(self, width: int, height: int, scheme: str = "light") -> None:
        """Size of the window, and whether its user likes it dark."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def without_script(self) -> None:
        """As in a browser that runs none."""
        self.ask("Emulation.setScriptExecutionDisabled", value=True)

    def picture(self, path: Path, height: int = 0) -> None:
        """Write what is seen as PNG; ``height``: the page's first so many pixels instead of the window's."""
        clip = {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": height, "scale": 1} if height else None
        more = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", **more)["data"]))


@contextlib.contextmanager
def page_in(browser: str) -> Iterator[Page]:
    """A tab of a fresh browser, which ends with the block."""
    from_us, to_browser = os.pipe()
    from_browser, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        # The protocol's pipe is descriptors 3 and 4 of the browser.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{from_us} 4>&{from_it}', browser, *options]
        process = subprocess.Popen(
            [*command, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(from_us, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(from_it)
        try:
            try:
                page = Page(to_browser, from_browser)
            except (AssertionError, OSError) as error:
                raise DoesNotStart(f"{browser}: {error}") from error
            yield page
        finally:
            os.close(to_browser)
            os.close(from_browser)
            process.kill()
            process.wait()
