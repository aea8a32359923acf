"""An explorer on a free port, in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.patience import PATIENCE_S
from twin.explore.app import App
from twin.explore.desk import Desk, Work
from twin.explore.processes import Processes
from twin.explore.rows import Rows
from twin.server.guard import make_guard
from twin.server.limits import Limits
from twin.server.listen import bound, server
from twin.study.store import Store

SHORT = "llama-3.2-1b 1xh200 layers=1"  # a question that is answered in little time


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    app: App

    def get(self, path: str, **query: Any) -> httpx.Response:
        """Without certificates, whose loading takes longer than most requests."""
        return httpx.get(f"{self.url}/{path}", params=query, timeout=PATIENCE_S, verify=False)

    def parts(self, path: str, **query: Any) -> list[dict[str, Any]]:
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        events = [event for event in answer.text.split("\n\n") if event.startswith("data: {")]
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def running(
    folder: Path,
    work: Work | None = None,
    own: dict[str, str] | None = None,
    processes: Processes | None = None,
) -> Iterator[Running]:
    listening = bound("127.0.0.1", 0)
    rows = Rows(Store(folder / "points"), processes)
    guard = make_guard("127.0.0.1", None, [], [])
    app = App(Desk(work or Work(), rows), guard, Limits(), own or {}, folder / "out")
    with listening:
        uvicorn = server(app)
        thread = threading.Thread(target=uvicorn.run, args=[[listening]], daemon=True)
        thread.start()
        late = time.monotonic() + PATIENCE_S
        while not uvicorn.started:
            assert time.monotonic() < late, "the explorer did not start"
            time.sleep(0.005)
        try:
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", app)
        finally:
            uvicorn.should_exit = True
            thread.join(15)
            app.worker.close()
