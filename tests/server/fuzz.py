"""Wild requests on a real server while streams run.

    python -m tests.server.fuzz --requests 5000

Laws: each request is answered by a success or by an error as OpenAI's API has them, or its
connection ends where no whole request was sent; the server's log has no traceback; the server takes
at most 1 GiB of memory; no stream waits 100 ms for its next piece beyond what the kernel took for
it and the reader itself stood still.

Request n of a seed is drawn from both numbers alone: `--case SEED:N` sends it again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h11
import numpy as np

from tests.command_line import TINY
from tests.patience import PATIENCE_S
from tests.server import fuzz_schemas
from tests.server.serving import TEMPLATE, running
from twin.server import wire
from twin.server.limits import Limits

CONTEXT = 8192  # so that a megabyte of text is legal
STREAM_TOKENS = 1500
ANSWER_S = 300.0  # for an answer, on a busy computer and behind the streams
MOST_BYTES = 2**30  # of memory that the server takes
GAP_S = 0.1  # between two pieces of a stream
BEAT_S = 0.002
ALONE_S = 10.0
STATUSES = {200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 503}
JSON = b"Content-Type: application/json\r\n"
HOST = b"Host: localhost\r\n"
GENERATING = ("/v1/completions", "/v1/chat/completions")
KINDS: dict[str, Any] = {
    "/v1/completions": wire.Completion,
    "/v1/chat/completions": wire.Chat,
    "/tokenize": wire.Tokenize,
    "/detokenize": wire.Detokenize,
}
PAGES = ("/", "/health", "/metrics", "/version", "/v1/models", "/v1/models/tiny", "/twin", "/nope")


class Defect(AssertionError):
    """A broken law."""


# ---- what is sent --------------------------------------------------------------------------------


def wild(draw: random.Random) -> Any:
    """A value of any kind."""
    numbers = [0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, 8.0]
    texts = ["", "x", "\x00", "\ud7ff", "é🙂", "x" * 3000, "<bos>", "{{ 7 * 7 }}", "\u202e", "auto"]
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice(numbers),
        lambda: draw.choice(texts),
        lambda: draw.choice([None, True, False]),
        lambda: [wild(draw) for _ in range(draw.randrange(4))],
        lambda: {draw.choice(texts): wild(draw) for _ in range(draw.randrange(3))},
        lambda: draw.randrange(-3, 400),
    ]
    return draw.choice(kinds)()


def good(draw: random.Random, path: str) -> dict[str, Any]:
    """A request that the server can serve, with much of what it knows."""
    text = "".join(draw.choice("abc é🙂\n<bos>{%") for _ in range(draw.randrange(1, 60)))
    if path == "/tokenize":
        return draw.choice([{"prompt": text}, {"messages": [{"role": "user", "content": text}]}])
    if path == "/detokenize":
        return {"tokens": [draw.randrange(320) for _ in range(draw.randrange(300))]}
    chat = path == GENERATING[1]
    made: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 8, 40])}
    made |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    more: list[dict[str, Any]] = [
        {"temperature": draw.choice([0, 0.7, 2])},
        {"seed": draw.randrange(1000), "top_p": draw.choice([0, 0.5, 1]), "top_k": 5},
        {"n": draw.randrange(1, 5)},
        {"stop": draw.choice(["a", ["\n", "ab"], [], ""])},
        {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 2},
        {"stream": True, "stream_options": {"include_usage": draw.random() < 0.5}},
        {"ignore_eos": True, "step_times": True},
        {} if chat else {"prompt": draw.choice([[1, 2, 3], ["a", "b"], [[1], [2, 3]]])},
    ]
    for one in draw.sample(more, draw.randrange(4)):
        made |= one
    return made


def odd(draw: random.Random, path: str) -> Any:
    """A good request with one to three wild fields, or something else altogether."""
    if draw.random() < 0.05:
        return wild(draw)
    names = [*wire.whole(KINDS[path]).__struct_fields__, "unknown"]
    made = good(draw, path)
    for _ in range(draw.randrange(1, 4)):
        made |= {draw.choice(names): wild(draw)}
    return made


def broken(draw: random.Random, path: str) -> bytes:
    """No JSON, or JSON that nobody should unpack."""
    text = json.dumps(good(draw, path)).encode()
    name = json.dumps(draw.choice([*wire.whole(KINDS[path]).__struct_fields__, "x"])).encode()
    huge = draw.choice(
        [
            b"[" * 100_000,
            b"[" * 3000 + b"]" * 3000,
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            b"[" + b"[]," * 300_000 + b"[]]",
            b"[" + b"1," * 500_000 + b"1]",
            b"[" + b'"",' * 300_000 + b'""]',
            b"[" + b'{"role":"user"},' * 100_000 + b"{}]",
            b"9" * 100_000,
            b'"' + b"\\ud83d\\ude42" * 50_000 + b'"',
            b'"' + b"\\" * 99_999,
        ]
    )
    return draw.choice(
        [
            text[: draw.randrange(len(text))],
            text.replace(b'"', b"'"),
            text + b"}",
            b"\xff\xfe" + text,
            text.replace(b"a", b"\xc3"),
            text[:-1] + b"," + name + b":" + huge + b"}",
            text[:-1] + b"," + name + b":NaN}",
            text[:-1] + b"," + name + b":1e999}",
            text[:-1] + (b"," + name + b":1") * 1000 + b"}",
            huge,
            b"",
            b"null",
        ]
    )


def large(draw: random.Random) -> tuple[str, bytes]:
    """A legal request that takes long to read."""
    text = draw.choice(["a", "é", "a b\n", "<bos>", "🙂"])
    characters = draw.choice([2**16, 2**18, 2**20])
    made: list[tuple[str, Any]] = [
        ("/tokenize", {"prompt": (text * characters)[:characters]}),
        ("/detokenize", {"tokens": [draw.randrange(320)] * (characters // 4)}),
        ("/v1/completions", {"prompt": (text * characters)[:characters], "max_tokens": 1}),
        ("/v1/completions", {"prompt": [draw.randrange(320)] * characters, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * 50}] * 500}),
    ]
    path, body = draw.choice(made)
    return path, json.dumps(body, ensure_ascii=draw.random() < 0.5).encode()


def posted(path: str, body: bytes, more: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
    return head + HOST + JSON + more + b"\r\n" + body


def head(draw: random.Random) -> bytes:
    """A request line and headers such as nobody sends."""
    method = draw.choice(["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "X", "get"])
    path = draw.choice([*PAGES, *KINDS, "/%00", "/%ff/..", "//", "/?x=%", "*", "/" + "x" * 40_000])
    lines = [
        HOST,
        b"Host: evil.example\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\n",
        b"Origin: null\r\n",
        b"Content-Encoding: gzip\r\n",
        b"X: " + bytes(draw.randrange(256) for _ in range(20)) + b"\r\n",
        b"X-Long: " + b"y" * 40_000 + b"\r\n",
        b"X-Many: z\r\n" * 2000,
        b"X: a\r\n folded\r\n",
        b"no colon\r\n",
        JSON,
    ]
    version = draw.choice(["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/0.9", "HTTP/2", "XTTP/1.1"])
    chosen = [HOST] * (draw.random() < 0.7) + draw.sample(lines, draw.randrange(4))
    body = draw.choice([b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"\0" * 100])
    return f"{method} {path} {version}\r\n".encode() + b"".join(chosen) + b"\r\n" + body


# ---- what comes back -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    kind: str
    body: bytes


def answer(connection: socket.socket, method: bytes = b"POST", rest: bytes = b"") -> Answer | None:
    """The next one, None where the connection ends before it begins. Raises Defect."""
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**17)
    reader.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    reader.send(h11.EndOfMessage())
    found, body = None, b""
    try:
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA:
                reader.receive_data(connection.recv(2**16))
            elif isinstance(event, h11.Response):
                kinds = [value.decode() for name, value in event.headers if name == b"content-type"]
                found = event.status_code, kinds[0] if kinds else ""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and found:
                return Answer(*found, body)
            elif isinstance(event, h11.ConnectionClosed):
                return None
    except TimeoutError:
        raise Defect(f"no answer within {ANSWER_S:g} s") from None
    except (h11.RemoteProtocolError, ConnectionResetError, BrokenPipeError) as error:
        if found is not None and not isinstance(error, ConnectionError):
            raise Defect(f"an answer of {found} that is not whole: {error}") from error
        return None


def check(got: Answer | None, method: bytes = b"POST") -> str:
    """The outcome's name. Raises Defect."""
    if got is None:
        return "ended"
    if got.status not in STATUSES:
        raise Defect(f"status {got.status}: {got.body[:300]!r}")
    if method == b"HEAD" or got.status == 204:
        if got.body:
            raise Defect(f"status {got.status} to {method!r} with a body: {got.body[:300]!r}")
        return str(got.status)
    if got.status >= 400:
        check_error(got.body)
    elif got.kind.startswith("text/event-stream"):
        check_stream(got.body)
    elif got.kind.startswith("application/json"):
        parsed(got.body)
    return str(got.status)


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Defect(f"no JSON ({error}): {text[:300]!r}") from error


