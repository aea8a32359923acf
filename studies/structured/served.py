"""First tokens and kinds of requests of a `twin serve` on this computer, as a client sees them:

    served.py NAME OUT.csv MODEL NODE

MODEL has random weights and made-up words. NAME is that of the tree. Behind the kernel: from a
request's first byte sent to the first event read, without the kernel's own time until then. Each
request has a connection of its own.
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

START_S = 120.0
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = "aaaa aaab aaac "
DRAWN = {"temperature": 0.7, "top_k": 50, "seed": 5}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
ITEM = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": TEXT}}


def schema(wanted: Mapping[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted}}
    return {"response_format": form}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "the same bias": {"ignore_eos": True, "logit_bias": {"5": 1}},
    "repetition penalty": {"ignore_eos": True, "repetition_penalty": 1.2},
    "a schema of a text": schema(TEXT),
    "a schema of a list": schema({"type": "array", "minItems": 60, "items": ITEM}),
    "a call": {"tools": [FUNCTION], "tool_choice": "required"},
}
COLUMNS = (
    *("tree", "what", "requests", "prompt", "kept", "tokens", "first_ms", "kernel_ms"),
    *("behind_ms", "behind_p90_ms", "tokens_per_s"),
)


class Answer(NamedTuple):
    first_ms: float
    timings: dict[str, Any]
    usage: dict[str, Any]

    @property
    def behind_ms(self) -> float:
        return self.first_ms - float(self.timings["prompt_ms"])


@contextmanager
def serving(model: str, node: str) -> Iterator[int]:
    """The port of a server until the block ends."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        words = ["serve", model, "--random", "1", "--node", node, "--port", str(port)]
        words += ["--chat-template", str(template), "--max-context", "8192", "--served-name", "m"]
        process = subprocess.Popen([sys.executable, "-m", "twin", *words], env=os.environ)
        late = time.monotonic() + START_S
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > late:
                        raise SystemExit("the server did not start") from None
                    time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait()


def ask(port: int, words: Sequence[str], most: int, more: Mapping[str, Any]) -> Answer:
    """One chat, whose user's messages are `words`."""
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}} | DRAWN
    messages = [{"role": "user", "content": one} for one in words]
    sent = json.dumps(body | {"messages": messages, "max_tokens": most} | dict(more))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.connect()
    begun, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
    answer, last = connection.getresponse(), b""
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {answer.read()[:300]!r}")
    while (line := answer.readline()) and b"[DONE]" not in line:
        if line.startswith(b"data:"):
            first = first or (time.perf_counter() - begun) * 1e3
            last = line
    connection.close()
    said = json.loads(last[5:])
    return Answer(first, said["timings"], said["usage"])


def row(tree: str, what: str, answers: Sequence[Answer]) -> dict[str, Any]:
    behind = sorted(one.behind_ms for one in answers)
    last = answers[-1]
    return {
        "tree": tree,
        "what": what,
        "requests": len(answers),
        "prompt": last.usage["prompt_tokens"],
        "kept": last.timings["kept_tokens"],
        "tokens": last.usage["completion_tokens"],
        "first_ms": round(statistics.median(one.first_ms for one in answers), 2),
        "kernel_ms": round(statistics.median(one.timings["prompt_ms"] for one in answers), 2),
        "behind_ms": round(statistics.median(behind), 2),
        "behind_p90_ms": round(behind[int(len(behind) * 0.9)], 2),
        "tokens_per_s": round(statistics.median(one.timings["tokens_per_s"] for one in answers)),
    }


def measured(port: int, tree: str) -> Iterator[dict[str, Any]]:
    for more in KINDS.values():
        ask(port, [WORDS * 4], 8, more)
    short = [[f"{WORDS * 8}q{n % 7}"] for n in range(40)]
    yield row(tree, "first: 48 tokens", [ask(port, words, 3, {}) for words in short])
    calls = [ask(port, words, 3, KINDS["a call"]) for words in short[:30]]
    yield row(tree, "first: a call", calls)
    turns = [ask(port, [WORDS * 730, f"q{n}"], 3, {}) for n in range(16)]
    yield row(tree, "first: a second turn", turns[2:])
    for name, more in KINDS.items():
        yield row(tree, name, [ask(port, [WORDS * 8], 384, more) for _ in range(3)])
    yield from together(port, tree, ("plain", "a schema of a text", "a call"))


def together(port: int, tree: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Requests of several kinds that wait for each other."""
    found: dict[str, list[Answer]] = {name: [] for name in names}

    def work(name: str) -> None:
        for _ in range(2):
            found[name].append(ask(port, [WORDS * 8], 256, KINDS[name]))

    threads = [threading.Thread(target=work, args=[name]) for name in names]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    yield from (row(tree, f"{name}, next to others", found[name]) for name in names)


def main(tree: str, out: Path, model: str, node: str) -> None:
    fresh = not out.exists()
    with serving(model, node) as port, out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for one in measured(port, tree):
            writer.writerow(one)
            print(one, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])
