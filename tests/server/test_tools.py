"""Requests with tools: what is refused, what a template gets, and calls as clients receive them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.serving import TEMPLATE, Running, running
from tests.server.test_api import CHAT, refusal
from tests.server.test_replies import parsed
from twin.engine.generate import Completion, Request, Stop
from twin.engine.generation import Generation
from twin.server.conversation import Conversation, Turn
from twin.server.formats import FORMATS
from twin.server.job import Ended, Job, Text
from twin.server.limits import Limits
from twin.server.parsing import Parser
from twin.server.problem import Problem
from twin.server.replies import Reply
from twin.server.template import Template
from twin.server.tools import Tools, tools_of
from twin.server.wire import Message, Unread

CHATS = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HERMES = next(one for _, one in FORMATS if one.name == "hermes")
ANSWER = (
    '<think>hm</think>Sure.<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>'
)
MOST = 10**6
# As Qwen's template has them: arguments are a mapping.
MAPPING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>\n' if enable_thinking }}{% endif %}"
)
# As DeepSeek's has them: arguments are a text.
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c['function']['arguments'] }}{% endfor %}{% endfor %}{{ tools }}</think>"
)
CALLING = [
    Message(role="user", content="weather?"),
    Message(
        role="assistant",
        tool_calls=Unread(
            b'[{"id": "a", "type": "function", "index": 0, "function": {"name": "weather", '
            b'"arguments": "{\\"city\\": \\"x\\"}"}}]'
        ),
    ),
    Message(role="tool", content="sunny", tool_call_id="a"),
]


@pytest.fixture(params=[MAPPING, AS_TEXT, "plain"])
def conversation(request: pytest.FixtureRequest) -> Iterator[Conversation]:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = Template(plain if request.param == "plain" else request.param, {})
    yield Conversation(template, Limits())
    template.close()


def offered() -> Tools:
    return tools_of(Unread(json.dumps([WEATHER]).encode()))


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "another type": ("tools[0]", {"tools": [{"type": "custom"}]}),
    "no function": ("tools[0]", {"tools": [{"type": "function"}]}),
    "no name": ("tools[0].function", {"tools": [{"type": "function", "function": {}}]}),
    "a name with a space": (
        "tools[0].function.name",
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    ),
    "a name twice": ("tools[1].function.name", {"tools": [WEATHER, WEATHER]}),
    "many": ("tools", {"tools": [WEATHER] * 129}),
    "large": ("tools", {"tools": [WEATHER | {"x": "y" * 2**18}]}),
    "an unknown field": ("tools[0].colour", {"tools": [WEATHER | {"colour": 1}]}),
    "a choice without tools": ("tool_choice", {"tool_choice": "required"}),
    "a choice of another": (
        "tool_choice",
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "a choice of no kind": ("tool_choice", {"tools": [WEATHER], "tool_choice": "often"}),
    "an own value of the template": (
        "chat_template_kwargs.messages",
        {"chat_template_kwargs": {"messages": []}},
    ),
    "to go on and to begin": ("continue_final_message", {"continue_final_message": True}),
    "to go on with a question": (
        "continue_final_message",
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
    "reasoning": ("reasoning_format", {"reasoning_format": "none of these"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_tools_is_refused_by_its_place(case: str, http: httpx.Client) -> None:
    param, more = WRONG[case]
    assert refusal(http, CHATS, CHAT | more)["param"] == param


@pytest.mark.parametrize("arguments", ['"{"', '"[]"', '"' + "[" * 2000 + '"', "5"])
def test_arguments_of_a_call_are_an_object(arguments: str, http: httpx.Client) -> None:
    call = {"function": {"name": "f", "arguments": json.loads(arguments)}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    error = refusal(http, CHATS, CHAT | {"messages": messages})
    assert error["param"].startswith("messages[1].tool_calls[0].function.arguments"), error


def test_a_conversation_with_calls_reaches_every_template(conversation: Conversation) -> None:
    text = conversation.text(CALLING, Turn(offered()), MOST).plain
    assert "weather?" in text
    assert "sunny" in text
    assert "of a city" in text, "the tools are described"
    assert text.count('{"city": "x"}') == 1


def test_tools_that_are_not_to_be_called_are_not_described(conversation: Conversation) -> None:
    none = tools_of(Unread(json.dumps([WEATHER]).encode()), Unread(b'"none"'))
    assert "of a city" not in conversation.text(CALLING, Turn(none), MOST).plain
    assert conversation.parser("", Turn(none), reasoning=False, calls=True) is None


def test_a_request_s_values_reach_the_template() -> None:
    template = Template(MAPPING, {})
    conversation = Conversation(template, Limits())
    ask = [Message(role="user", content="x")]
    text = conversation.text(ask, Turn(more={"enable_thinking": True}), MOST).plain
    assert text.endswith("<think>\n")
    assert not conversation.text(ask, Turn(), MOST).plain.endswith("<think>\n")
    usual = Conversation(template, Limits(), {"enable_thinking": True})
    assert usual.text(ask, Turn(), MOST).plain.endswith("<think>\n")
    never = Turn(more={"enable_thinking": False})
    assert not usual.text(ask, never, MOST).plain.endswith("<think>\n"), "a request's come first"
    template.close()


def test_the_last_message_goes_on_where_the_request_wants_it(conversation: Conversation) -> None:
    messages = [Message(role="user", content="x"), Message(role="assistant", content="Once upon ")]
    text = conversation.text(messages, Turn(generate=False, resume=True), MOST).plain
    assert text.endswith("<assistant>Once upon")
    with pytest.raises(Problem, match="assistant"):
        conversation.text(messages[:1], Turn(generate=False, resume=True), MOST)


def reply(*, reasoning: bool = True) -> Reply:
    parser = Parser(HERMES, {"weather": {}})
    request = Request([1], 50)
    return Reply(True, "m", "f", [request], parsers=[parser], reasoning=reasoning)


def ended(stop: Stop = Stop.TOKEN) -> Ended:
    made = Generation([1] * 9, np.full(9, 1000), 500, "stop")
    return Ended(0, Completion(ANSWER, stop, made), 9, 0.0)


@pytest.mark.parametrize("reasoning", [True, False])
def test_a_whole_answer_has_its_parts_separately(reasoning: bool) -> None:
    import asyncio

    made = reply(reasoning=reasoning)
    for token in re.findall("<[^>]*>|.", ANSWER):
        made.hear(Text(0, token, 1))
    made.ended.append(ended())
    loop = asyncio.new_event_loop()
    said = json.loads(made.whole(Job(made.requests, loop)))
    (choice,) = said["choices"]
    loop.close()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Sure."
    assert message.get("reasoning_content") == ("hm" if reasoning else None)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4, "and its marks"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert call["type"] == "function"
    assert call["id"]


def test_a_stream_has_the_same_parts_and_counts_every_token() -> None:
    made = reply()
    stream = b"".join(made.text_chunks([Text(0, sign, 1)]) for sign in ANSWER)
    chunks = parsed(stream + made.end_chunk(ended()))
    choices: list[Any] = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
    deltas = [one["delta"] for one in choices]
    assert "".join(one.get("content") or "" for one in deltas) == "Sure."
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "hm"
    calls = [call for one in deltas for call in one.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather"
    assert {call["index"] for call in calls} == {0}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "x"}'
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(int(chunk.get("tokens", 0)) for chunk in chunks) == len(ANSWER)  # type: ignore[call-overload]


def test_an_answer_that_was_cut_says_so() -> None:
    made = reply()
    (chunk,) = parsed(made.end_chunk(ended(Stop.LENGTH)))[-1:]
    assert chunk["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


# ---- what an answer has to be, with a model that would say anything --------------------------


def generated(http: httpx.Client, more: dict[str, Any], path: str = CHATS) -> Any:
    answer = http.post(path, json=CHAT | {"temperature": 1, "seed": 5, "max_tokens": 120} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


SHORT = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2, 3]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def calling(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A template that knows tools and says nothing of them: the model's context is small."""
    file = tmp_path_factory.mktemp("calling") / "chat.jinja"
    file.write_text("{# tools <tool_call> #}" + TEMPLATE)
    with running(checkpoint, file) as server:
        yield server


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_that_is_required_is_made(choice: Any, temperature: float, calling: Running) -> None:
    wanted = {"tools": [SHORT], "tool_choice": choice, "parallel_tool_calls": False}
    with calling.client() as http:
        found = generated(http, wanted | {"temperature": temperature})
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2, 3)
    assert found["finish_reason"] == "tool_calls"


