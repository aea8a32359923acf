"""A field that asks for nothing is taken; one that asks for what is missing is refused by name.

The fields are those of OpenAI's published schema, as its own client declares them.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import httpx
import msgspec
import pytest

from tests.server.test_api import CHAT, GREEDY, refusal
from twin.server import wire

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHATS: (wire.Chat, CHAT | {"max_tokens": 1}),
    COMPLETIONS: (wire.Completion, GREEDY | {"max_tokens": 1}),
    "/v1/responses": (wire.Responses, {"input": "x", "max_output_tokens": 1}),
    "/tokenize": (wire.Tokenize, {"prompt": "x"}),
    "/detokenize": (wire.Detokenize, {"tokens": [1]}),
}
NEEDED = {"messages", "prompt", "tokens", "input"}
# What OpenAI's reference names as defaults, and what clients send for "nothing in particular", of
# fields that are read.
DEFAULTS: dict[str, list[Any]] = {
    "stream": [False],
    "max_tokens": [1, 1.0],
    "max_completion_tokens": [1, 1.0],
    "temperature": [1, 0, 0.0],
    "top_p": [1, 1.0, 0, 0.0],
    "top_k": [0, -1, -1.0, 0.0],
    "min_p": [0, 0.0],
    "seed": [0, 1.0],
    "stop": [[], "", [""]],
    "stop_token_ids": [[]],
    "n": [1, 1.0],
    "user": [""],
    "metadata": [{}, {"a": "b"}],
    "service_tier": ["auto", "default"],
    "safety_identifier": [""],
    "prompt_cache_key": [""],
    "prompt_cache_retention": ["in_memory", "24h"],
    "prompt_cache_options": [{}],
    "store": [False, True],
    "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh"],
    "ignore_eos": [False],
    "step_times": [False],
    "logprobs": [False],
    "top_logprobs": [0, 0.0],
    "request_id": ["x"],
    "cache_salt": ["x"],
    "add_special_tokens": [True],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False],
    "chat_template_kwargs": [{}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "parse_tool_calls": [True, False],
    "reasoning_format": ["auto", "none"],
    "include_reasoning": [True],
    "logit_bias": [{}],
    "instructions": [""],
    "max_output_tokens": [1, 1.0],
    "text": [{"format": {"type": "text"}}, {}],
    "reasoning": [{}, {"effort": None}],
    "include": [[]],
    "max_tool_calls": [8],
    "echo": [False],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "min_tokens": [0, 0.0],
    "response_format": [{"type": "text"}],
}


def openais_fields(path: str) -> dict[str, Any]:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    module = chat_create_params if path == CHATS else completion_create_params
    found = module.CompletionCreateParamsBase.__annotations__
    assert len(found) > 10
    return dict(found) | {"stream": bool}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_every_field_of_openais_schema_is_known_and_null_asks_for_nothing(
    path: str, http: httpx.Client
) -> None:
    kind, body = BODIES[path]
    wanted = http.post(path, json=body).json()["usage"]["completion_tokens"]
    for name in openais_fields(path):
        assert name in wire.whole(kind).__struct_fields__, name
        if name not in NEEDED:
            answer = http.post(path, json=body | {name: None} | {"max_tokens": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == wanted


@pytest.mark.parametrize("path", BODIES)
def test_each_neutral_value_of_each_field_is_taken(path: str, http: httpx.Client) -> None:
    """Alone, and all first ones together."""
    kind, body = BODIES[path]
    together = dict[str, Any]()
    for name in wire.whole(kind).__struct_fields__:
        if name in NEEDED or name in {"model", "stream_options"}:
            continue
        lacking = wire.LACKING[kind].get(name)
        values = DEFAULTS[name] if lacking is None else [*lacking]
        for value in (None, *values):
            answer = http.post(path, json=body | {name: value})
            if path == "/tokenize" and name == "messages":
                continue
            assert answer.status_code == 200, (name, value, answer.text)
        if values and name != "messages":
            together[name] = values[0]
    together.pop("max_completion_tokens", None)
    assert http.post(path, json=body | together).status_code == 200


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_openais_fields_are_taken_with_whatever_value_asks_for_nothing(
    path: str, http: httpx.Client
) -> None:
    """By type alone, for fields that nobody thought of: no to a yes or no, an empty list, object or
    text, and zero of a penalty.
    """
    body = BODIES[path][1]
    ours = {"audio", "prediction", "web_search_options", "moderation", "response_format"}
    ours |= {"max_tokens", "max_completion_tokens", "n", "best_of", "modalities"}  # {} asks
    for name, kind in openais_fields(path).items():
        if name in NEEDED | ours | {"model", "stream_options"}:
            continue
        said = str(getattr(kind, "__forward_arg__", kind))
        value = next(
            (
                value
                for word, value in (
                    (r"\bbool\b", False),
                    (r"Iterable|List|Sequence", []),
                    ("Dict|Metadata|Options", {}),
                    (r"\bfloat\b|\bint\b", 0),
                    (r"\bstr\b", ""),
                )
                if re.search(word, said)
            ),
            None,
        )
        answer = http.post(path, json=body | {name: value})
        assert answer.status_code == 200, (name, said, value, answer.text)


def test_what_openais_client_may_leave_to_chance_is_read(http: httpx.Client) -> None:
    from openai.types.shared_params import ReasoningEffort

    efforts = [one for part in get_args(ReasoningEffort) for one in get_args(part)]
    assert len(efforts) > 3
    for effort in efforts:
        assert http.post(CHATS, json=BODIES[CHATS][1] | {"reasoning_effort": effort}).is_success
    none = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    assert http.post(CHATS, json=BODIES[CHATS][1] | none).is_success


def test_no_top_p_leaves_the_most_probable_token(http: httpx.Client) -> None:
    def said(more: dict[str, Any]) -> str:
        answer = http.post(COMPLETIONS, json=GREEDY | {"ignore_eos": True} | more)
        return str(answer.json()["choices"][0]["text"])

    drawn = {"temperature": 1.5, "seed": 3}
    assert said(drawn | {"top_p": 0}) == said({}) != said(drawn)


def test_an_answer_without_text_may_stand_in_a_conversation(http: httpx.Client) -> None:
    def tokens(content: dict[str, Any]) -> list[int]:
        messages = [*CHAT["messages"], {"role": "assistant"} | content, *CHAT["messages"]]
        assert http.post(CHATS, json=CHAT | {"messages": messages, "max_tokens": 1}).is_success
        found: list[int] = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return found

    assert tokens({"content": None}) == tokens({}) == tokens({"content": ""})
    for role in ("user", "system"):
        error = refusal(http, CHATS, CHAT | {"messages": [{"role": role, "content": None}]})
        assert error["param"] == "messages[0].content"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/v1/models/tiny"])
def test_a_slash_at_the_end_of_a_path_says_nothing(path: str, http: httpx.Client) -> None:
    assert http.get(path + "/").status_code == http.get(path).status_code == 200
    assert http.get(path + "//").status_code == 404
    for posted, (_, body) in BODIES.items():
        assert http.post(posted + "/", json=body).status_code == 200


def test_a_value_that_nobody_reads_costs_nothing(http: httpx.Client) -> None:
    """As Python's objects, half a million lists take the reader of JSON a second."""
    for text in (
        "[" + "[]," * 500_000 + "[]]",
        '"' + "x" * 1_000_000 + '"',
        "[" * 400 + "]" * 400,
    ):
        head = {"content-type": "application/json"}
        for name in ("tools", "logit_bias", "response_format"):
            raw = json.dumps(BODIES[CHATS][1])[:-1] + f', "{name}": {text}}}'
            answer = http.post(CHATS, content=raw.encode(), headers=head)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith(name)
            assert len(answer.text) < 800
