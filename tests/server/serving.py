"""A server on a free port with a tiny checkpoint, in this process; and one of many per test."""

from __future__ import annotations

import socket as sockets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.patience import PATIENCE_S
from twin.calibrate.node import calibrated_node
from twin.engine.opening import open_source
from twin.server.app import App
from twin.server.expected import Expected
from twin.server.guard import Guard, make_guard
from twin.server.limits import Limits
from twin.server.listen import bound, server
from twin.server.open import make_app, opened

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALL: dict[str, Any] = {"blocks": 1}


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    port: int
    app: App

    def client(self) -> httpx.Client:
        """Without certificates, whose loading takes longer than most requests."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False)

    def wait_idle(self, seconds: float = PATIENCE_S) -> None:
        """Raises where something still runs or waits then."""
        late = time.monotonic() + seconds
        while self.app.worker.running or self.app.worker.waiting:
            assert time.monotonic() < late, "the engine did not become free"
            time.sleep(0.005)

    @contextmanager
    def expecting(self, expected: Expected) -> Iterator[None]:
        """In place of the twin's own, which a thread that ends later would put there."""
        for thread in threading.enumerate():
            if thread.name == "twin":
                thread.join(PATIENCE_S)
        before, self.app.predicted.expected = self.app.predicted.expected, expected
        try:
            yield
        finally:
            self.app.predicted.expected = before


@contextmanager
def running(
    checkpoint: Path,
    template_file: Path | None = None,
    *,
    greedy: bool = False,
    limits: Limits | None = None,
    guard: Guard | None = None,
    chosen: dict[str, Any] | None = None,
    reuse: bool = True,
) -> Iterator[Running]:
    guard = guard or make_guard("127.0.0.1", None, [], [])
    node, source = calibrated_node("1xhost"), open_source(str(checkpoint))
    listening: sockets.socket = bound("127.0.0.1", 0)
    port = listening.getsockname()[1]
    options = SMALL | (chosen or {})
    with (
        listening,
        opened(
            source,
            checkpoint,
            node,
            options,
            lambda _: None,
            greedy=greedy,
            template=template_file,
            reuse=reuse,
        ) as (model, session, plan),
    ):
        app = make_app(model, session, plan, node, guard, limits or Limits())
        uvicorn = server(app)
        thread = threading.Thread(target=uvicorn.run, args=[[listening]], daemon=True)
        thread.start()
        late = time.monotonic() + PATIENCE_S
        while not uvicorn.started:
            assert time.monotonic() < late, "the server did not start"
            time.sleep(0.005)
        try:
            yield Running(f"http://127.0.0.1:{port}", port, app)
        finally:
            uvicorn.should_exit = True
            thread.join(15)
            app.worker.close()