def test_an_answer_follows_its_schema_in_both_endpoints(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = generated(http, {"response_format": form})
    assert json.loads(found["message"]["content"])["n"] in (1, 2)
    body = {"prompt": "x", "max_tokens": 120, "response_format": form, "temperature": 1, "n": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert all(json.loads(one["text"])["n"] in (1, 2) for one in choices)
    assert http.post("/v1/completions", json=body | {"temperature": 0}).is_success


def test_a_schema_that_cannot_be_followed_is_the_request_s_mistake(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}
    assert refusal(http, CHATS, CHAT | {"response_format": form})["param"] == "response_format"


def test_a_bias_and_penalties_change_what_comes(http: httpx.Client) -> None:
    more = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    body = {"prompt": [5, 6, 7]} | more

    def said(extra: dict[str, Any]) -> str:
        answer = http.post("/v1/completions", json=body | extra)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    free = said({})
    only = said({"logit_bias": {"65": 100}})
    assert len(set(only)) == 1
    assert only != free
    varied = said({"logit_bias": {"65": 100}, "presence_penalty": 2, "frequency_penalty": 2})
    assert varied == only, "two penalties are less than this bias"
    assert said({"frequency_penalty": 2}) == said({"frequency_penalty": 2})
    assert said({"repetition_penalty": 0.01}) != free == said({"repetition_penalty": 1})


def test_no_end_comes_before_min_tokens(live: Running, http: httpx.Client) -> None:
    end = min(live.app.served.ends)
    body = {"prompt": [5], "temperature": 0, "max_tokens": 20, "logit_bias": {str(end): 100}}
    for least, made in ((0, 1), (7, 8)):
        answer = http.post("/v1/completions", json=body | {"min_tokens": least}).json()
        assert answer["usage"]["completion_tokens"] == made
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("frequency_penalty", -3),
    ],
)
def test_a_bias_out_of_bounds_is_refused(param: str, value: Any, http: httpx.Client) -> None:
    assert refusal(http, CHATS, CHAT | {param: value})["param"] == param
