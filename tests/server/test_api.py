"""OpenAI's API, as its own client and raw HTTP see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.command_line import Twin
from tests.server.serving import Running

if TYPE_CHECKING:
    import openai

GREEDY: dict[str, Any] = {"prompt": "hello", "max_tokens": 24, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture
def client(live: Running, http: httpx.Client) -> openai.OpenAI:
    import openai  # half a second that collecting the tests would take in every process

    url = f"{live.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """Text, finish reason and usage of a stream of one choice."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    response = http.post(path, json=body | more)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = chunks(response)
    said = [one["choices"][0] for one in found[:-1]]
    assert all(one["finish_reason"] is None for one in said[:-1])
    assert found[-1]["choices"] == []
    text = "".join(
        one["text"] if "text" in one else one["delta"].get("content", "") for one in said
    )
    return text, said[-1]["finish_reason"], found[-1]["usage"]


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], response.json()["usage"]


def refusal(http: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 800
    assert isinstance(error, dict)
    return error


# ---- what is generated -------------------------------------------------------------------------


def test_greedy_text_is_that_of_twin_run(http: httpx.Client, checkpoint: Path, twin: Twin) -> None:
    words = ["run", checkpoint, "--prompt", "hello", "--max-tokens", 24, "--blocks", 1, "--json"]
    ran = json.loads(twin(*words).out)
    assert whole(http, "/v1/completions", GREEDY)[0] == ran["text"]


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50, "min_p": 0.01}]
)
@pytest.mark.parametrize("stop", [None, ["\n"], "R"])
def test_a_stream_says_what_a_whole_answer_says(
    more: dict[str, Any], stop: Any, http: httpx.Client
) -> None:
    for path, body in (("/v1/completions", GREEDY), ("/v1/chat/completions", CHAT)):
        body = {**body, "max_tokens": 40, "stop": stop} | more
        one, other = whole(http, path, body), streamed(http, path, body)
        for usage in (one[2], other[2]):
            usage.pop("prompt_tokens_details")  # the second time all is kept
        assert one == other


def test_min_p_of_one_leaves_the_most_probable_token(http: httpx.Client) -> None:
    drawn = GREEDY | {"temperature": 1.5, "seed": 3}
    best = whole(http, "/v1/completions", GREEDY)[0]
    assert whole(http, "/v1/completions", drawn | {"min_p": 1})[0] == best
    assert whole(http, "/v1/completions", drawn | {"min_p": None})[0] != best


def test_a_stop_text_over_several_tokens_is_cut_off(http: httpx.Client) -> None:
    text = whole(http, "/v1/completions", GREEDY)[0]
    assert len(text) > 8
    stop = text[4:7]
    cut, reason, usage = streamed(http, "/v1/completions", GREEDY | {"stop": [stop]})
    assert (cut, reason) == (text[: text.index(stop)], "stop")
    assert usage["completion_tokens"] < 24


def test_the_same_seed_says_the_same_and_choices_differ(http: httpx.Client) -> None:
    body = GREEDY | {"temperature": 1, "seed": 11, "n": 3, "max_tokens": 12}
    first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert first["usage"]["completion_tokens"] == 36
    unseeded = GREEDY | {"temperature": 1, "max_tokens": 12}
    assert len({whole(http, "/v1/completions", unseeded)[0] for _ in range(3)}) == 3


def test_several_prompts_are_choices_of_one_answer(http: httpx.Client) -> None:
    alone = [whole(http, "/v1/completions", GREEDY | {"prompt": p})[0] for p in ("ab", "cd")]
    both = http.post("/v1/completions", json=GREEDY | {"prompt": ["ab", "cd"]}).json()
    assert [choice["text"] for choice in both["choices"]] == alone
    tokens = http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    assert whole(http, "/v1/completions", GREEDY | {"prompt": tokens})[0] == alone[0]


