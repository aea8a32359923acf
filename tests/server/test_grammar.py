"""Whatever tokens a model draws, an answer that a grammar constrains is what the request wants."""

from __future__ import annotations

import json
from functools import cache, reduce
from typing import Any

import numpy as np
import pytest

from tests.draws import scaled
from twin.engine.tokenizer import Tokenizer
from twin.server.formats import FORMATS, Format
from twin.server.grammar import Allowed, Grammars, calls_grammar, schema_grammar, schema_of
from twin.server.parsing import Parser
from twin.server.problem import Problem
from twin.server.schemas import check_schemas
from twin.server.tools import tools_of
from twin.server.wire import Unread

FUNCTIONS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    {
        "name": "ls",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
]
TOOLS = Unread(json.dumps([{"type": "function", "function": one} for one in FUNCTIONS]).encode())
REQUIRED = tools_of(TOOLS, Unread(b'"required"'))
NAMED = tools_of(TOOLS, Unread(b'{"type": "function", "function": {"name": "weather"}}'))
MOST = 4000
BY_NAME = {one.name: one for _, one in FORMATS}


@cache
def words(special: bool) -> Grammars:
    """Bytes, and each format's marks as one token: special ones, or plain ones."""
    import tokenizers

    marks = sorted({mark for one in BY_NAME.values() for mark in one.marks()})
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    made = [tokenizers.AddedToken(one, special=special) for one in marks]
    (backend.add_special_tokens if special else backend.add_tokens)(made)
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    end = backend.token_to_id("<end>")
    tokenizer = Tokenizer(backend, None, frozenset([end]))
    return Grammars(tokenizer, backend.get_vocab_size(), frozenset([end]))


ENDING = frozenset(b'"}])>,C01')
CLOSING = [
    "\n</parameter>\n",
    "</parameter>\n",
    "</｜DSML｜parameter>\n",
    "</arg_value>\n",
    "</think>",
]


def drawn(grammars: Grammars, allowed: Allowed, seed: int, closing: int = 40) -> str:
    """What a model says that prefers nothing; after `closing` tokens it tries to end."""
    rng = np.random.default_rng(seed)
    tokenizer, vocab = grammars._tokenizer, grammars._vocab
    row, made, text = np.zeros(vocab, np.float32), list[int](), b""
    names = {number: name for name, number in tokenizer.special.items()}
    wanted: list[int] = []
    while len(made) < MOST:
        allowed.write(row, made)
        free = np.flatnonzero(row == 0)
        assert len(free)
        late = len(made) > closing
        marks = [one for one in free if one in names]
        if late and marks:
            token = int(rng.choice(marks))
        elif wanted and row[wanted[0]] == 0:
            token = wanted.pop(0)
        elif late and len(free) > 100:  # within a text
            wanted = list(CLOSING[int(rng.integers(len(CLOSING)))].encode())
            token = wanted.pop(0) if row[wanted[0]] == 0 else int(rng.choice(free))
        else:
            liked = [one for one in free if late and one in ENDING]
            token = int(rng.choice(liked or free))
        made.append(token)
        if token in allowed.ends:
            return text.decode(errors="replace")
        text += names[token].encode() if token in names else spelt(tokenizer, token)
    raise AssertionError(f"no end: {text[:200]!r}")


def spelt(tokenizer: Tokenizer, token: int) -> bytes:
    return bytes([token]) if token < 256 else tokenizer.backend.id_to_token(token).encode()


# Marks of these are special tokens in every published vocabulary.
SPECIAL = {"gpt-oss", "mistral", "gemma"}
VOCABULARIES = [
    (name, special)
    for name in sorted(BY_NAME)
    for special in (True, False)
    if special or name not in SPECIAL
]


@pytest.mark.parametrize(("name", "special"), VOCABULARIES)
def test_a_required_call_is_made_by_every_family(name: str, special: bool) -> None:
    form = BY_NAME[name]
    grammars = words(special)
    for tools in (REQUIRED, NAMED):
        for thinking in (False, True):
            lark = calls_grammar(tools, form, grammars.mark, thinking=thinking)
            matcher = grammars.matcher(lark, "tool_choice")
            for seed in range(scaled(4)):
                text = drawn(grammars, grammars.allowed(matcher), seed)
                calls = called(form, tools.schemas, text, thinking)
                assert calls, text
                for function, arguments in calls:
                    assert function in tools.schemas
                    check(function, arguments, text)