def check_error(text: bytes) -> None:
    error = parsed(text).get("error")
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        raise Defect(f"no error of OpenAI's API: {text[:300]!r}")
    message = error["message"]
    if not message or len(message) > 1000 or not message.isprintable():
        raise Defect(f"an error whose message is empty, long or not to be shown: {message[:300]!r}")


def check_stream(text: bytes) -> None:
    """Chunks of JSON, each choice's end, then the end; or an error."""
    parts = [part for part in text.split(b"\n\n") if part and not part.startswith(b": ")]
    if parts and parts[0].startswith(b"event: "):
        check_events(parts)
        return
    if not all(part.startswith(b"data: ") for part in parts):
        raise Defect(f"no stream of events: {text[-300:]!r}")
    if parts[-1] != b"data: [DONE]":
        check_error(parts[-1].removeprefix(b"data: "))
        return
    chunks = [parsed(part.removeprefix(b"data: ")) for part in parts[:-1]]
    choices = [one for chunk in chunks for one in chunk["choices"]]
    begun = {one["index"] for one in choices}
    ended = [one["index"] for one in choices if one["finish_reason"]]
    if sorted(ended) != sorted(begun):
        raise Defect(f"choices {sorted(begun)} began and {ended} ended")


def check_events(parts: Sequence[bytes]) -> None:
    """Of `/v1/responses`: numbered, and the last one ends the response."""
    found = [parsed(part.partition(b"\ndata: ")[2]) for part in parts]
    if [one["sequence_number"] for one in found] != list(range(len(found))):
        raise Defect(f"events out of order: {parts[-1][-300:]!r}")
    if found[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        raise Defect(f"events without an end: {parts[-1][-300:]!r}")


# ---- one request ---------------------------------------------------------------------------------


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)


