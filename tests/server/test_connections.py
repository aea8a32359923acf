"""What a connection may carry: one request after the other whose ends nobody can mistake, and no
body that is never to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.server.serving import Running, running
from twin.engine.generate import Request
from twin.server.guard import make_guard
from twin.server.job import Ended, Event, Failed, Job, Text
from twin.server.limits import Limits
from twin.server.worker import Worker

KEY = "0123456789abcdef"
AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
JSON = b"Content-Type: application/json\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
CONNECTIONS = 12


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Running]:
    """A server with a key and few connections, which does not wait long for what it does not
    read.
    """
    guard = make_guard("127.0.0.1", KEY, [], [])
    limits = Limits(connections=CONNECTIONS, unread_s=0.2, body_s=1.0)
    with running(checkpoint, guard=guard, limits=limits) as server:
        yield server


def opened(server: Running, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    made.sendall(sent)
    return made


def received(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    said = b""
    try:
        while got := connection.recv(65536):
            said += got
    except ConnectionResetError:
        pass
    connection.close()
    return said


def healthy(connection: socket.socket) -> None:
    said = b""
    while not said.endswith(b'{"status":"ok"}'):
        got = connection.recv(4096)
        assert got, said
        said += got


# ---- bodies that are never to end ----------------------------------------------------------------

# Refused by what their heads say, and answered without their bodies.
UNREAD = {
    404: b"POST /nope HTTP/1.1\r\nHost: localhost\r\n" + AUTH,
    401: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON,
    403: b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n" + AUTH + JSON,
    405: b"DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + AUTH,
    415: b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + AUTH,
    200: b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    204: b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
@pytest.mark.parametrize("status", UNREAD)
def test_who_sends_a_body_that_nobody_reads_for_ever_is_answered_and_let_go(
    status: int, framing: bytes, guarded: Running
) -> None:
    piece = b"x" if framing.startswith(b"Content") else b"1\r\nx\r\n"
    connection = opened(guarded, UNREAD[status] + framing)
    connection.settimeout(0.05)
    said, late = b"", time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < late, "the connection is held"
        try:
            connection.sendall(piece)
            got = connection.recv(4096)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
        if not got:
            break
        said += got
    assert said.startswith(b"HTTP/1.1 %d" % status)
    assert b"connection: close" in said.lower()


def test_bodies_that_nobody_reads_shut_nobody_out(guarded: Running) -> None:
    held = [
        opened(guarded, UNREAD[404] + b"Content-Length: 100000\r\n\r\n") for _ in range(CONNECTIONS)
    ]
    late = time.monotonic() + PATIENCE_S
    while True:
        for one in held:
            with suppress(OSError):
                one.send(b"x")
        with guarded.client() as client:
            if client.get("/health").status_code == 200:
                break
        assert time.monotonic() < late
        time.sleep(0.02)
    for one in held:
        one.close()


def test_who_takes_nothing_of_its_answers_shuts_nobody_out(checkpoint: Path) -> None:
    limits = Limits(connections=3, write_s=0.2)
    with running(checkpoint, limits=limits) as server, server.client() as client:
        pages = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300  # megabytes of answers
        held = [opened(server, pages) for _ in range(3)]
        assert all(one.recv(10) for one in held)
        late = time.monotonic() + PATIENCE_S
        while client.get("/health").status_code != 200:
            assert time.monotonic() < late
            time.sleep(0.05)
        for one in held:
            one.close()


def test_a_refusal_whose_body_came_whole_keeps_its_connection(guarded: Running) -> None:
    for status, head in UNREAD.items():
        whole = head + b"Content-Length: 5\r\n\r\nhello"
        connection = opened(
            guarded, whole + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        said = received(connection)
        assert said.startswith(b"HTTP/1.1 %d" % status)
        assert said.count(b"HTTP/1.1 ") == 2
        assert b'{"status":"ok"}' in said


def test_who_waits_for_100_continue_is_refused_at_once(guarded: Running) -> None:
    head = UNREAD[401] + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    said = received(opened(guarded, head))
    assert said.startswith(b"HTTP/1.1 401")
    assert b"100 Continue" not in said


def test_a_connection_too_many_is_refused_and_the_others_are_served(checkpoint: Path) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(checkpoint, limits=Limits(connections=3)) as server:
        held = [opened(server, health) for _ in range(3)]
        for one in held:
            healthy(one)
        said = received(opened(server, health))
        assert said.startswith(b"HTTP/1.1 503")
        assert b'"code":"connections"' in said
        for one in held:
            one.sendall(health)
            healthy(one)
            one.close()


# ---- requests whose ends two readers may see at two places ---------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + AUTH + JSON
OLD = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SIZE = b"%d" % len(BODY)
NEXT = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + AUTH + b"\r\n"
AMBIGUOUS = {
    "length and chunks": POST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    + CHUNKED,
    "chunks and length": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    + CHUNKED,
    "the same length and chunks": POST
    + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(CHUNKED)
    + CHUNKED,
    "chunks in HTTP/1.0": OLD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunks in HTTP/1.0 that is to stay": OLD
    + b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
    + CHUNKED,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "two lengths in one": POST + b"Content-Length: 5, %s\r\n\r\n%s" % (SIZE, BODY),
    "a length with a sign": POST + b"Content-Length: +%s\r\n\r\n%s" % (SIZE, BODY),
    "a length with a fraction": POST + b"Content-Length: %s.0\r\n\r\n%s" % (SIZE, BODY),
    "a length in hexadecimal": POST + b"Content-Length: 0x%x\r\n\r\n%s" % (len(BODY), BODY),
    "no length at all": POST + b"Content-Length: \r\n\r\n" + BODY,
    "a space before a colon": POST + b"Content-Length : %s\r\n\r\n%s" % (SIZE, BODY),
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
    "a coding twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKED,
    "a coding in two headers": POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + CHUNKED,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "a coding behind a control character": POST
    + b"Transfer-Encoding: \x0bchunked\r\n\r\n"
    + CHUNKED,
    "a bare carriage return in a header": POST
    + b"X-A: b\rContent-Length: 5\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "a bare carriage return that ends a line": POST
    + b"X-A: b\rTransfer-Encoding: chunked\r\n\r\n"
    + CHUNKED,
    "a zero byte in a header": POST + b"X-A: b\0\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "a folded coding": POST
    + b"X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a header without a name": POST + b": 5\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "two hosts": POST + b"Host: evil.example\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "no host": POST.replace(b"Host: localhost\r\n", b"")
    + b"Content-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    "a chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\n\r\n" + CHUNKED,
    "a chunk size with a sign": POST + b"Transfer-Encoding: chunked\r\n\r\n+" + CHUNKED,
    "a chunk that is longer": POST
    + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_after_a_request_without_a_clear_end_comes_no_other(case: str, guarded: Running) -> None:
    """RFC 9112, 6.1 and 6.3: refused, or answered alone; in either case the connection ends."""
    said = received(opened(guarded, AMBIGUOUS[case] + NEXT))
    assert said.count(b"HTTP/1.1 ") == 1, said
    assert b'"version"' not in said
    assert said.startswith(b"HTTP/1.1 4"), said
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.few(12)
@pytest.mark.parametrize("broken", [b"zz\r\n", b"1\r\nxx\r\n", b"5\r\nhello\r\n-1\r\n\r\n"])
@pytest.mark.parametrize("method", [b"POST", b"HEAD", b"GET", b"OPTIONS"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/nope", b"/health"])
def test_a_body_that_breaks_off_being_one_costs_an_answer_at_most(
    path: bytes, method: bytes, broken: bytes, guarded: Running
) -> None:
    """In one piece with its head, and after it."""
    head = method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + AUTH + JSON
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    log, kept = logging.getLogger("uvicorn.error"), BufferingHandler(1000)
    log.addHandler(kept)
    try:
        for wait_s in (None, 0.05):
            if wait_s is None:
                said = received(opened(guarded, head + broken + NEXT))
            else:
                connection = opened(guarded, head)
                time.sleep(wait_s)
                with suppress(OSError):
                    connection.sendall(broken + NEXT)
                said = received(connection)
            assert said.count(b"HTTP/1.1 ") == 1, said
            assert b'"version"' not in said
    finally:
        log.removeHandler(kept)
    assert not [one for one in kept.buffer if one.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: %s\r\n\r\n%s" % (SIZE, BODY),
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
        POST + b"transfer-encoding: Chunked\r\n\r\n" + CHUNKED,
        POST + b"Content-Length: %s\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, SIZE, BODY),
        POST + b"X-A: b\r\n folded\r\nContent-Length: %s\r\n\r\n%s" % (SIZE, BODY),
    ],
)
def test_a_request_with_a_clear_end_is_followed_by_the_next(sent: bytes, guarded: Running) -> None:
    last = NEXT[:-2] + b"Connection: close\r\n\r\n"
    said = received(opened(guarded, sent + last))
    assert said.count(b"HTTP/1.1 200") == 2, said
    assert b'"version"' in said


# ---- a server that ends --------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 2, 5])
@pytest.mark.parametrize("stay", [0, 1])
def test_a_server_that_ends_between_choices_says_so(choices: int, stay: int) -> None:
    """All choices that were begun end, and then the client hears why there are no more."""

    class Session:
        def generate(self, prompt: Any, *, max_tokens: int, on_token: Any, **_: Any) -> Any:
            on_token(97)
            return SimpleNamespace(tokens=[97], stop_reason="length", kept=0)

        def cancel(self) -> None:
            pass

    class Watcher:
        def ended(self, job: Job, *_: Any) -> float:
            nonlocal heard
            heard += 1
            if heard > stay:
                closing = threading.Thread(target=worker.close, args=(1,))
                closing.start()
                while not job.cancelled:
                    time.sleep(0.001)
            return 0.0

        def failed(self) -> None:
            pass

    heard, events = 0, list[Event]()
    worker = Worker(Session(), None, Watcher(), waiting=4)  # type: ignore[arg-type]

    async def listen() -> None:
        job = Job([Request([1], 1)] * choices, asyncio.get_running_loop())
        worker.submit(job)
        async for batch in job.batches(0, 1):
            events.extend(batch)

    asyncio.run(listen())
    worker.close()
    ended = [one for one in events if isinstance(one, Ended)]
    assert len(ended) == min(choices, stay + 1)
    assert len([one for one in events if isinstance(one, Text)]) == len(ended)
    if len(ended) < choices:
        assert isinstance(events[-1], Failed)
        assert events[-1].problem.status == 503
        assert "going down" in str(events[-1].problem)
