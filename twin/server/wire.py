"""Requests as they come: every field that OpenAI's API knows is read, or refused by name."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from twin.server.problem import Problem
from twin.text import said, shown

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_BEGINS = re.compile(rb"\s*(\[?)\s*(.?)", re.DOTALL)
_INT32 = 2**31 - 1


# JSON that is not read yet. What nobody uses costs nothing, whatever a client puts into it: a
# list of a million lists takes the JSON reader a second, in which no stream moves.
Unread = msgspec.Raw
NOTHING = msgspec.Raw()
Whole = int | float  # `within` refuses what is not whole: some clients send 8.0


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage in every chunk
    include_obfuscation: bool | None = None


class _Harmless(msgspec.Struct, kw_only=True):
    """Fields that are known, and on which nothing that is generated depends."""

    user: str | None = None
    metadata: Unread = NOTHING
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Unread = NOTHING
    store: bool | None = None  # `/v1/responses` says false: nothing is kept
    request_id: str | None = None  # vLLM's
    cache_salt: str | None = None  # vLLM's


class _Generation(_Harmless, kw_only=True):
    """What both ways of generating share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None  # vLLM's
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None  # vLLM's
    n: Whole | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None  # vLLM's and transformers'
    min_tokens: Whole | None = None  # vLLM's: before them no end may come
    response_format: Unread = NOTHING  # `grammar.schema_of` reads it
    ignore_eos: bool | None = None  # vLLM's
    step_times: bool | None = None  # ours: each token's time, at the end


class Completion(_Generation, kw_only=True):
    prompt: Unread  # `prompts` reads it
    logprobs: Whole | bool | None = None  # how many of the most probable tokens, 0 too
    echo: bool | None = None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message's content. Other types than text are refused by their type."""

    type: str
    text: str | None = None
    cache_control: Unread = NOTHING  # harmless: nothing that is generated depends on it
    image_url: Unread = NOTHING
    input_audio: Unread = NOTHING
    file: Unread = NOTHING
    refusal: Unread = NOTHING


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: Unread = NOTHING
    tool_calls: Unread = NOTHING  # `tools.calls_of` reads them
    tool_call_id: str | None = None
    # what the model thought before, for its template: DeepSeek's name, and that of vLLM
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Unread = NOTHING
    audio: Unread = NOTHING
    annotations: Unread = NOTHING


