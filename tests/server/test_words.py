"""A checkpoint's words in the server: its template, its ends, and who waits for whose text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Raw

from tests.engine.gguf_cases import CONFIGS, write_case
from tests.patience import PATIENCE_S
from tests.server.serving import TEMPLATE, Running, running
from twin.engine.tokenizer import Tokenizer
from twin.server.limits import Limits
from twin.server.wire import Chat, Completion, Message

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    own = "{{ bos_token }}{% for m in messages %}({{ m.content }}<|sep|>{% endfor %}"
    write_case(path, CONFIGS["qwen3"], words=True, template=own)
    return path


@pytest.fixture(scope="module")
def of_gguf(gguf: Path) -> Iterator[Running]:
    with running(gguf) as server:
        yield server


def test_a_gguf_file_chats_by_its_own_template(of_gguf: Running) -> None:
    with of_gguf.client() as http:
        assert http.get("/twin").json()["chat"] is True
        body = {"messages": HI, "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        tokens = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    assert tokens == [259, *b"(hi", 261], "the file's first token, the words, and its <|sep|>"


def test_another_template_has_the_files_special_tokens(gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    with running(gguf, other) as server, server.client() as http:
        tokens = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    assert tokens == [259, *b"hi", 260]


def test_what_the_template_writes_behind_an_answer_ends_one(of_gguf: Running) -> None:
    """<|sep|> is no end by its look, and no key of the file says that it is one."""
    served = of_gguf.app.served
    assert served.tokenizer.stop == {260}
    (work,) = served.chat_work(Chat(messages=[Message(role="user", content="hi")])).requests
    assert work.stop_tokens == {260, 261}
    (work,) = served.completion_work(Completion(prompt=Raw(b'"hi"'), ignore_eos=True)).requests
    assert work.stop_tokens == set()


def test_stop_token_ids_end_an_answer_also_where_the_models_own_ends_do_not(
    http: httpx.Client,
) -> None:
    body = {"messages": HI, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    full = http.post("/v1/chat/completions", json=body | {"logprobs": True}).json()["choices"][0]
    said = [one["bytes"] for one in full["logprobs"]["content"]]
    at = next(n for n, spelt in enumerate(said) if len(spelt) == 1 and said.index(spelt) == n > 1)
    cut = http.post("/v1/chat/completions", json=body | {"stop_token_ids": said[at]}).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == at + 1
    assert full["message"]["content"].startswith(cut["choices"][0]["message"]["content"])


@pytest.mark.parametrize("tokens", [[-1], [10**6], [*range(65)], [1.5], "a"])
def test_stop_token_ids_that_are_none_are_refused_by_name(tokens: Any, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "stop_token_ids": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("stop_token_ids")


def test_no_stream_waits_for_another_clients_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, template_file: Path
) -> None:
    """More long texts than threads are stuck in the tokenizer, and everybody else is served."""
    stuck, begun = threading.Event(), threading.Semaphore(0)
    whole = Tokenizer._ids

    def slow(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
        if len(text) > 1000:
            begun.release()
            assert stuck.wait(PATIENCE_S)
        return whole(tokenizer, text, special=special)

    monkeypatch.setattr(Tokenizer, "_ids", slow)
    with (
        running(checkpoint, template_file, limits=Limits(long_bytes=1000)) as server,
        server.client() as http,
    ):
        texts = [threading.Thread(target=tokenized, args=[server]) for _ in range(40)]
        for thread in texts:
            thread.start()
        assert begun.acquire(timeout=PATIENCE_S)
        assert http.post("/tokenize", json={"prompt": "short"}).status_code == 200
        body = {"messages": HI, "max_tokens": 20, "temperature": 0, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[0][6:])["choices"]
        assert not begun.acquire(blocking=False), "one long text at a time"
        stuck.set()
        for thread in texts:
            thread.join(PATIENCE_S)


def tokenized(server: Running) -> None:
    with server.client() as http:
        assert http.post("/tokenize", json={"prompt": "x" * 5000}).status_code == 200


def test_the_template_of_these_tests_ends_no_turn(live: Running) -> None:
    assert "<|" not in TEMPLATE
    assert live.app.served.ends == live.app.served.tokenizer.stop
