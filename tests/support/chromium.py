"""A headless Chromium, driven by its own debugging protocol over two pipes; tests that need one are skipped where there is none."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end

PATIENCE_S = 120.0
"""A bound against hanging tests; the machine may be slow."""
_FIRST_COPY = 200
_OPTIONS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--no-first-run", "--no-default-browser-check", "--no-sandbox", "--remote-debugging-pipe",
    "--window-size=1400,900",
)  # fmt: skip


def path_of_chromium() -> str:
    """The program; skips the test without one."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    return found or pytest.skip("needs chromium")


class Page:
    """A tab of a Chromium that ends with the test, with what it has asked for and complained about."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        given, taken = (fcntl.fcntl(number, fcntl.F_DUPFD, _FIRST_COPY) for number in (ours[0], theirs[1]))
        self._profile = folder / "chromium"
        self._write = ours[1]
        self._read = theirs[0]
        command = [path_of_chromium(), *_OPTIONS, f"--user-data-dir={self._profile}", "about:blank"]
        words = ["bash", "-c", f'exec "$@" 3<&{given} 4>&{taken}', "chromium", *command]
        log = (folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(words, pass_fds=(given, taken), stdout=log, stderr=log, start_new_session=True)
        at_end(self.close)
        for number in (given, taken, ours[0], theirs[1]):
            os.close(number)
        log.close()
        self._bytes = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Load a page; returns once it is there."""
        self.call("Page.navigate", url=address)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, or that of its promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true."""
        until = time.monotonic() + PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"{script} stays {value!r}: {self.run('document.body.innerText')}"
            self.run("new Promise((done) => setTimeout(done, 10))")
        return value

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, as a person does: it counts only if nothing covers it."""
        at = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}});"
            " const b = e.getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def resize(self, width: int, height: int) -> None:
        """Give the page's part of the window another size, in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> bytes:
        """What the window shows, as a PNG."""
        return b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def figures(self) -> dict[str, float]:
        """What the protocol measures of the page, by name; `ThreadTime` in seconds of a processor."""
        return {each["name"]: each["value"] for each in self.call("Performance.getMetrics")["metrics"]}

    def requested(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.call("Runtime.evaluate", expression="0")
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[Any]:
        """Errors of scripts, and entries of the browser's log."""
        self.call("Runtime.evaluate", expression="0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def close(self) -> None:
        """End the browser and its children."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        socket = self._profile / "SingletonSocket"
        if socket.is_symlink():  # Chromium keeps it in a folder of its own in /tmp, which a killed one leaves
            shutil.rmtree(socket.readlink().parent, ignore_errors=True)
        for name in ("_read", "_write"):
            if (number := getattr(self, name)) >= 0:
                os.close(number)
                setattr(self, name, -1)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            block = os.read(self._read, 1 << 16)
            assert block, "the browser has ended"
            self._bytes += block
        message, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(message)


def timed(page: Page, work: Callable[[], object]) -> float:
    """Seconds of a processor that the page's main thread works until `work` is done. The machine may be busy, so a clock tells less."""
    before = page.figures()["ThreadTime"]
    work()
    return page.figures()["ThreadTime"] - before