def whole(draw: random.Random, port: int) -> str:
    path = draw.choice([*KINDS])
    body = json.dumps(good(draw, path) if draw.random() < 0.4 else odd(draw, path)).encode()
    return _answer(port, posted(path, body))


def constrained(draw: random.Random, port: int) -> str:
    return _answer(port, posted(*fuzz_schemas.constrained(draw)))


def no_json(draw: random.Random, port: int) -> str:
    path = draw.choice([*KINDS])
    return _answer(port, posted(path, broken(draw, path)))


def heavy(draw: random.Random, port: int) -> str:
    return _answer(port, posted(*large(draw)))


def odd_head(draw: random.Random, port: int) -> str:
    sent = head(draw)
    method = sent.partition(b" ")[0]
    with connected(port) as connection:
        with suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)  # perhaps it waits for more
        method = method if method == b"HEAD" else b"POST"
        return check(answer(connection, method), method)


def page(draw: random.Random, port: int) -> str:
    method = draw.choice([b"GET", b"GET", b"HEAD", b"OPTIONS", b"DELETE"])
    path = draw.choice(PAGES).encode()
    return _answer(port, method + b" " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n", method)


def garbage(draw: random.Random, port: int) -> str:
    sent = draw.choice(
        [
            bytes(draw.randrange(256) for _ in range(draw.randrange(1, 3000))),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,  # of TLS
            b"\r\n" * 1000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET",
        ]
    )
    with connected(port) as connection:
        with suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        return check(answer(connection))


def half_closed(draw: random.Random, port: int) -> str:
    path = draw.choice([*KINDS])
    with connected(port) as connection:
        connection.sendall(posted(path, json.dumps(good(draw, path)).encode()))
        connection.shutdown(socket.SHUT_WR)
        return check(answer(connection))


def drip(draw: random.Random, port: int) -> str:
    path = draw.choice([*KINDS, "/nope"])
    body = json.dumps(good(draw, path) if path in KINDS else {}).encode()
    sent = posted(path, body)
    with connected(port) as connection:
        with suppress(OSError):
            while sent:
                size = draw.randrange(1, 1 + len(sent))
                connection.sendall(sent[:size])
                sent = sent[size:]
                time.sleep(draw.random() * 0.02)
        return check(answer(connection))


def leaving(draw: random.Random, port: int) -> str:
    """In the middle of a request, or of a stream."""
    path = draw.choice(GENERATING)
    body = good(draw, path) | {"stream": draw.random() < 0.7, "max_tokens": 200}
    sent = posted(path, json.dumps(body).encode())
    with connected(port) as connection:
        if draw.random() < 0.3:
            sent = sent[: draw.randrange(len(sent))]
        connection.sendall(sent)
        if draw.random() < 0.5:
            connection.settimeout(draw.random() * 0.3)
            with suppress(OSError):
                connection.recv(draw.randrange(1, 2000))
        if draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    return "left"


def pipelined(draw: random.Random, port: int) -> str:
    paths = [draw.choice([*KINDS]) for _ in range(draw.randrange(2, 5))]
    sent = b"".join(posted(path, json.dumps(good(draw, path)).encode()) for path in paths)
    with connected(port) as connection:
        connection.sendall(sent)
        said, late = b"", time.monotonic() + ANSWER_S
        while said.count(b"HTTP/1.1 200 ") + said.count(b"HTTP/1.1 429 ") < len(paths):
            got = connection.recv(2**16)
            if not got or time.monotonic() > late:
                raise Defect(f"{len(paths)} requests in a row, and these answers: {said[:500]!r}")
            said += got
    return "all"


def continued(draw: random.Random, port: int) -> str:
    path = draw.choice([*KINDS, "/nope"])
    body = json.dumps(good(draw, path) if path in KINDS else {}).encode()
    sent = posted(path, body, b"Expect: 100-continue\r\n")
    with connected(port) as connection:
        connection.sendall(sent[: -len(body)])
        first = connection.recv(12)
        if first == b"HTTP/1.1 100":
            while not first.endswith(b"\r\n\r\n"):
                first += connection.recv(1)
            connection.sendall(body)
            return check(answer(connection))
        if not first.startswith(b"HTTP/1.1 4"):
            raise Defect(f"who waits for 100 Continue gets {first!r}")
    return "refused"


def _answer(port: int, sent: bytes, method: bytes = b"POST") -> str:
    with connected(port) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it was refused before its end
            connection.sendall(sent)
        got = answer(connection, method)
        if got is None and len(sent) < 2**20:
            raise Defect(f"a whole request without an answer: {sent[:300]!r}")
        return check(got, method)


ATTACKS: dict[Callable[[random.Random, int], str], float] = {
    whole: 40,
    constrained: 6,
    no_json: 12,
    heavy: 3,
    odd_head: 14,
    page: 6,
    garbage: 4,
    half_closed: 4,
    drip: 5,
    leaving: 6,
    pipelined: 3,
    continued: 3,
}


def attack(seed: int, number: int, port: int, only: str | None = None) -> str:
    """What came of one request: its kind and outcome. Raises Defect."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choices([*ATTACKS], [*ATTACKS.values()])[0]
    if only is not None:
        kind = next(one for one in ATTACKS if one.__name__ == only)
    try:
        return f"{kind.__name__} {kind(draw, port)}"
    except Defect as defect:
        raise Defect(f"--case {seed}:{number} ({kind.__name__}): {defect}") from defect
    except Exception as error:
        raise Defect(
            f"--case {seed}:{number} ({kind.__name__}): {type(error).__name__}: {error}"
        ) from error


# ---- streams -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Beat(threading.Thread):
    """How long this process stood still by itself: a sleep that should take 2 ms."""

    stopped: threading.Event = field(default_factory=threading.Event)
    pauses: list[tuple[float, float]] = field(default_factory=list)  # end, seconds too many

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        last = time.monotonic()
        while not self.stopped.is_set():
            time.sleep(BEAT_S)
            now = time.monotonic()
            if now - last > 5 * BEAT_S:
                self.pauses.append((now, now - last - BEAT_S))
            last = now

    def within(self, begin: float, end: float) -> float:
        """Seconds of pauses between two moments."""
        return sum(min(over, end - begin) for at, over in self.pauses if begin < at < end + 1)


@dataclass
class Streams:
    """What readers of streams saw, each of one after the other; several wait in turn."""

    gaps: list[float] = field(default_factory=list)
    # of gaps: neither the kernel's time for their tokens nor a pause of the reader's process
    unexplained: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # pieces behind the kernel, of each stream
    tokens: int = 0
    count: int = 0
    pause_s: float = 0.0  # the longest of the readers' process

    def summary(self) -> str:
        if not self.gaps:
            return "no stream"
        p50, p99, p999 = (1e3 * float(np.quantile(self.gaps, q)) for q in (0.5, 0.99, 0.999))
        return (
            f"{self.count} streams, {self.tokens} tokens in {len(self.gaps)} pieces; gaps: median "
            f"{p50:.1f}, p99 {p99:.1f}, p99.9 {p999:.1f}, longest {1e3 * max(self.gaps):.1f} ms; "
            f"longest without the kernel's time and the reader's own pauses "
            f"{1e3 * max([0.0, *self.unexplained]):.1f} ms; furthest behind the kernel's clock "
            f"{1e3 * max(self.late):.1f} ms; longest pause of the reader "
            f"{1e3 * self.pause_s:.1f} ms"
        )


@dataclass
class Reader:
    port: int
    beat: Beat = field(default_factory=Beat)
    found: Streams = field(default_factory=Streams)

    def read(self, number: int) -> None:
        """Raises Defect where a stream is not whole."""
        body = {
            "prompt": f"stream {number}",
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "temperature": 1,
            "stream": True,
            "step_times": True,
            "stream_options": {"include_usage": True},
        }
        said, arrivals = b"", list[tuple[float, int]]()
        sent = posted("/v1/completions", json.dumps(body).encode(), b"Connection: close\r\n")
        with connected(self.port) as connection:
            connection.sendall(sent)
            while got := connection.recv(2**16):
                said += got
                arrivals.append((time.monotonic(), len(said)))
        if b" 429 " in said[:40]:
            return
        if not said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise Defect(f"a stream without an end: {said[-300:]!r}")
        first = said.index(b"data: ")
        self._measured(said, [one for one in arrivals if one[1] > first])

    def _measured(self, said: bytes, arrivals: Sequence[tuple[float, int]]) -> None:
        made, pieces = 0, list[tuple[float, int]]()
        at, begun = 0, 0
        for when, upto in arrivals:
            for line in said[begun:upto].splitlines():
                at = line.find(b'"tokens":')
                made += int(line[at + 9 :].split(b"}")[0].split(b",")[0]) if at >= 0 else 0
            begun = upto
            pieces.append((when, made))
        times = json.loads(said[said.rindex(b"data: {") + 6 : said.rindex(b"\n\ndata: [DONE]")])
        ends = np.cumsum(times["timings"]["step_us"][0]) / 1e6
        if len(ends) != STREAM_TOKENS:
            raise Defect(f"a stream of {len(ends)} tokens for {STREAM_TOKENS}")
        moments = np.array([when for when, _ in pieces])
        kernel = np.array([ends[max(0, min(made, len(ends)) - 1)] for _, made in pieces])
        behind = moments - kernel
        self.found.late.append(float((behind - behind.min()).max()))
        for (begin, end), (first, last) in zip(pairwise(moments), pairwise(kernel), strict=True):
            self.found.gaps.append(float(end - begin))
            more = end - begin - (last - first)  # than the kernel took
            if more > GAP_S:
                self.found.unexplained.append(float(more) - self.beat.within(begin, end))
        self.found.tokens += len(ends)
        self.found.count += 1


def read_streams(port: int, readers: int) -> Streams:
    """Until the end of what this process is sent. Raises Defect."""
    reader, stop, failed = Reader(port), threading.Event(), list[BaseException]()
    reader.beat.start()

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                reader.read(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[n], daemon=True) for n in range(readers)]
    for one in threads:
        one.start()
    sys.stdin.read()
    stop.set()
    for one in threads:
        one.join(ANSWER_S)
    reader.beat.stopped.set()
    if failed:
        raise Defect(f"a stream failed: {failed[0]}") from failed[0]
    reader.found.pause_s = max((over for _, over in reader.beat.pauses), default=0.0)
    return reader.found


# ---- a run ---------------------------------------------------------------------------------------


def serve() -> None:
    """A server until the end of what it is sent; prints its port."""
    from twin.engine.save import save_checkpoint
    from twin.engine.tokenizer import make_byte_tokenizer
    from twin.engine.weights import random_weights

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        save_checkpoint(folder, random_weights(replace(TINY, context=CONTEXT), 1))
        make_byte_tokenizer(folder)
        template = Path(name) / "chat.jinja"
        template.write_text(TEMPLATE)
        limits = Limits(body_s=3.0, head_s=3.0, unread_s=0.3)
        with running(folder, template, limits=limits, chosen={"max_context": CONTEXT}) as server:
            print(server.port, flush=True)
            sys.stdin.read()


@contextmanager
def process(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of this module's own, until the block ends; what it prints then is read by the caller."""
    root = Path(__file__).resolve().parents[2]
    with log.open("wb") as said:
        made = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fuzz", *words],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        assert made.stdin is not None
        try:
            yield made
            if made.poll() is not None:
                raise Defect(f"{words[0]} ended: {log.read_text(errors='replace')[-1000:]}")
        finally:
            made.stdin.close()


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@contextmanager
def served(log: Path) -> Iterator[int]:
    """The port of a server in a process of its own. Raises Defect where it took too much memory."""
    with process("--serve", log=log) as made:
        assert made.stdout is not None
        yield int(made.stdout.readline())
        if (peak := _peak_bytes(made.pid)) > MOST_BYTES:
            raise Defect(f"the server took {peak / 2**20:.0f} MiB; at most {MOST_BYTES >> 20}")
    made.wait(PATIENCE_S)


@contextmanager
def streaming(port: int, readers: int, log: Path) -> Iterator[Streams]:
    """Streams that run until the end, read by a process of their own. Raises Defect."""
    found = Streams()
    with process("--read", str(port), "--readers", str(readers), log=log) as made:
        yield found
    assert made.stdout is not None
    said = made.stdout.read()
    if made.wait(ANSWER_S):
        raise Defect(log.read_text(errors="replace")[-2000:])
    vars(found).update(json.loads(said))


def run(
    requests: Sequence[int] | None,
    seed: int,
    *,
    clients: int,
    readers: int,
    log: Path,
    only: str | None = None,
) -> tuple[Counter[str], list[str], Streams]:
    """Outcomes, defects, and what streams saw meanwhile; without requests for ten seconds."""
    outcomes, defects = Counter[str](), list[str]()
    wanted = {"prompt": "the same", "max_tokens": 40, "temperature": 0, "seed": 1}
    same = posted("/v1/completions", json.dumps(wanted).encode())
    with served(log) as port:

        def text() -> str:
            with connected(port) as connection:
                connection.sendall(same)
                got = answer(connection)
            if got is None or got.status != 200:
                raise Defect(f"a good request gets {got}")
            return str(json.loads(got.body)["choices"][0]["text"])

        def one(number: int) -> None:
            try:
                outcomes[attack(seed, number, port, only)] += 1
            except Defect as defect:
                defects.append(str(defect))

        before = text()
        with (
            streaming(port, readers, log.with_name("streams")) as streams,
            concurrent.futures.ThreadPoolExecutor(clients) as pool,
        ):
            list(pool.map(one, requests or []))
            time.sleep(ALONE_S if requests is None else 0)
        if text() != before:
            defects.append("the same request is answered otherwise afterwards")
    if "Traceback" in (logged := log.read_text(errors="replace")):
        defects.append(f"the server's log: {logged[logged.index('Traceback') :][:3000]}")
    return outcomes, defects, streams


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="that send at the same time")
    parser.add_argument("--readers", type=int, default=2, help="of streams")
    parser.add_argument("--only", choices=[one.__name__ for one in ATTACKS])
    parser.add_argument("--case", help="SEED:NUMBER of one request")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    if args.read:
        print(json.dumps(asdict(read_streams(args.read, args.readers))))
        return 0
    numbers: Sequence[int] = range(args.requests)
    if args.case:
        args.seed, number = map(int, args.case.split(":"))
        numbers = [number]
    with tempfile.TemporaryDirectory() as folder:
        log, begun = Path(folder) / "log", time.monotonic()
        if not args.case:
            _, _, alone = run(None, args.seed, clients=1, readers=args.readers, log=log)
            print("streams alone:", alone.summary(), flush=True)
        outcomes, defects, streams = run(
            numbers,
            args.seed,
            clients=args.clients,
            readers=args.readers,
            log=log,
            only=args.only,
        )
    took_s = time.monotonic() - begun
    print(f"{len(numbers)} requests, {took_s:.0f} s: {dict(sorted(outcomes.items()))}")
    print("streams meanwhile:", streams.summary())
    slow = [gap for gap in streams.unexplained if gap > GAP_S]
    print(f"{len(defects)} defects, {len(slow)} gaps longer than {1e3 * GAP_S:g} ms")
    for defect in defects[:20]:
        print(defect)
    return int(bool(defects or slow))


if __name__ == "__main__":
    sys.exit(main())