class Chat(_Generation, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Unread = NOTHING  # `tools.tools_of` reads them
    tool_choice: Unread = NOTHING
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool | None = None  # llama.cpp's
    reasoning_effort: str | None = None  # what the chat template makes of it
    reasoning_format: str | None = None  # llama.cpp's
    include_reasoning: bool | None = None  # vLLM's
    # vLLM's and llama.cpp's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Responses(_Harmless, kw_only=True):
    """`/v1/responses`; `responses.chat_of` makes a chat of it."""

    input: Unread
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Unread = NOTHING
    tool_choice: Unread = NOTHING
    parallel_tool_calls: bool | None = None
    text: Unread = NOTHING
    reasoning: Unread = NOTHING
    # vLLM's
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_logprobs: Whole | None = None
    include: list[str] | None = None  # `responses.LOGPROBS`; the rest is of tools that others run
    max_tool_calls: Whole | None = None


class Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Unread = NOTHING
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


Values = tuple[Any, ...]
# What this engine lacks: fields of OpenAI's API, and those of vLLM's and llama.cpp's that clients
# send by default, each with the values that mean nothing, as null does.
_EITHER: dict[str, Values] = {
    # vLLM's
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    # llama.cpp's
    "n_predict": (-1,),
    "n_probs": (0,),
    "n_keep": (0,),
    "min_keep": (0,),
    "id_slot": (-1,),
    "cache_prompt": (True,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "grammar": ("",),
    "json_schema": ({},),
    "t_max_predict_ms": (0, -1),
    "timings_per_token": (False,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "return_tokens": (False,),
    "lora": ([],),
}
LACKING: dict[type[msgspec.Struct], dict[str, Values]] = {
    Completion: _EITHER | {"best_of": (1,), "suffix": ("",), "add_special_tokens": (True,)},
    Chat: _EITHER
    | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "moderation": (),
        "web_search_options": (),
        # vLLM's
        "add_special_tokens": (False,),
        "echo": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    },
    Tokenize: {
        "chat_template": (),
        "return_token_strs": (False,),
        "with_pieces": (False,),  # llama.cpp's
        "parse_special": (True,),  # llama.cpp's
    },
    Detokenize: {},
    Responses: {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "truncation": ("disabled", "auto"),
        "prompt": (),
        "moderation": (),
        "context_management": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "include_reasoning": (True,),
        "priority": (0,),
    },
    Message: {
        "function_call": (),
        "audio": (),
        "refusal": ("",),
        "annotations": ([],),
    },
    Part: {"image_url": (), "input_audio": (), "file": (), "refusal": ("",)},
}
_LONGEST_NEUTRAL = 64  # bytes of JSON

Body = TypeVar("Body", bound=msgspec.Struct)


@cache
def whole(kind: type[Body]) -> type[Body]:
    """A kind of body with all that it lacks, unread. Other fields are unknown."""
    lacking = [(name, Unread, NOTHING) for name in LACKING[kind]]
    return msgspec.defstruct(  # type: ignore[return-value]  # it is the class of its bases
        kind.__name__, lacking, bases=(kind,), forbid_unknown_fields=True, kw_only=True
    )


def read(body: bytes, kind: type[Body]) -> Body:
    """A request's body. Raises Problem."""
    found: Body = decoded(body, whole(kind))
    check_lacking(found, kind)
    return found


def decoded(body: bytes | Unread, kind: Any, where: str | None = None) -> Any:
    """JSON as a type; `where`: the field whose value the body is. Raises Problem."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), where) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Problem(
            f"{where or 'the body'} is not JSON ({shown(str(error))}); send one JSON object",
            param=where,
        ) from error
    except RecursionError as error:
        raise Problem(
            f"{where or 'the body'} is nested too deeply; send one JSON object", param=where
        ) from error


def prompts(raw: Unread, most: int) -> list[str] | list[list[int]]:
    """One prompt or several, at most about `most`, each a text or its tokens. Raises Problem."""
    several, first = _BEGINS.match(bytes(raw)).groups()  # type: ignore[union-attr]  # it always does
    if not several:
        return [decoded(raw, str, "prompt")]
    if first not in (b'"', b"[", b"]"):
        return [decoded(raw, list[int], "prompt")]
    # each of a million empty lists takes a millionth of a second to make, and to forget
    if first == b"[" and bytes(raw).count(b"[") > most + 1:
        raise Problem(f"prompt: more than {most} of them; send fewer", param="prompt")
    kind: Any = list[list[int]] if first == b"[" else list[str]
    found: list[str] | list[list[int]] = decoded(raw, kind, "prompt")
    return found


def check_lacking(found: msgspec.Struct, kind: type[msgspec.Struct], where: str = "") -> None:
    """Refuses what this engine has not, unless its value means nothing. Raises Problem."""
    for name, neutral in LACKING[kind].items():
        raw = bytes(getattr(found, name))
        if not raw or raw == b"null":
            continue
        value: Any = raw.decode(errors="replace")
        if len(raw) <= _LONGEST_NEUTRAL:
            value = decoded(raw, Any, f"{where}{name}")
            if any(_same(value, one) for one in neutral):
                continue
        written = shown(value) if len(raw) <= _LONGEST_NEUTRAL else said(value, 80)
        sent = [msgspec.json.encode(one).decode() for one in neutral]
        allowed = " or ".join(["leave it out", *(f"send {one}" for one in sent)])
        raise Problem(
            f"{where}{name}={written} is not supported by this engine; {allowed}",
            param=f"{where}{name}",
            code="unsupported_parameter",
        )


def within(name: str, value: Whole | None, low: int, high: int = _INT32) -> int | None:
    """A whole number in its range. Raises Problem."""
    if value is None:
        return None
    if not low <= value <= high:
        raise Problem(f"{name}={shown(value)}: must lie between {low} and {high}", param=name)
    if value != int(value):
        raise Problem(f"{name}={value}: must be a whole number", param=name)
    return int(value)


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid(message: str, field: str | None) -> Problem:
    at = _AT.search(message)
    reason = shown(message[: at.start()] if at else message, 200).strip("'\"")
    where = f"{field or ''}{shown(at[1], 60)[1:-1] if at else ''}" or None
    unknown = _UNKNOWN.search(message)
    if unknown:
        name = shown(unknown[1], 60).strip("'\"")
        return Problem(
            f"{name}: no such parameter; check its name, or leave it out",
            param=f"{where}.{name}" if where else name,
            code="unknown_parameter",
        )
    return Problem(f"{where or 'the body'}: {reason}", param=where, code="invalid_value")
