"""A client of `twin serve` in the standard library alone, and what the server's process costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S, END_S = 180, 60, 20
COMPUTING = "still computing"  # the twin next to the server, which would take its share of a core


class Failed(Exception):
    """The server did not do what the request said."""


@dataclass(slots=True)
class Heard:
    """A streamed answer as its client saw it; times of this process's clock."""

    sent_s: float
    first_s: float = 0.0  # the first event
    last_s: float = 0.0  # the last event with tokens
    ended_s: float = 0.0
    first_tokens: int = 0  # of the first event that has any
    tokens: int = 0
    events: int = 0
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def first_token_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def whole_rate(self) -> float:
        """Tokens/s from the request to the end of its answer."""
        return self.tokens / (self.ended_s - self.sent_s)

    @property
    def between_rate(self) -> float:
        """Tokens/s between the first and the last event."""
        taken = self.last_s - self.first_s
        return (self.tokens - self.first_tokens) / taken if taken else 0.0

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            raise Failed(str(event["error"]))
        self.events += 1
        self.first_s = self.first_s or now
        for choice in event["choices"]:
            self.texts.append(choice["delta"].get("content", ""))
        if tokens := event.get("tokens", 0):
            self.first_tokens = self.first_tokens or tokens
            self.tokens += tokens
            self.last_s = now
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings


@dataclass(frozen=True, slots=True)
class Server:
    """A running `twin serve`."""

    pid: int
    host: str
    port: int

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A whole answer."""
        link = HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        try:
            link.request("GET" if body is None else "POST", path, *_sent(body))
            answer = link.getresponse()
            said = answer.read()
        finally:
            link.close()
        if answer.status != 200:
            raise Failed(f"{path}: {answer.status} {said[:300]!r}")
        return json.loads(said)

    def count(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a chat's prompt."""
        found: list[int] = self.ask("/tokenize", {"messages": list(messages)})["tokens"]
        return found

    def stream(
        self, messages: Sequence[dict[str, str]], tokens: int, temperature: float = 0.0
    ) -> Heard:
        """A chat's answer of so many tokens, each event timed as it comes."""
        body = {
            "messages": list(messages),
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": 1,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        link = HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        link.connect()
        try:
            heard = Heard(time.perf_counter())
            link.request("POST", "/v1/chat/completions", *_sent(body))
            answer = link.getresponse()
            if answer.status != 200:
                raise Failed(f"{answer.status} {answer.read()[:300]!r}")
            while line := answer.readline():
                now = time.perf_counter()
                if line.strip() == b"data: [DONE]":
                    heard.ended_s = now
                elif line.startswith(b"data: "):
                    heard.take(json.loads(line[6:]), now)
        finally:
            link.close()
        if heard.tokens != tokens or not heard.ended_s:
            raise Failed(f"{heard.tokens} of {tokens} tokens came")
        return heard

    def cpu_s(self) -> tuple[float, str]:
        """What its threads have run so far, and which file of /proc says it."""
        tasks = Path(f"/proc/{self.pid}/task")
        try:
            ran = sum(int((one / "schedstat").read_text().split()[0]) for one in tasks.iterdir())
        except OSError:
            ran = 0
        if ran:
            return ran / 1e9, "schedstat"
        said = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK"), "stat"


def _sent(body: dict[str, Any] | None) -> tuple[bytes | None, dict[str, str]]:
    content = None if body is None else json.dumps(body).encode()
    return content, {"Content-Type": "application/json"}


@contextmanager
def serving(model: str, node: str, *words: str) -> Iterator[Server]:
    """`twin serve` in a process of its own, until the block ends. Raises Failed."""
    command = [
        sys.executable,
        "-m",
        "twin",
        "serve",
        model,
        "--node",
        node,
        "--json",
        "--port",
        "0",
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [*command, "--json", "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        late = Timer(START_S, child.kill)
        late.start()
        try:
            said = _said(child)
            late.cancel()
            if said is None:
                log.seek(0)
                raise Failed(f"twin serve {model}: {log.read()[-2000:]}")
            host, _, port = said["url"].removeprefix("http://").rpartition(":")
            made = Server(child.pid, host, int(port))
            while COMPUTING in made.ask("/twin")["twin"]["reason"]:
                time.sleep(0.05)
            yield made
        finally:
            late.cancel()
            _end(child)


def _said(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What a server says of itself once it listens; None where it ended before."""
    assert child.stdout is not None
    lines = list[str]()
    while not lines or lines[-1] != "}\n":
        lines.append(child.stdout.readline())
        if not lines[-1]:
            return None
    found: dict[str, Any] = json.loads("".join(lines))
    return found


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
