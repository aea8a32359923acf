"""A model's answer as it grows, split into what it thinks, what it says and which tools it calls.

How a family writes these is a `Format` (`formats.py`); what stands in calls, `written.py` reads. A
parser is a generator that takes text as it comes: each delta leaves as soon as nothing that may
follow can change it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from twin.server.delta import Delta
from twin.server.formats import HARMONY_BODY, HARMONY_ENDS, Body, Format
from twin.server.schemas import takes_text
from twin.server.written import Malformed, loaded, of_braces, of_python

MOST_HEADER = 2**12  # characters of a function's name and what stands around it
MOST_LITERAL = 2**16  # characters of arguments that are read as a whole
_SPACE = re.compile(r"\s*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

Steps = Generator[None, None, Any]  # yields where it needs more text


@dataclass(slots=True)
class Parser:
    """One answer. `push` text as it comes, `finish` at its end; both return deltas in order."""

    format: Format
    schemas: Mapping[str, Mapping[str, Any]]  # of the functions that may be called, by name
    thinking: bool = False  # the prompt ends within reasoning
    calling: bool = True  # calls are looked for
    single: bool = False  # only the first call counts
    calls: int = field(default=0, init=False)
    reasons: bool = field(default=False, init=False)  # what comes next, as far as is known
    _buffer: str = field(default="", init=False)
    _eaten: list[str] = field(default_factory=list, init=False)  # since a call's opening mark
    _ended: bool = field(default=False, init=False)
    _made: list[Delta] = field(default_factory=list, init=False)
    # at the end of content so far: nothing where a call follows
    _space: str = field(default="", init=False)
    _said: bool = field(default=False, init=False)  # there was content that is no space
    _steps: Steps | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.reasons = self.thinking and self.format.thought is not None

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run()

    def finish(self) -> list[Delta]:
        self._ended = True
        made = self._run()
        if self._space and not self.calls and self._said:
            made.append(Delta(content=self._space))
        return made

    def _run(self) -> list[Delta]:
        if self._steps is None:
            harmony = self.format.body is Body.HARMONY
            self._steps = self._harmony() if harmony else self._answer()
        next(self._steps, None)
        made, self._made = self._made, []
        return made

    # ---- text ----------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        whole = self._space + text
        kept = whole.rstrip()
        if kept and (self._said or (kept := kept.lstrip())):
            self._made.append(Delta(content=kept))
            self._said = True
        self._space = whole[len(whole.rstrip()) :] if self._said else ""

    def _thought(self, text: str) -> None:
        if text:
            self._made.append(Delta(reasoning=text))

    def _until(self, marks: Sequence[str], sink: Callable[[str], None]) -> Steps:
        """Text up to the first of these marks goes to `sink`; returns the mark, None at the end."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
            if found:
                at, mark = min(found, key=lambda one: (one[0], -len(one[1])))
                sink(self._eat(at))
                self._eat(len(mark))
                return mark
            held = 0 if self._ended else _begun(self._buffer, marks)
            sink(self._eat(len(self._buffer) - held))
            if self._ended:
                return None
            yield

    def _taken(self, marks: Sequence[str], most: int = MOST_LITERAL) -> Steps:
        """Text up to the first of these marks, and the mark. Raises Malformed where none comes."""
        pieces: list[str] = []

        def take(text: str) -> None:
            pieces.append(text)
            if sum(map(len, pieces)) > most:
                raise Malformed

        mark = yield from self._until(marks, take)
        return "".join(pieces), mark

    def _peek(self) -> Steps:
        """The next character that is no space; empty at the end."""
        while True:
            at = _SPACE.match(self._buffer).end()  # type: ignore[union-attr]  # it always matches
            if at < len(self._buffer) or self._ended:
                return self._buffer[at : at + 1]
            yield

    def _eat(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._eaten.append(text)
        return text

    def _skip(self) -> None:
        """Removes spaces."""
        self._eat(len(self._buffer) - len(self._buffer.lstrip()))

    def _sign(self, sign: str) -> Steps:
        """Raises Malformed where another comes."""
        if (yield from self._peek()) != sign:
            raise Malformed
        self._skip()
        self._eat(1)

    # ---- an answer -----------------------------------------------------------------------------

    def _answer(self) -> Steps:
        form = self.format
        if self.thinking and form.thought:
            yield from self._reasoning(form.thought[1])
        opens = {form.open: self._call} if form.open and self.calling else {}
        thought = (form.thought[0],) if form.thought else ()
        ignored = form.surround if self.calling else ()
        if self.calling and not form.open and (yield from self._peek()) in ("{", "["):
            yield from self._call()
        while True:
            mark = yield from self._until((*opens, *thought, *ignored), self._content)
            if mark is None:
                return
            if mark in thought:
                yield from self._reasoning(form.thought[1])  # type: ignore[index]
            elif mark in opens:
                yield from self._call()

    def _reasoning(self, close: str) -> Steps:
        begun: list[str] = []
        space = ""

        def sink(text: str) -> None:
            nonlocal space
            text = space + text
            kept = text.rstrip()
            space = text[len(kept) :]
            if kept and not begun:
                kept = kept.lstrip()
            if kept:
                begun.append("")
                self._thought(kept)
            elif not begun:
                space = ""

        self.reasons = True
        yield from self._until((close,), sink)
        self.reasons, self._space = False, ""

    def _call(self) -> Steps:
        """Behind the opening mark. What is no call is content, its mark too."""
        calls, self._eaten = self.calls, []
        try:
            yield from self._BODIES[self.format.body](self)
        except Malformed:
            if self.calls == calls:
                self._content(self.format.open + "".join(self._eaten))
                return
        self._space = ""

    def _begin(self, name: str) -> int:
        name = name.strip()
        if not name or name not in self.schemas:
            raise Malformed
        call = self.calls
        self.calls += 1
        if not (self.single and call):
            self._made.append(Delta(call=call, begins=name, id=f"call_{secrets.token_hex(12)}"))
        return call

    def _arguments(self, call: int, text: str) -> None:
        if text and not (self.single and call):
            self._made.append(Delta(call=call, arguments=text))

    def _closed(self) -> Steps:
        """What stands between a call and its closing mark says nothing."""
        if self.format.close:
            yield from self._until((self.format.close,), lambda _: None)

    # ---- how calls are written -----------------------------------------------------------------

    def _json_calls(self) -> Steps:
        if (yield from self._peek()) == "[":
            yield from self._sign("[")
            while (yield from self._peek()) in ("{", ","):
                if (yield from self._peek()) == ",":
                    yield from self._sign(",")
                yield from self._json_call()
            if (yield from self._peek()) == "]":
                yield from self._sign("]")
        else:
            yield from self._json_call()
            # Llama separates several calls so
            while not self.format.open and (yield from self._peek()) in (";", "{"):
                if (yield from self._peek()) == ";":
                    yield from self._sign(";")
                yield from self._json_call()
        yield from self._closed()

    def _json_call(self) -> Steps:
        """One object. Arguments leave as they come once the name is known."""
        call, held = -1, ""
        yield from self._sign("{")
        while (yield from self._peek()) == '"':
            key = yield from self._json()
            yield from self._sign(":")
            if key == "name":
                call = self._begin(str((yield from self._json())))
            elif key in ("arguments", "parameters") and (
                call < 0 or (yield from self._peek()) == '"'
            ):
                found = yield from self._json()
                held = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            elif key in ("arguments", "parameters"):
                self._skip()
                yield from self._json_text(partial(self._arguments, call))
            else:
                yield from self._json()
            if (yield from self._peek()) == ",":
                yield from self._sign(",")
        if call < 0:
            raise Malformed
        self._arguments(call, held)
        if (yield from self._peek()) == "}":
            yield from self._sign("}")

    def _json(self) -> Steps:
        """One value as Python has it."""
        yield from self._peek()
        self._skip()
        pieces: list[str] = []
        yield from self._json_text(pieces.append)
        return loaded("".join(pieces))

    def _json_text(self, sink: Callable[[str], None]) -> Steps:
        """One value of JSON as it is written, in pieces."""
        depth, quoted, escaped, begun = 0, False, False, False
        while True:
            for at, sign in enumerate(self._buffer):
                if quoted:
                    if escaped:
                        escaped = False
                    elif sign == "\\":
                        escaped = True
                    elif sign == '"':
                        quoted = False
                        if not depth:
                            return sink(self._eat(at + 1))
                elif sign == '"':
                    quoted = begun = True
                elif sign in "{[":
                    depth, begun = depth + 1, True
                elif sign in "}]":
                    if not depth:  # behind a number
                        return sink(self._eat(at))
                    depth -= 1
                    if not depth:
                        return sink(self._eat(at + 1))
                elif not depth and begun and (sign == "," or sign.isspace()):
                    return sink(self._eat(at))
                else:
                    begun = True
            sink(self._eat(len(self._buffer)))
            if self._ended:
                return None
            yield

    def _named_json(self) -> Steps:
        form = self.format
        if (yield from self._peek()) in ("[", "{"):  # as Mistral's models wrote before
            yield from self._json_calls()
            return
        name, mark = yield from self._taken((form.separator,), MOST_HEADER)
        if mark is None:
            raise Malformed
        if (yield from self._peek()) != "{":  # DeepSeek: a kind, then the name, then a fence
            name, _ = yield from self._taken(("```json",), MOST_HEADER)
            yield from self._peek()
        self._skip()
        call = self._begin(name.split("[CALL_ID]")[0])
        yield from self._json_text(partial(self._arguments, call))
        yield from self._closed()

    def _tags(self) -> Steps:
        tags, close = self.format.tags, self.format.close
        assert tags is not None
        before = self.calls
        while True:
            _, mark = yield from self._taken((tags.function[0], close))
            if mark != tags.function[0]:
                if self.calls == before:
                    raise Malformed
                return
            name, _ = yield from self._taken((tags.function[1],), MOST_HEADER)
            call = self._begin(name.strip("\"' "))
            ends = (tags.argument[0], tags.function_end, close)
            number = 0
            while (yield from self._taken(ends))[1] == tags.argument[0]:
                head, _ = yield from self._taken((tags.argument[1],), MOST_HEADER)
                value, _ = yield from self._taken((tags.argument_end,))
                key, _, more = head.strip().partition(" ")
                kind = re.search(r'string="(true|false)"', more)
                text = kind[1] == "true" if kind else None
                self._pair(call, name, number, key.strip("\"'"), value, text)
                number += 1
            self._arguments(call, "}" if number else "{}")

    def _pairs(self) -> Steps:
        close = self.format.close
        name, mark = yield from self._taken(("<arg_key>", close))
        call = self._begin(name)
        number = 0
        while mark == "<arg_key>":
            key, _ = yield from self._taken(("</arg_key>",), MOST_HEADER)
            yield from self._taken(("<arg_value>",), MOST_HEADER)
            value, _ = yield from self._taken(("</arg_value>",))
            self._pair(call, name, number, key.strip(), value, None)
            number += 1
            _, mark = yield from self._taken(("<arg_key>", close))
        self._arguments(call, "}" if number else "{}")

    def _pair(
        self, call: int, name: str, number: int, key: str, value: str, text: bool | None
    ) -> None:
        """Its value is a text or JSON, as `text` says, or else as the function's schema does."""
        if text is None:
            value = value.removeprefix("\n").removesuffix("\n")
            text = takes_text(self.schemas.get(name.strip("\"' \n"), {}), key)
        found = value if text else loaded(value.strip(), value)
        lead = ", " if number else "{"
        written = json.dumps(found, ensure_ascii=False)
        self._arguments(call, f"{lead}{json.dumps(key, ensure_ascii=False)}: {written}")

    def _braces(self) -> Steps:
        text, _ = yield from self._taken((self.format.close,))
        found = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", text, re.DOTALL)
        if found is None:
            raise Malformed
        call = self._begin(found[1])
        self._arguments(call, json.dumps(of_braces(found[2]), ensure_ascii=False))

    def _python(self) -> Steps:
        text, _ = yield from self._taken((self.format.close,))
        calls = of_python(text)
        if any(name not in self.schemas for name, _ in calls):
            raise Malformed
        for name, given in calls:
            self._arguments(self._begin(name), json.dumps(given, ensure_ascii=False))

    _BODIES = {  # noqa: RUF012  # no field: slots have no defaults of theirs
        Body.JSON: _json_calls,
        Body.NAMED_JSON: _named_json,
        Body.TAGS: _tags,
        Body.PAIRS: _pairs,
        Body.BRACES: _braces,
        Body.PYTHON: _python,
    }

    # ---- harmony -------------------------------------------------------------------------------

    def _harmony(self) -> Steps:
        """GPT-OSS: messages with a channel; one to a function is a call. The prompt has opened the
        first message.
        """
        while True:
            if (yield from self._peek()) == "":
                return
            head: list[str] = []
            mark = yield from self._until((HARMONY_BODY,), head.append)
            header = "".join(head)
            if mark is None:  # no message of the format
                self._content(header)
                return
            channel, to = _CHANNEL.search(header), _RECIPIENT.search(header)
            sink: Callable[[str], None] = self._content
            if to and self.calling and to[1] in self.schemas:
                call = self._begin(to[1])
                sink = partial(self._arguments, call)
            elif channel and channel[1] == "analysis":
                sink, self.reasons = self._thought, True
            yield from self._until((*HARMONY_ENDS, "<|start|>"), sink)
            self.reasons = False


def _begun(text: str, marks: Sequence[str]) -> int:
    """Characters at the end with which one of the marks may begin."""
    longest = min(max((len(mark) - 1 for mark in marks), default=0), len(text))
    for size in range(longest, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