def test_a_chat_keeps_what_its_last_turn_read(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "tell me something long"}]
    first = http.post("/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 8})
    answer = first.json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    second = http.post("/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 8})
    kept = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept >= first.json()["usage"]["prompt_tokens"]
    assert second.json()["timings"]["kept_tokens"] == kept
    assert second.json()["timings"]["saved_ms"] > 0


def test_a_prompt_takes_time_also_where_all_but_its_last_token_was_kept(
    http: httpx.Client,
) -> None:
    for _ in range(2):
        said = http.post("/v1/completions", json=GREEDY).json()
        assert said["timings"]["prompt_ms"] > 0
    assert said["timings"]["kept_tokens"] == said["usage"]["prompt_tokens"] - 1


def test_a_stream_gives_its_usage_in_each_chunk_when_requested(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = GREEDY | {"n": 2, "stream": True, "stream_options": options}
    found = [one["usage"] for one in chunks(http.post("/v1/completions", json=body))]
    made = [usage["completion_tokens"] for usage in found]
    assert made == sorted(made)
    assert made[-2:] == [48, 48]
    prompt = found[-1]["prompt_tokens"]
    assert all(u["total_tokens"] == prompt + u["completion_tokens"] for u in found)
    options["continuous_usage_stats"] = False
    found = [one["usage"] for one in chunks(http.post("/v1/completions", json=body))]
    assert found[:-1] == [None] * (len(found) - 1)


def test_times_of_each_token_are_given_when_requested(http: httpx.Client) -> None:
    timings = http.post("/v1/completions", json=GREEDY | {"step_times": True}).json()["timings"]
    assert len(timings["step_us"][0]) == 24
    assert timings["tokens_per_s"] > 0


# ---- OpenAI's own client -----------------------------------------------------------------------


def test_openais_client_chats_completes_and_lists(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    said = client.chat.completions.create(model=model, max_completion_tokens=12, **CHAT)
    assert said.choices[0].message.role == "assistant"
    assert said.choices[0].finish_reason == "length"
    assert said.usage is not None
    assert said.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model=model, max_completion_tokens=12, stream=True, **CHAT
    )
    parts = [*stream]
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == said.choices[0].message.content
    done = client.completions.create(model=model, **GREEDY)
    assert done.usage is not None
    assert done.usage.completion_tokens == 24


def test_openais_client_stops_and_leaves(client: openai.OpenAI, live: Running) -> None:
    whole = client.completions.create(model="tiny", **GREEDY).choices[0]
    stop = whole.text[3:5]
    cut = client.completions.create(model="tiny", stop=[stop], **GREEDY).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    body = GREEDY | {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="tiny", stream=True, **body)
    next(iter(stream))
    stream.close()
    live.wait_idle(2)


def test_openais_client_knows_the_errors(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-x", **CHAT)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", verbosity="low", **CHAT)
    assert error.value.param == "verbosity"
    assert error.value.code == "unsupported_parameter"


# ---- refusals ----------------------------------------------------------------------------------

LACKING = {
    "functions": [{}],
    "verbosity": "low",
    "modalities": ["audio"],
    "audio": {},
    "prediction": {},
    "moderation": {},
    "web_search_options": {},
    "guided_regex": "[a-z]",
    "mirostat": 2,
    "grammar": 'root ::= "a"' * 100,
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_engine_lacks_is_refused_by_name(name: str, http: httpx.Client) -> None:
    error = refusal(http, "/v1/chat/completions", CHAT | {name: LACKING[name]})
    assert error["param"] == name
    assert name in error["message"]


WRONG: dict[str, tuple[str, Any]] = {
    "max_tokens zero": ("max_tokens", 0),
    "max_tokens not whole": ("max_tokens", 8.5),
    "n not whole": ("n", 1.5),
    "top_p": ("top_p", 1.1),
    "top_p below": ("top_p", -0.1),
    "max_tokens text": ("max_tokens", "5"),
    "max_tokens beyond the context": ("messages", {"max_tokens": 10**6}),
    "n none": ("n", 0),
    "n many": ("n", 9),
    "temperature": ("temperature", 3),
    "temperature below": ("temperature", -0.1),
    "min_p": ("min_p", 1.5),
    "min_p below": ("min_p", -0.1),
    "min_p text": ("min_p", "0.1"),
    "top_k": ("top_k", -2),
    "seed": ("seed", 2**70),
    "stop many": ("stop", ["a"] * 17),
    "stop long": ("stop", ["a" * 257]),
    "stop number": ("stop", 5),
    "stream": ("stream", "yes"),
    "messages none": ("messages", []),
    "messages text": ("messages", "hi"),
    "unknown": ("temprature", 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_with_its_name(case: str, http: httpx.Client) -> None:
    name, value = WRONG[case]
    more = value if isinstance(value, dict) else {name: value}
    assert refusal(http, "/v1/chat/completions", CHAT | more)["param"] == name


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x", "name": "f"},
        {"role": "user"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        {"role": "user", "content": "x", "colour": "red"},
        {"role": "user", "content": [{"type": "text", "text": "x", "colour": "red"}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "x"}}]},
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message: Any, http: httpx.Client) -> None:
    error = refusal(http, "/v1/chat/completions", CHAT | {"messages": [message]})
    assert error["param"].startswith("messages[0]")


def test_what_is_no_json_is_refused(http: httpx.Client) -> None:
    head = {"content-type": "application/json"}
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": 1e999}'):
        response = http.post("/v1/completions", content=body, headers=head)
        assert response.status_code == 400, body[:20]
        assert response.json()["error"]["message"]
    response = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_a_prompt_beyond_the_context_is_refused_with_the_limit(http: httpx.Client) -> None:
    for prompt in ("x" * 300, "x" * 200_000, [1] * 300, [[1] * 300], [-1] * 300_000):
        error = refusal(http, "/v1/completions", GREEDY | {"prompt": prompt})
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]
    assert refusal(http, "/v1/completions", GREEDY | {"prompt": [320]})["param"] == "prompt"
    assert refusal(http, "/v1/completions", GREEDY | {"prompt": []})["param"] == "prompt"


# ---- the rest ----------------------------------------------------------------------------------


def test_words_become_tokens_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "hé"}).json()
    assert found["count"] == len(found["tokens"]) == 4  # <bos> and three bytes
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "prompt": "<bos>hé"
    }
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<user>hi\n<assistant>"
    assert refusal(http, "/detokenize", {"tokens": [-1]})["param"] == "tokens"
    assert refusal(http, "/tokenize", {})["param"] == "prompt"


def test_health_version_and_models_are_there(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 256)
    assert http.get("/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    def value(name: str) -> float:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = ("vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_count")
    before = [value(name) for name in names]
    whole(http, "/v1/completions", GREEDY)
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [24, 23]
    text = http.get("/metrics").text
    assert 'vllm:inter_token_latency_seconds_bucket{model_name="tiny",le="0.0001"}' in text
    assert 'finished_reason="length"' in text
    assert value("vllm:num_requests_running") == 0
