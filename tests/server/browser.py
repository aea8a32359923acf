"""A headless Chromium, driven through its own pipe: nothing to install besides the browser."""

from __future__ import annotations

import atexit
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Chromium:
    """The browser of this process: it starts with the first page and ends with the process."""

    def __init__(self) -> None:
        assert CHROMIUM
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        theirs, self._to = os.pipe()
        self._back, mine = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{mine}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._folder}", "--no-first-run", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options],
            pass_fds=(theirs, mine),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(mine)
        self._rest, self._number = b"", 0
        atexit.register(self.end)

    def call(
        self, session: str, method: str, note: Callable[[dict[str, Any]], None], **parameters: Any
    ) -> dict[str, Any]:
        """The answer; `note` hears what is said of the session before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            if said.get("sessionId", "") == session:
                note(said)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._back], [], [], PATIENCE_S)[0], "the browser does not answer"
            got = os.read(self._back, 2**20)
            assert got, "the browser has ended"
            self._rest += got
        one, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        return found

    def end(self) -> None:
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._back)
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """A tab. `run` evaluates JavaScript, `until` waits for it to become true."""

    def __init__(self, chromium: Chromium) -> None:
        """With cookies and a cache of its own."""
        self._chromium, self._session = chromium, ""
        self.faults: list[str] = []  # what the page's own code threw, and what it could not load
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = ""
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._chromium.call(self._session, method, self._note, **parameters)

    def _note(self, said: dict[str, Any]) -> None:
        details = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(details["exceptionDetails"]))
        if said.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.faults.append(details["entry"]["text"])

    def run(self, code: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, code: str) -> None:
        late = time.monotonic() + PATIENCE_S
        while not self.run(code):
            assert time.monotonic() < late, code
            time.sleep(0.02)

    def show(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def key(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text,
                windowsVirtualKeyCode=code,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def shot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


_running: list[Chromium] = []


@contextmanager
def browser() -> Iterator[Page]:
    """A page of the browser that runs; after a failure the next one gets another browser."""
    if not _running:
        _running.append(Chromium())
    try:
        page = Page(_running[0])
        yield page
        page.close()
    except BaseException:
        _running.pop().end()
        raise
