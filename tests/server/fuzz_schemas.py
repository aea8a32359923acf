"""Requests that constrain their answers, for `tests.server.fuzz`: schemas and tools of every kind,
also those that are made to take time or memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATTERNS = (
    "^[a-z]{1,8}$",
    "^((a+)+)+$",
    "^(a{1,100}){1,100}$",
    "^(.*a.{20}|.*b.{20})$",
    "(?=a)b",
    "^(.{0,500}x){50}$",
    "(",
    "\\p{L}+",
    "^\\d{4}-\\d{2}$",
)
FORMATS = ("date-time", "email", "uri", "ipv6", "uuid", "hostname", "strange")


def schema(draw: random.Random, depth: int = 3) -> Any:
    """Of JSON, mostly one that holds together."""
    inner = [lambda: schema(draw, depth - 1)] * 3 if depth else []
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": "string", "maxLength": draw.choice([0, 3, 40])},
        lambda: {"type": "string", "pattern": draw.choice(PATTERNS)},
        lambda: {"type": "string", "format": draw.choice(FORMATS)},
        lambda: {"type": "integer", "minimum": draw.choice([-5, 0, -(10**30)]), "maximum": 99},
        lambda: {"type": "number", "multipleOf": draw.choice([1, 0.01, 7, 1e-9, 999_983, 0])},
        lambda: {"enum": draw.sample(["a", 1, None, True, {"x": []}, "é\n"], 3)},
        lambda: {"const": draw.choice(["", "<eos>", 0, -0.0, 1e300, [], {}])},
        lambda: {"type": draw.choice(["null", "boolean", ["integer", "null"], "strange", 7])},
        lambda: draw.choice([{}, True, False, [], "x", None]),
        lambda: {"$ref": draw.choice(["#", "#/$defs/a", "#/nope", "http://127.0.0.1:9/x"])},
    ]
    if depth:
        kinds += [
            lambda: {
                "type": "object",
                "properties": {name: one() for name, one in zip("abc", inner, strict=True)},
                "required": draw.sample(["a", "b", "c", "d"], draw.randrange(3)),
                "additionalProperties": draw.choice([True, False]),
            },
            lambda: {"type": "array", "items": inner[0](), "maxItems": draw.choice([1, 4, 10**9])},
            lambda: {draw.choice(["anyOf", "oneOf", "allOf"]): [inner[0](), inner[1]()]},
            lambda: {"$defs": {"a": inner[0]()}, "type": "array", "items": {"$ref": "#/$defs/a"}},
            lambda: {"patternProperties": {draw.choice(PATTERNS): inner[0]()}, "type": "object"},
            lambda: {"if": inner[0](), "then": inner[1](), "not": inner[2]()},
        ]
    return draw.choice(kinds)()


def _deep(depth: int) -> Any:
    made: Any = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def _chain(length: int, link: Callable[[dict[str, str]], Any]) -> Any:
    """References, each to the next one, the last to an integer."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "integer"}}}


def bomb(draw: random.Random) -> Any:
    """A schema that a compiler may take long for."""
    many = draw.choice([100, 511, 513, 3000])
    makers: list[Callable[[], Any]] = [
        lambda: _deep(draw.choice([60, 70, 400])),
        lambda: {"$ref": "#"},
        lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        lambda: _chain(1000, lambda found: found),
        lambda: _chain(30, lambda found: {"type": "array", "prefixItems": [found, found]}),
        lambda: _chain(16, lambda found: {"allOf": [found, found]}),
        lambda: {"allOf": [{"anyOf": [_deep(1), {"required": [f"k{i}"]}]} for i in range(12)]},
        lambda: {"oneOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(100)]},
        lambda: {"enum": [f"{i:05d}" for i in range(6000)]},
        lambda: {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(many)},
        },
        lambda: {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        lambda: {"type": "string", "minLength": 10**6},
        lambda: {"type": "integer", "multipleOf": draw.choice([9973, 999_983, 10**18])},
        lambda: {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]},
        lambda: {"type": "object", "patternProperties": {f"^a{i}.*$": {} for i in range(60)}},
    ]
    return draw.choice(makers)()


def constrained(draw: random.Random) -> tuple[str, bytes]:
    """A request: its path and body."""
    path = draw.choice([CHATS, CHATS, COMPLETIONS, RESPONSES])
    wanted = bomb(draw) if draw.random() < 0.25 else schema(draw)
    function: dict[str, Any] = {"name": draw.choice(["f", "a.b-c", "", "f" * 65, "<eos>"])}
    if draw.random() < 0.8:
        function["parameters"] = wanted
    body: dict[str, Any] = {"temperature": draw.choice([0, 1]), "seed": draw.randrange(99)}
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": draw.choice([1, 20, 60])}
    body |= limit | {"stream": draw.random() < 0.4}
    calls = draw.random() < 0.5 and path != COMPLETIONS
    choice = draw.choice(["auto", "none", "required", "strange", {"type": "function"}])
    if path == RESPONSES:
        body["input"] = draw.choice(["hi", [{"role": "user", "content": "<bos>hi"}]])
        form = {"type": "json_schema", "name": "n", "schema": wanted}
        body |= {"text": {"format": form}} if not calls else {}
        tools: list[Any] = [{"type": "function", **function}]
    else:
        body |= {"prompt": "hi"} if path == COMPLETIONS else {"messages": _messages(draw)}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted}}
        body |= {"response_format": form} if not calls else {}
        tools = [{"type": "function", "function": function}]
    if calls:
        body |= {"tools": tools * draw.choice([1, 1, 2, 200]), "tool_choice": choice}
    if path == CHATS and draw.random() < 0.2:
        values = {"enable_thinking": True, "x": wanted, "messages": []}
        body["chat_template_kwargs"] = dict(draw.sample([*values.items()], draw.randrange(4)))
    return path, json.dumps(body).encode()


def _messages(draw: random.Random) -> list[Any]:
    given = draw.choice(["{}", "", "[", "1e999", '{"a": 1e400}', '{"a": 1}'])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    made: list[Any] = [{"role": "user", "content": draw.choice(["hi", "<eos>", "{{ 7 * 7 }}"])}]
    if draw.random() < 0.4:
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        made.append({"role": "tool", "tool_call_id": "a", "content": "<eos>done"})
    return made
