"""Requests as they come: every field that OpenAI's API knows is read, or refused by name."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from twin.server.problem import Problem
from twin.text import shown

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_INT32 = 2**31 - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Generation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both ways of generating share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None  # vLLM's
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None  # vLLM's
    n: int | None = None
    ignore_eos: bool | None = None  # vLLM's
    step_times: bool | None = None  # ours: each token's time, at the end
    # Known and harmless: nothing that is generated depends on them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known and lacking: only the value that changes nothing is taken (LACKING).
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    store: Any = None


class Completion(_Generation, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None  # how many of the most probable tokens, 0 too
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message's content. Other types than text are refused by their type."""

    type: str
    text: str | None = None
    cache_control: Any = None  # harmless: nothing that is generated depends on it
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    reasoning_content: Any = None


class Chat(_Generation, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class Detokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


# Values besides null that ask for nothing.
LACKING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "verbosity": (),
    "modalities": (["text"],),
    "audio": (),
    "image_url": (),
    "input_audio": (),
    "file": (),
    "prediction": (),
    "web_search_options": (),
    "include_obfuscation": (False,),
    # Of a message.
    "tool_calls": ([],),
    "tool_call_id": (),
    "refusal": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}
_REASONS = {
    "tools": "tool calls are not parsed",
}

Body = TypeVar("Body", bound=msgspec.Struct)


def read(body: bytes, kind: type[Body]) -> Body:
    """A request's body. Raises Problem."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Problem(
            f"the body is not JSON ({shown(str(error))}); send one JSON object"
        ) from error
    except RecursionError as error:
        raise Problem("the body is nested too deeply; send one JSON object") from error
    check_lacking(found)
    return found


def check_lacking(found: msgspec.Struct, where: str = "") -> None:
    """Refuses what this engine has not, unless its value asks for nothing. Raises Problem."""
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if (
            name in LACKING
            and value is not None
            and not any(_same(value, one) for one in LACKING[name])
        ):
            neutral = [msgspec.json.encode(one).decode() for one in LACKING[name]]
            allowed = " or ".join(["leave it out", *(f"send {one}" for one in neutral)])
            reason = f": {_REASONS[name]}" if name in _REASONS else ""
            raise Problem(
                f"{where}{name}={shown(value)} is not supported by this engine{reason}; {allowed}",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )


def within(name: str, value: int | None, low: int, high: int = _INT32) -> int | None:
    """A whole number in its range. Raises Problem."""
    if value is not None and not low <= value <= high:
        raise Problem(f"{name}={value}: must lie between {low} and {high}", param=name)
    return value


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid(message: str) -> Problem:
    at = _AT.search(message)
    said = shown(message[: at.start()] if at else message, 200).strip("'\"")
    where = shown(at[1], 60).strip("'\"") if at and at[1] else None
    unknown = _UNKNOWN.search(message)
    if unknown:
        name = shown(unknown[1], 60).strip("'\"")
        return Problem(
            f"{name}: no such parameter; check its name, or leave it out",
            param=f"{where}.{name}" if where else name,
            code="unknown_parameter",
        )
    return Problem(f"{where or 'the body'}: {said}", param=where, code="invalid_value")
