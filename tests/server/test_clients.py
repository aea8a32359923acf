"""Clients that OpenAI did not write: Hugging Face's, and curl."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.serving import Running
from tests.server.test_api import CHAT, GREEDY, whole

MESSAGES = CHAT["messages"]
HOW: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
CURL = shutil.which("curl")


@pytest.fixture
def client(live: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    # half a second, which no other file needs
    from huggingface_hub import InferenceClient, constants

    # whoever stays away from the Hub may still call a server of this computer
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return InferenceClient(base_url=f"{live.url}/v1", api_key="none", timeout=PATIENCE_S)


def test_hugging_faces_client_chats_whole_and_streamed(client: Any, http: httpx.Client) -> None:
    text, reason, usage = whole(http, "/v1/chat/completions", CHAT | {"max_tokens": 20})
    said = client.chat.completions.create(model="tiny", messages=MESSAGES, **HOW)
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == (text, reason)
    assert said.usage.completion_tokens == usage["completion_tokens"]
    parts = [*client.chat_completion(model="tiny", messages=MESSAGES, stream=True, **HOW)]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [reason]


def test_hugging_faces_client_stops_and_reads_log_probabilities(
    client: Any, http: httpx.Client
) -> None:
    text = whole(http, "/v1/chat/completions", CHAT | {"max_tokens": 20})[0]
    stop = text[4:6]
    said = client.chat_completion(
        model="tiny", messages=MESSAGES, stop=[stop], logprobs=True, top_logprobs=2, **HOW
    )
    choice = said.choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content) == said.usage.completion_tokens
    assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_hugging_faces_client_hears_what_is_wrong(client: Any) -> None:
    from huggingface_hub.errors import BadRequestError

    with pytest.raises(BadRequestError) as error:
        client.chat_completion(model="tiny", messages=MESSAGES, frequency_penalty=3.0, **HOW)
    assert "frequency_penalty=3.0: must lie between" in str(error.value)


@pytest.mark.skipif(CURL is None, reason="no curl here")
def test_curl_gets_a_stream_line_by_line_and_its_kill_frees_the_engine(live: Running) -> None:
    assert CURL
    body = GREEDY | {"stream": True, "max_tokens": 240, "ignore_eos": True}
    url = f"{live.url}/v1/completions"
    words = [CURL, "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE_S)
    lines = [line for line in done.stdout.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert sum(json.loads(line[6:]).get("tokens", 0) for line in lines[:-1]) == 240

    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout
    first = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert first.startswith(b"data: {"), "it came before the end"
    live.wait_idle(2)
