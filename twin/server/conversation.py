"""Conversations as a model's chat template has them, and its answers as its family writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from twin.engine.literal import Json, Marked, Spellings
from twin.errors import TwinError
from twin.server.formats import Body, Format, format_of
from twin.server.limits import Limits
from twin.server.parsing import Parser
from twin.server.problem import Problem
from twin.server.template import Template
from twin.server.tools import Tools, calls_of, described
from twin.server.wire import Message, Part, check_lacking
from twin.text import shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
OWN = frozenset({"messages", "tools", "add_generation_prompt"})  # of a rendering
_KEY = "number"
_CALL = {"type": "function", "function": {"name": "f", "arguments": {_KEY: 1}}, "id": "call00000"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request wants of the template besides its messages."""

    tools: Tools = Tools()  # noqa: RUF009  # frozen
    generate: bool = True  # the answer's beginning follows
    resume: bool = False  # the last message goes on
    more: Mapping[str, Any] | None = None  # `chat_template_kwargs`
    effort: str | None = None  # how much a model that reasons should, as its template takes it


@dataclass(frozen=True)
class Conversation:
    """Of one model. Methods raise Problem for what it does not take."""

    template: Template
    limits: Limits
    more: Mapping[str, Any] = field(default_factory=dict)  # for the template, if a request has none
    spellings: Spellings | None = None  # of special tokens, which messages may have as text

    @cached_property
    def format(self) -> Format:
        return format_of(self.template.source)

    @property
    def reasons(self) -> bool:
        """Whether answers may hold reasoning, as far as the template says."""
        form = self.format
        if form.body is Body.HARMONY:
            return True
        return form.thought is not None and form.thought[1] in self.template.source

    @cached_property
    def _as_text(self) -> bool:
        """Whether the template wants a call's arguments as JSON rather than as a mapping."""
        question, called = {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}
        try:
            text = self.template.render(
                [question, called | {"tool_calls": [_CALL]}], generate=False
            )
        except Problem:
            return True
        return repr({_KEY: 1}) in text

    def text(self, messages: Sequence[Message], turn: Turn, most: int) -> Marked:
        """The prompt; its messages have at most `most` characters."""
        if not 1 <= len(messages) <= self.limits.messages:
            raise Problem(
                f"messages: {len(messages)} of them; send 1 to {self.limits.messages}",
                param="messages",
            )
        plain = [self._plain(at, message) for at, message in enumerate(messages)]
        if (size := sum(len(one["content"]) for one in plain)) > most:
            raise Problem(
                f"the messages have {size} characters; at most {most} fit into the context; "
                "shorten them",
                code="context_length_exceeded",
            )
        given = turn.tools.given if turn.tools.callable else ()
        (plain, given, more), sign = self._broken((plain, given, self._more(turn)))
        if not self._knows_tools:
            plain = described(plain, given)
        if given and self._knows_tools:
            more["tools"] = list(given)
        resume = self._resumed(plain, turn) if turn.resume else None
        text = self.template.render(plain, generate=turn.generate and resume is None, more=more)
        if resume is None:
            return Marked(text, sign)
        at = text.rfind(resume)
        if at < 0:
            raise Problem(
                "continue_final_message: the chat template changes the last message; leave it out",
                param="continue_final_message",
            )
        return Marked(text[: at + len(resume)], sign)

    def _broken(self, values: Json) -> tuple[Json, str]:
        if self.spellings is None:
            return values, ""
        try:
            return self.spellings.broken(values)
        except TwinError as error:
            raise Problem(str(error), param="messages") from error

    @property
    def _knows_tools(self) -> bool:
        return "tools" in self.template.source

    @staticmethod
    def _resumed(plain: Sequence[Mapping[str, Any]], turn: Turn) -> str:
        last = plain[-1]
        if turn.generate:
            raise Problem(
                "continue_final_message=true needs add_generation_prompt=false; send it",
                param="continue_final_message",
            )
        if last["role"] != "assistant" or not last["content"].strip():
            raise Problem(
                "continue_final_message=true needs a last message of the assistant with a text",
                param="continue_final_message",
            )
        return str(last["content"]).strip()

    def _more(self, turn: Turn) -> dict[str, Any]:
        more = {**self.more, **(turn.more or {})}
        if own := OWN & more.keys():
            name = min(own)
            raise Problem(
                f"chat_template_kwargs.{name}: the request has a field for it; send that",
                param=f"chat_template_kwargs.{name}",
            )
        return more if turn.effort is None else {"reasoning_effort": turn.effort} | more

    def _plain(self, at: int, message: Message) -> dict[str, Any]:
        where = f"messages[{at}]."
        if message.role not in ROLES:
            raise Problem(
                f"{where}role is {shown(message.role)}; allowed: {', '.join(ROLES)}",
                param=f"{where}role",
            )
        check_lacking(message, Message, where)
        plain: dict[str, Any] = {"role": ROLES[message.role], "content": _content(message, where)}
        if message.name is not None:
            plain["name"] = message.name
        if message.role == "tool" and message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.role == "assistant":
            self._answered(plain, message, where)
        return plain

    def _answered(self, plain: dict[str, Any], message: Message, where: str) -> None:
        """What an answer had besides its text."""
        if thought := message.reasoning_content or message.reasoning:
            plain["reasoning_content"] = thought
            if self.format.body is Body.HARMONY and not plain["content"]:
                plain["thinking"] = thought
        calls = calls_of(message.tool_calls, f"{where}tool_calls")
        if calls:
            plain["tool_calls"] = [one.plain(as_text=self._as_text) for one in calls]

    # ---- answers -------------------------------------------------------------------------------

    def parser(self, prompt: str, turn: Turn, *, reasoning: bool, calls: bool) -> Parser | None:
        """What splits an answer to this prompt; None where all of it is content."""
        calling = calls and turn.tools.callable
        reasoning = reasoning and self.reasons
        if not calling and not reasoning:
            return None
        form = self.format if reasoning else dataclasses.replace(self.format, thought=None)
        tools = turn.tools
        return Parser(form, tools.schemas, form.begun(prompt), calling, single=not tools.parallel)


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise Problem(
                    f"{where}content has a part of type {shown(part.type)}; this engine reads "
                    "parts of type text, which have a text",
                    param=f"{where}content",
                )
            check_lacking(part, Part, f"{where}content[{number}].")
        content = "".join(part.text or "" for part in content)
    if content is None and message.role == "assistant":
        return ""  # of a turn that only called tools, or said nothing
    if content is None:
        raise Problem(f"{where}content is missing; give a text", param=f"{where}content")
    return content
