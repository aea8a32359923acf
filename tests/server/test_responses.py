"""`/v1/responses` by OpenAI's own client: the same answers as a chat's, in items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.server.serving import Running
from tests.server.test_api import refusal
from twin.server.responses import LOGPROBS, chat_of
from twin.server.wire import Responses, Unread

if TYPE_CHECKING:
    import openai

ASK: dict[str, Any] = {"input": "hello", "temperature": 0, "max_output_tokens": 12}
PICK = {
    "type": "function",
    "name": "pick",
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(live: Running) -> Iterator[openai.OpenAI]:
    import openai

    with httpx.Client(verify=False) as http:
        yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", http_client=http, max_retries=0)


def test_an_answer_is_that_of_the_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    found = client.responses.create(model="tiny", **ASK)
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.id.startswith("resp_")
    assert found.output[0].id.startswith("msg_")
    assert found.usage is not None
    assert found.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert found.status in ("completed", "incomplete")
    assert (found.incomplete_details is None) == (found.status == "completed")


def test_a_stream_has_every_event_in_its_place(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", **ASK)
    events: list[Any] = list(client.responses.create(model="tiny", stream=True, **ASK))
    kinds = [one.type for one in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] == f"response.{whole.status}"
    assert [one.sequence_number for one in events] == list(range(len(events)))
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert len({one.item_id for one in events if hasattr(one, "item_id")}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_chat(
    client: openai.OpenAI, http: httpx.Client, stream: bool
) -> None:
    body: Any = ASK | {"include": [LOGPROBS], "top_logprobs": 2, "stream": stream}
    found: Any = client.responses.create(model="tiny", **body)
    if stream:
        events = list(found)
        deltas = [one for one in events if one.type == "response.output_text.delta"]
        streamed = [score for one in deltas for score in one.logprobs]
        found = events[-1].response
    (part,) = found.output[0].content
    messages = [{"role": "user", "content": "hello"}]
    chat_body = {"messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
    chat = http.post("/v1/chat/completions", json=chat_body | {"top_logprobs": 2}).json()
    wanted = chat["choices"][0]["logprobs"]["content"]
    assert [one.model_dump() for one in part.logprobs] == wanted[: len(part.logprobs)]
    spelt = b"".join(bytes(one.bytes) for one in part.logprobs)
    assert spelt.decode(errors="replace") == found.output_text
    if stream:
        assert [one.logprob for one in streamed] == [one.logprob for one in part.logprobs]


def test_instructions_and_a_conversation_become_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}
        ]},
        {"type": "function_call", "call_id": "a", "name": "w", "arguments": "{}", "id": "x"},
        {"type": "function_call", "call_id": "b", "name": "w", "arguments": '{"c": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "message", "role": "assistant", "status": "completed", "id": "m", "content": [
            {"type": "output_text", "text": "Sunny.", "annotations": [], "logprobs": []}
        ]},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    chat = chat_of(Responses(input=Unread(json.dumps(items).encode()), instructions="be brief"))
    assert [one.role for one in chat.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    called = chat.messages[2]
    assert called.reasoning_content == "hm"
    assert [one["id"] for one in json.loads(bytes(called.tool_calls))] == ["a", "b"]
    assert chat.messages[3].tool_call_id == "a"
    assert chat.messages[4].content == "Sunny."


def test_a_schema_and_tools_are_those_of_a_chat() -> None:
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}
    body = Responses(
        input=Unread(b'"x"'),
        text=Unread(json.dumps(form).encode()),
        tools=Unread(json.dumps([PICK]).encode()),
        tool_choice=Unread(b'{"type": "function", "name": "pick"}'),
    )
    chat = chat_of(body)
    schema = json.loads(bytes(chat.response_format))["json_schema"]
    assert schema["schema"] == {"type": "integer"}
    (tool,) = json.loads(bytes(chat.tools))
    assert tool["function"]["name"] == "pick"
    assert json.loads(bytes(chat.tool_choice))["function"] == {"name": "pick"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_structured_answer_follows_its_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = PICK["parameters"]
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    body: Any = ASK | {"max_output_tokens": 80, "text": form, "stream": stream}
    found: Any = client.responses.create(model="tiny", **body)
    if stream:
        found = list(found)[-1].response
    assert json.loads(found.output_text)["n"] in (1, 2)


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("input[0]", {"input": [{"type": "computer_call"}]}),
        (
            "input[0].content[0]",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        ),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
        ("colour", {"colour": 1}),
    ],
)
def test_what_it_lacks_is_refused_by_name(
    param: str, more: dict[str, Any], http: httpx.Client
) -> None:
    assert refusal(http, "/v1/responses", ASK | more)["param"] == param
