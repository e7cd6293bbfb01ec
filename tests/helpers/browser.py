"""A headless Chromium that speaks the DevTools protocol over pipes: no driver, no port, no network.

Messages are JSON texts, each ended by a zero byte, through the browser's descriptors 3 and 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        their_read, our_write = os.pipe()
        our_read, their_write = os.pipe()
        # The shell moves the pipes to descriptors 3 and 4, where the browser looks for them.
        script = f'exec "$@" 3<&{their_read} 4>&{their_write}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self.reader, self.writer = our_read, our_write
        self.buffer = b""
        self.count = 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(30)
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.reader, 1 << 20)
            if not more:
                raise RuntimeError("the browser ended")
            self.buffer += more
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def open(
        self, page: Path | str, width: int = 1200, height: int = 900, fragment: str = "", dark: bool = False
    ) -> None:
        """Open a page from disk, or at an address, and clear the events of earlier pages."""
        self.call("Page.navigate", url="about:blank")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=(page if isinstance(page, str) else page.resolve().as_uri()) + fragment)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.value(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds} s: {expression}; {self.complaints()}")
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def complaints(self) -> list[str]:
        """Console errors and warnings, and uncaught exceptions, since the page was opened."""
        self.value("0")
        messages = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                messages.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            if event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                messages.append(json.dumps(event["params"]["args"])[:500])
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                messages.append(event["params"]["entry"]["text"])
        return messages

    def requests(self) -> list[str]:
        """Addresses requested since the page was opened, without the page and data: addresses."""
        self.value("0")
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def screenshot(self, path: Path, full: bool = True) -> None:
        parameters: dict[str, Any] = {"captureBeyondViewport": full}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            parameters["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **parameters)["data"]))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, TimeoutError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.reader)
        os.close(self.writer)
