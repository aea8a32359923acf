"""`logprobs`: whole and streamed alike, as OpenAI's client reads them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import httpx
import pytest

from tests.server.serving import Running
from tests.server.test_api import CHAT, GREEDY, chunks, refusal

REQUEST: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 1, "seed": 2}


def test_a_chat_s_are_the_same_whole_and_streamed(http: httpx.Client) -> None:
    body = CHAT | REQUEST | {"logprobs": True, "top_logprobs": 2}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 30
    for one in entries:
        assert one["logprob"] <= 0
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][0]["logprob"] >= one["logprob"]
        assert (
            bytes(one["bytes"]).decode(errors="replace") == one["token"] or "bytes:" in one["token"]
        )
    spelt = b"".join(bytes(one["bytes"]) for one in entries if one["token"] != "<bos>")
    assert spelt.decode(errors="replace") == choice["message"]["content"]
    found: list[Any] = []
    for chunk in chunks(http.post("/v1/chat/completions", json=body | {"stream": True})):
        found += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert found == entries


@pytest.mark.parametrize("stop", [None, "R"])
def test_completions_are_the_same_whole_and_streamed(stop: str | None, http: httpx.Client) -> None:
    body = GREEDY | REQUEST | {"logprobs": 1, "n": 2, "stop": stop}
    answer = http.post("/v1/completions", json=body).json()
    given = [choice["logprobs"] for choice in answer["choices"]]
    assert sum(len(one["tokens"]) for one in given) == answer["usage"]["completion_tokens"]
    for one in given:
        assert {*map(len, one.values())} == {len(one["tokens"])}
        assert one["text_offset"][0] == 0
        assert all(a <= b for a, b in zip(one["text_offset"], one["text_offset"][1:], strict=False))
        for token, logprob, top in zip(
            one["tokens"], one["token_logprobs"], one["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
    found: list[dict[str, list[Any]]] = [{name: [] for name in one} for one in given]
    for chunk in chunks(http.post("/v1/completions", json=body | {"stream": True})):
        choice = chunk["choices"][0]
        for name, values in (choice["logprobs"] or {}).items():
            found[choice["index"]][name] += values
    assert found == given


def test_who_does_not_ask_gets_none(http: httpx.Client) -> None:
    for more in ({}, {"logprobs": False}, {"logprobs": None}):
        for path, body in (("/v1/completions", GREEDY), ("/v1/chat/completions", CHAT)):
            answer = http.post(path, json=body | {"max_tokens": 2} | more).json()
            assert answer["choices"][0]["logprobs"] is None


def test_openais_client_reads_them(live: Running, http: httpx.Client) -> None:
    import openai  # slow to load

    url = f"{live.url}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
    said = client.chat.completions.create(
        model="tiny", logprobs=True, top_logprobs=20, max_tokens=3, **CHAT
    )
    given = said.choices[0].logprobs
    assert given is not None
    assert given.content is not None
    for one in given.content:
        assert one.top_logprobs[0].token == one.token, "greedy takes the most probable"
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": 10**9}, "logprobs"),
    ],
)
def test_log_probabilities_that_no_plan_gives_are_refused(
    path: str, more: dict[str, Any], param: str, http: httpx.Client
) -> None:
    body = CHAT if "chat" in path else GREEDY
    assert refusal(http, path, body | more)["param"] == param


@pytest.mark.parametrize(
    ("greedy", "said"),
    [(False, "serve from a CPU (1xhost)"), (True, "start the server without --greedy")],
)
def test_an_engine_that_keeps_its_logits_refuses_them(
    greedy: bool, said: str, live: Running, http: httpx.Client
) -> None:
    served = live.app.served
    live.app.served = dataclasses.replace(served, logits=False, greedy=greedy)
    try:
        error = refusal(http, "/v1/completions", GREEDY | {"logprobs": 1})
        assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")
        assert error["message"].endswith(said)
    finally:
        live.app.served = served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_an_echo_scores_the_prompt_as_who_scores_texts_wants_it(
    http: httpx.Client, most: int, stream: bool
) -> None:
    """A token of the prompt has the probability that it would have had as an answer."""
    body = {"prompt": "hello there", "temperature": 0, "ignore_eos": True, "logprobs": 2}
    answer = http.post(
        "/v1/completions", json=body | {"echo": True, "max_tokens": most, "stream": stream}
    )
    assert answer.status_code == 200, answer.text
    if stream:
        parts = [
            json.loads(line.removeprefix("data: "))["choices"][0]
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        text = "".join(one["text"] for one in parts)
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found = {
            k: [v for one in parts if one["logprobs"] for v in one["logprobs"][k]] for k in keys
        }
    else:
        (choice,) = answer.json()["choices"]
        text, found = choice["text"], choice["logprobs"]
        assert answer.json()["usage"]["completion_tokens"] == most
        assert choice["finish_reason"] == "length"
    tokens = http.post("/tokenize", json={"prompt": "hello there"}).json()["tokens"]
    assert text.startswith("hello there")
    assert len(found["tokens"]) == len(tokens) + most
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for at in range(1, len(tokens)):
        one = {"prompt": tokens[:at], "max_tokens": 1, "logprobs": 20, "ignore_eos": True}
        said = http.post("/v1/completions", json=one | {"temperature": 0}).json()
        best = max(said["choices"][0]["logprobs"]["top_logprobs"][0].values())
        assert max(found["top_logprobs"][at].values()) == pytest.approx(best, abs=1e-4)


def test_an_echo_without_log_probabilities_is_text(http: httpx.Client) -> None:
    body = {"prompt": ["ab", "cd"], "temperature": 0, "max_tokens": 2, "echo": True}
    choices = http.post("/v1/completions", json=body | {"ignore_eos": True}).json()["choices"]
    assert [one["text"][:2] for one in choices] == ["ab", "cd"]
    assert all(one["logprobs"] is None for one in choices)
    plain = http.post("/v1/completions", json=body | {"echo": False, "max_tokens": 0})
    assert plain.status_code == 400
