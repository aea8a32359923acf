"""Answers of each family, split into reasoning, content and calls, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import CHARACTERS
from twin.server.delta import Delta
from twin.server.formats import FORMATS, GENERIC, Format, format_of
from twin.server.parsing import Parser

BY_NAME: dict[str, Format] = {one.name: one for _, one in FORMATS}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    "ls": {},
}
Found = tuple[str, str, list[tuple[str, Any]]]  # content, reasoning, calls
GET, LS = ("get", {"city": "x"}), ("ls", {})

# (format, does the prompt end within reasoning, answer, what it holds)
CASES: list[tuple[str, bool, str, Found]] = [
    (
        "hermes",
        False,
        '<think>\nhm\n</think>\n\nSure.\n<tool_call>\n{"name": "get", "arguments": {"city": '
        '"}\\"<"}}\n</tool_call>\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
        ("Sure.", "hm", [("get", {"city": '}"<'}), LS]),
    ),
    ("hermes", False, '<tool_call>{"arguments": {"city": "x"}, "name": "get"}', ("", "", [GET])),
    (
        "hermes",
        False,
        '<tool_call>{"name": "get", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>',
        ("", "", [GET]),
    ),
    (
        "qwen3-coder",
        True,
        "x\n</think>\n\n<tool_call>\n<function=get>\n<parameter=city>\nNew\nYork\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        ("", "x", [("get", {"city": "New\nYork", "n": 3})]),
    ),
    ("qwen3-coder", False, "<tool_call><function=ls></function></tool_call>", ("", "", [LS])),
    (
        "llama",
        False,
        '{"name": "get", "parameters": {"city": "x"}}; {"name": "ls", "parameters": {}}',
        ("", "", [GET, LS]),
    ),
    (
        "mistral",
        False,
        '[TOOL_CALLS][{"name": "get", "arguments": {"city": "x"}, "id": "abcdefghi"}, '
        '{"name": "ls", "arguments": {}}]',
        ("", "", [GET, LS]),
    ),
    (
        "mistral",
        False,
        '[THINK]why[/THINK]ok[TOOL_CALLS]get[ARGS]{"city": "x"}[TOOL_CALLS]ls[CALL_ID]123[ARGS]{}',
        ("ok", "why", [GET, LS]),
    ),
    (
        "deepseek",
        False,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"city":"x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ls\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [GET, LS]),
    ),
    (
        "deepseek",
        True,
        "a</think>hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
        '{"city":"x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("hi", "a", [GET]),
    ),
    (
        "deepseek-v4",
        False,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="city" '
        'string="true">5</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">5'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("", "", [("get", {"city": "5", "n": 5})]),
    ),
    (
        "minimax",
        True,
        'a</think><minimax:tool_call>\n<invoke name="get">\n<parameter name="city">x</parameter>\n'
        '</invoke>\n<invoke name="ls">\n</invoke>\n</minimax:tool_call>',
        ("", "a", [GET, LS]),
    ),
    (
        "glm",
        False,
        "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>7</arg_value>\n</tool_call><tool_call>ls</tool_call>",
        ("", "", [("get", {"city": "7", "n": 7}), LS]),
    ),
    (
        "gemma",
        False,
        '<|channel>thought\nhm<channel|><|tool_call>call:get{city:<|"|>a{b}<|"|>,n:3}<tool_call|>'
        "<|tool_call>call:ls{}<tool_call|>",
        ("", "hm", [("get", {"city": "a{b}", "n": 3}), LS]),
    ),
    (
        "gemma",
        False,
        '<|tool_call>call:ls{a:[1,<|"|>,<|"|>,{b:true}],c:null}<tool_call|>',
        ("", "", [("ls", {"a": [1, ",", {"b": True}], "c": None})]),
    ),
    (
        "lfm2",
        False,
        '<|tool_call_start|>[get(city="x", n=3), ls()]<|tool_call_end|>ok',
        ("ok", "", [("get", {"city": "x", "n": 3}), LS]),
    ),
    (
        "gpt-oss",
        False,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"city":"x"}<|call|>',
        ("", "think", [GET]),
    ),
    (
        "gpt-oss",
        False,
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        ("Hi", "think", []),
    ),
]
# What is no call is content, whole.
PLAIN = [
    ("hermes", 'a <tool_call>{"name": "other", "arguments": {}}</tool_call> b'),
    ("hermes", "a <tool_call>no JSON</tool_call> b"),
    ("hermes", "a < b <tool"),
    ("llama", '{"foo": 1} is JSON'),
    ("llama", 'so: {"name": "get"}'),
    ("glm", "<tool_call>other<arg_key>k</arg_key></tool_call>"),
    ("gemma", "<|tool_call>call:get{<tool_call|> x"),
    ("lfm2", "<|tool_call_start|>[get(city=open('f'))]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>" + "(" * 300 + "<|tool_call_end|>"),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"),
    ("minimax", '<minimax:tool_call><invoke name="other"></invoke></minimax:tool_call>'),
    ("gpt-oss", "no channel at all"),
]


def deltas(parser: Parser, pieces: list[str]) -> list[Delta]:
    return [one for piece in pieces for one in parser.push(piece)] + parser.finish()


def held(found: list[Delta]) -> Found:
    calls: dict[int, tuple[str, str]] = {}
    for one in found:
        if one.begins:
            assert one.id
            assert one.call not in calls
            calls[one.call] = (one.begins, "")
        elif one.call >= 0:
            calls[one.call] = (calls[one.call][0], calls[one.call][1] + one.arguments)
    return (
        "".join(one.content for one in found),
        "".join(one.reasoning for one in found),
        [(name, json.loads(text)) for name, text in calls.values()],
    )


@pytest.mark.parametrize("case", range(len(CASES)))
def test_each_family_s_calls_and_reasoning_are_found(case: int) -> None:
    name, thinking, text, wanted = CASES[case]
    assert held(deltas(Parser(BY_NAME[name], SCHEMAS, thinking), [text])) == wanted


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), min_size=1))
def test_where_an_answer_is_cut_changes_nothing(
    case: tuple[str, bool, str, Found], sizes: list[int]
) -> None:
    name, thinking, text, wanted = case
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert held(deltas(Parser(BY_NAME[name], SCHEMAS, thinking), pieces)) == wanted


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        content, reasoning, calls = held(deltas(Parser(BY_NAME[name], SCHEMAS), pieces))
        assert (content, reasoning, calls) == (text, "", [])


@given(st.sampled_from(sorted(BY_NAME)), st.data())
def test_no_answer_breaks_a_parser_and_no_text_is_made_up(name: str, data: st.DataObject) -> None:
    """Marks in any order: what is content stands in the answer, in its order."""
    marks = st.sampled_from(
        [*BY_NAME[name].marks(), '{"name": "get", "arguments": ', "{", "}", "x"]
    )
    pieces = data.draw(st.lists(marks | st.text(CHARACTERS, max_size=3), max_size=12))
    content = "".join(one.content for one in deltas(Parser(BY_NAME[name], SCHEMAS), pieces))
    rest = iter("".join(pieces))
    assert all(sign in rest for sign in content)


def test_arguments_leave_as_they_come() -> None:
    parser = Parser(BY_NAME["hermes"], SCHEMAS)
    (begun,) = parser.push('<tool_call>{"name": "get", "argu')
    assert begun.begins == "get"
    (first,) = parser.push('ments": {"city": "P')
    assert first.arguments == '{"city": "P'
    (second,) = parser.push("aris")
    assert second.arguments == "aris"


def test_a_single_call_is_all_that_leaves() -> None:
    _, _, text, _ = CASES[0]
    parser = Parser(BY_NAME["hermes"], SCHEMAS, single=True)
    assert len(held(deltas(parser, [text]))[2]) == 1


def test_a_template_without_tools_has_the_general_format() -> None:
    assert format_of("{{ messages }}") is GENERIC
    assert format_of("{{ tools }}<tool_call><function=x>").name == "qwen3-coder"
    assert format_of("{{ tools }}<tool_call>").name == "hermes"