def called(form: Format, schemas: Any, text: str, thinking: bool) -> list[tuple[str, str]]:
    parser = Parser(form, schemas, thinking and form.thought is not None)
    made: list[list[str]] = []
    for one in [*parser.push(text), *parser.finish()]:
        if one.begins:
            made.append([one.begins, ""])
        elif one.call >= 0:
            made[one.call][1] += one.arguments
    return [(name, text) for name, text in made]


def check(name: str, arguments: str, text: str) -> None:
    found = json.loads(arguments)
    properties: Any = next(f for f in FUNCTIONS if f["name"] == name)["parameters"]
    assert set(found) <= set(properties["properties"]), text
    assert set(properties.get("required", [])) <= set(found), text
    if name == "weather":
        assert isinstance(found["city"], str)
        assert found["unit"] in ("C", "F")
        assert found.get("days", 0) in range(10)


@pytest.mark.parametrize("name", ["hermes", "gpt-oss", "qwen3-coder"])
def test_an_answer_by_a_schema_is_json_of_it(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "of": {"enum": ["a", "b"]}},
        "required": ["n", "of"],
        "additionalProperties": False,
    }
    form, grammars = BY_NAME[name], words(True)
    lark = schema_grammar(schema, form, grammars.mark, thinking=True)
    matcher = grammars.matcher(lark, "response_format")
    for seed in range(20):
        text = drawn(grammars, grammars.allowed(matcher), seed)
        parser = Parser(form, {}, form.thought is not None, calling=False)
        deltas = [*parser.push(text), *parser.finish()]
        found = json.loads("".join(one.content for one in deltas))
        assert isinstance(found["n"], int)
        assert found["of"] in ("a", "b")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"type": "xml"}', "response_format.type"),
        (b'{"type": "json_schema"}', "response_format.json_schema"),
        (b'{"type": "json_schema", "json_schema": {"name": "x"}}', "response_format.json_schema"),
        (b'{"type": "json_object", "x": "' + b"y" * 2**16 + b'"}', "response_format"),
        (b'["json"]', "response_format"),
    ],
)
def test_a_response_format_that_says_nothing_is_refused(raw: bytes, param: str) -> None:
    with pytest.raises(Problem) as found:
        schema_of(Unread(raw))
    assert found.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strange"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
    ids=str,
)
def test_a_schema_that_no_answer_can_follow_is_refused(schema: dict[str, Any]) -> None:
    grammars, form = words(True), BY_NAME["hermes"]
    with pytest.raises(Problem, match="response_format cannot be followed"):
        grammars.matcher(
            schema_grammar(schema, form, grammars.mark, thinking=False), "response_format"
        )


def test_a_token_that_is_not_allowed_ends_the_generation_with_an_error() -> None:
    grammars = words(True)
    lark = schema_grammar({"type": "integer"}, BY_NAME["hermes"], grammars.mark, thinking=False)
    allowed = grammars.allowed(grammars.matcher(lark, "response_format"))
    row = np.zeros(grammars._vocab, np.float32)
    allowed.write(row, [])
    with pytest.raises(Problem, match="grammar"):
        allowed.write(row, [ord("x")])


LARGE: dict[str, Any] = {
    "objects": {"anyOf": [{"const": n} for n in range(5000)]},
    "properties": {"properties": {f"p{n}": {} for n in range(513)}},
    "nested deeper": reduce(lambda inner, _: {"items": inner}, range(70), {}),
    "multiples of": {"multipleOf": 999_983},
    "together": {"anyOf": [{"multipleOf": n} for n in (97, 89, 83)]},
}


@pytest.mark.parametrize("said", LARGE)
def test_a_schema_that_takes_long_is_refused_before_it_is_compiled(said: str) -> None:
    with pytest.raises(Problem, match=said) as error:
        check_schemas([LARGE[said]], "tools")
    assert error.value.param == "tools"


def test_schemas_as_people_write_them_are_within_bounds() -> None:
    usual = {
        "type": "object",
        "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 25}, "c": {"enum": [1e300]}},
        "multipleOf": "no number",
    }
    check_schemas([usual, {"const": {"multipleOf": True}}], "tools")


def test_a_text_that_a_schema_spells_is_no_special_token() -> None:
    """The library makes tokens of what must come by itself: it wanted an end amid a text."""
    grammars = words(special=True)
    lark = schema_grammar({"const": "a<end>b"}, BY_NAME["hermes"], grammars.mark, thinking=False)
    allowed = grammars.allowed(grammars.matcher(lark, "response_format"))
    row, made = np.zeros(grammars._vocab, np.float32), list[int]()
    for wanted in b'"a<end>b"':
        allowed.write(row, made)
        assert row[wanted] == 0
        made.append(wanted)
    allowed.write(row, made)
    assert set(np.flatnonzero(row == 0)) == set(grammars._ends)
