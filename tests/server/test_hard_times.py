"""Clients that leave, push, dawdle or lie: the engine lives, and the next request is served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.serving import Running, running
from twin.errors import ConfigError, EngineError
from twin.server.guard import make_guard
from twin.server.limits import Limits

LONG = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}


def held_back(server: Running, monkeypatch: pytest.MonkeyPatch, wait_s: float = 0.02) -> list[int]:
    """Makes the engine slow: each token waits in the worker's thread. The list grows by each token
    that waited.
    """
    whole = server.app.worker._session
    fast = whole.generate
    waited: list[int] = []

    def slow(*words: Any, on_token: Callable[[int], None], **more: Any) -> Any:
        def noted(token: int) -> None:
            job = server.app.worker._running
            if job is not None and not job.cancelled:  # the kernel has long made all of them
                time.sleep(wait_s)
                waited.append(token)
            on_token(token)

        return fast(*words, on_token=noted, **more)

    monkeypatch.setattr(whole, "generate", slow)
    return waited


def sent(server: Running, body: dict[str, Any], *, stream: bool) -> socket.socket:
    """A connection on which a request was sent, and nothing was read."""
    text = json.dumps(body | {"stream": stream}).encode()
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return made


def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_kernel(
    stream: bool, live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        waited = held_back(live, patch, 0.2)
        gone = sent(live, LONG, stream=stream)
        if stream:
            assert gone.recv(10)  # the first token is there
        until(lambda: live.app.worker.running)
        gone.close()
        live.wait_idle()
        assert len(waited) < LONG["max_tokens"], "it was free only because all tokens were made"
    assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_who_leaves_the_queue_is_never_run(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    held_back(live, monkeypatch)
    first = sent(live, LONG, stream=True)
    assert first.recv(10)
    second = sent(live, LONG, stream=True)
    until(lambda: live.app.worker.waiting == 1)
    second.close()
    until(lambda: live.app.worker.waiting == 0)
    assert live.app.worker.running == 1
    first.close()
    live.wait_idle()


def test_a_full_queue_says_when_to_come_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(checkpoint, limits=Limits(waiting=1)) as server, server.client() as client:
        with monkeypatch.context() as patch:
            held_back(server, patch)
            first = sent(server, LONG, stream=True)
            assert first.recv(10)
            second = sent(server, SHORT, stream=False)
            until(lambda: server.app.worker.waiting == 1)
            third = client.post("/v1/completions", json=SHORT)
            assert third.status_code == 429
            assert int(third.headers["retry-after"]) >= 1
            assert third.json()["error"]["code"] == "queue_full"
            first.close()
        assert b"200 OK" in second.recv(4096)  # it was its turn


def test_a_server_without_a_queue_serves_who_comes_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(checkpoint, limits=Limits(waiting=0)) as server, server.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            server.wait_idle()
        with monkeypatch.context() as patch:
            held_back(server, patch)
            first = sent(server, LONG, stream=True)
            assert first.recv(10)
            assert client.post("/v1/completions", json=SHORT).status_code == 429
            first.close()


def test_an_engine_that_stalls_is_reported_by_health_until_it_moves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(checkpoint, limits=Limits(stall_s=0.2)) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        with monkeypatch.context() as patch:
            held_back(server, patch, 1.0)
            first = sent(server, SHORT, stream=True)
            assert first.recv(10)
            until(lambda: client.get("/health").status_code == 503)
            error = client.get("/health").json()["error"]
            assert error["type"] == "server_error"
            assert "made nothing" in error["message"]
            server.wait_idle()
        assert client.get("/health").status_code == 200


def test_two_at_once_get_each_its_own(live: Running) -> None:
    prompts = [f"prompt {n}" for n in range(8)]

    def ask(prompt: str) -> str:
        body = LONG | {"prompt": prompt, "max_tokens": 30}
        with live.client() as client:
            answer = client.post("/v1/completions", json=body)
        return str(answer.json()["choices"][0]["text"])

    alone = [ask(prompt) for prompt in prompts]
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: found.update({p: ask(p)})) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == alone


def test_an_engine_that_failed_is_tried_and_served_again(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise EngineError("watchdog: it hangs")

    with monkeypatch.context() as patch:
        patch.setattr(live.app.worker._session, "generate", fails)
        for stream in (True, False):
            answer = http.post("/v1/completions", json=SHORT | {"stream": stream})
            assert answer.status_code == 500
            assert "it hangs" in answer.json()["error"]["message"]
        live.wait_idle()
        health = http.get("/health")
        assert health.status_code == 503
        assert "start the server again" in health.json()["error"]["message"]
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    live.wait_idle()
    assert http.get("/health").status_code == 200


def test_a_server_that_ends_says_so_to_who_listens_and_to_who_waits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(checkpoint) as server:
        held_back(server, monkeypatch, 0.05)
        first = sent(server, LONG, stream=True)
        assert first.recv(10)
        second = sent(server, SHORT, stream=False)
        until(lambda: server.app.worker.waiting == 1)
    answers = []
    for one in (first, second):
        said = b""
        while got := one.recv(4096):
            said += got
        answers.append(said)
    # The kernel may long have made all of the first; its stream has an end in any case.
    assert answers[0].endswith(b"\r\n0\r\n\r\n")
    assert b"going down" in answers[1]


def test_nothing_is_kept_for_others_unless_wanted(checkpoint: Path) -> None:
    with running(checkpoint, reuse=False) as server, server.client() as client:
        for _ in range(2):
            usage = client.post("/v1/completions", json=SHORT).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_bodies_too_large_or_too_slow_are_refused(checkpoint: Path) -> None:
    limits = Limits(body_bytes=1000, body_s=0.3, head_s=0.3)
    with running(checkpoint, limits=limits) as server, server.client() as client:
        large = client.post("/v1/completions", json=SHORT | {"prompt": "x" * 2000})
        assert large.status_code == 413
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        slow.sendall(head + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        assert b"408" in slow.recv(1000)
        for begun in (b"", head, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + head):
            dawdling = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            dawdling.sendall(begun)
            while dawdling.recv(4096):
                pass  # closed by the server, not by our own timeout
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("part", ['"a":"",', '"n":1,', '"x":[],'])
def test_a_body_of_very_many_parts_is_refused_unread(part: str, http: httpx.Client) -> None:
    head = {"content-type": "application/json"}
    for text in ('{%s"prompt":"x"}' % (part * 200_000), '{"prompt":[%s1]}' % ("1," * 600_000)):
        answer = http.post("/v1/completions", content=text.encode(), headers=head)
        assert answer.status_code == 413
        assert "at most" in answer.json()["error"]["message"]


def test_more_connections_than_the_limit_get_a_503_until_one_is_closed(checkpoint: Path) -> None:
    with running(checkpoint, limits=Limits(connections=4)) as server:
        idle = [
            socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            for _ in range(6)
        ]
        with server.client() as client:
            assert client.get("/health").status_code == 503
        for one in idle:
            one.close()
        late = time.monotonic() + PATIENCE_S
        while True:
            with server.client() as client:
                if client.post("/v1/completions", json=SHORT).status_code == 200:
                    break
            assert time.monotonic() < late
            time.sleep(0.02)


def test_a_head_too_large_is_refused_in_whatever_pieces_it_comes(live: Running) -> None:
    for before in (b"GET /version?" + b"x" * 40_000, b"GET /version"):
        head = before + b" HTTP/1.1\r\nHost: localhost\r\nX-Long: "
        client = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_S)
        client.sendall(head + b"y" * 40_000 + b"\r\n\r\n")
        said = b""
        while got := client.recv(4096):
            said += got
        assert said.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_what_is_packed_is_not_guessed(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=SHORT, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "Content-Encoding 'gzip'" in answer.json()["error"]["message"]
    plain = http.post("/v1/completions", json=SHORT, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_a_head_alone_may_be_requested(http: httpx.Client) -> None:
    for path in ("/health", "/", "/v1/models"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) == len(http.get(path).content)
    assert http.head("/v1/completions").status_code == 405


def test_no_more_tokens_are_spelt_than_others_can_wait_for(checkpoint: Path) -> None:
    with running(checkpoint, limits=Limits(tokens=3)) as server, server.client() as client:
        assert client.post("/detokenize", json={"tokens": [1] * 3}).status_code == 200
        answer = client.post("/detokenize", json={"tokens": [1] * 4})
        assert answer.status_code == 400
        assert "at most 3" in answer.json()["error"]["message"]


def test_a_key_is_required_everywhere_but_on_the_page_and_health(checkpoint: Path) -> None:
    key = "0123456789abcdef"
    with (
        running(checkpoint, guard=make_guard("127.0.0.1", key, [], [])) as server,
        server.client() as client,
    ):
        for path, open_ in (("/", True), ("/health", True), ("/metrics", False), ("/twin", False)):
            assert (client.get(path).status_code == 200) is open_
        ask = "/v1/completions"
        assert client.post(ask, json=SHORT).status_code == 401
        for wrong in ("", "Bearer", "Bearer 0123456789abcdeg", f"Basic {key}", "Bearer é"):
            answer = client.post(ask, json=SHORT, headers={b"authorization": wrong.encode()})
            assert answer.status_code == 401
        right = {"authorization": f"Bearer {key}"}
        assert client.post(ask, json=SHORT, headers=right).status_code == 200


def test_foreign_pages_and_foreign_names_are_refused(checkpoint: Path) -> None:
    friend = "https://chat.example.org"
    with (
        running(checkpoint, guard=make_guard("127.0.0.1", None, [friend], [])) as server,
        server.client() as client,
    ):
        health = "/health"
        assert client.get(health, headers={"host": "evil.example"}).status_code == 403
        assert client.get(health, headers={"origin": "https://evil.example"}).status_code == 403
        assert client.get(health, headers={"origin": "null"}).status_code == 403
        own = client.get(health, headers={"origin": server.url})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers
        preflight = {"origin": friend, "access-control-request-method": "POST"}
        before = client.options("/v1/completions", headers=preflight)
        assert before.status_code == 204
        assert "content-length" not in before.headers  # RFC 9110, 8.6
        assert before.headers["access-control-allow-origin"] == friend
        assert "access-control-allow-credentials" not in before.headers
        # OpenAI's client for JavaScript tells of itself in headers of its own.
        names = "authorization,content-type,x-stainless-os,x-stainless-retry-count,cookie,x-other"
        before = client.options(
            "/v1/completions", headers=preflight | {"access-control-request-headers": names}
        )
        allowed = before.headers["access-control-allow-headers"].split(", ")
        assert {*names.split(",")} & {*allowed} == {*names.split(",")[:4]}


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "https://a.example/path",
        "https://",
        "https://[::1",
        "https://a.example:99999",
        "https://me@a.example",
        "https://ä.example",
        "ftp://a.example",
        "a.example",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        make_guard("127.0.0.1", None, [origin], [])


@pytest.mark.parametrize(
    "name", ["", "a b", "a.example:80", "https://a.example", "a/b", "*", "a\n"]
)
def test_a_name_that_no_request_carries_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        make_guard("127.0.0.1", None, [], [name])


def test_names_and_origins_are_compared_as_they_are_sent() -> None:
    made = make_guard("127.0.0.1", None, ["HTTPS://Chat.Example.org:8443"], ["Chat.Example.ORG"])
    assert made.origins == {"https://chat.example.org:8443"}
    assert made.names is not None
    assert {"chat.example.org", "localhost", "::1"} <= made.names
    both = make_guard("127.0.0.1", None, [], ["0:0:0:0:0:0:0:5"]).names
    assert both is not None
    assert "::5" in both


def test_what_everybody_could_use_is_not_started_without_a_key() -> None:
    for wrong in (
        ("0.0.0.0", None, []),
        ("0.0.0.0", "short", []),
    ):
        with pytest.raises(ConfigError):
            make_guard(wrong[0], wrong[1], wrong[2], [])
    assert make_guard("0.0.0.0", "x" * 16, [], []).names is None
