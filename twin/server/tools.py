"""Tools of a request: what it offers, which it wants called, and calls in a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from twin.server.formats import GENERIC
from twin.server.problem import Problem
from twin.server.wire import NOTHING, Unread, decoded
from twin.text import shown

MOST_TOOLS = 128  # as OpenAI's API allows
MOST_BYTES = 2**18  # of JSON: while it is read, no stream moves
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SYSTEM = (
    "You may call functions to answer. Their signatures, as JSON schemas, stand between the tags "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call answer with its name and "
    'arguments as JSON between tags:\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n'
    "</tool_call>"
)


class Function(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    function: Function | None = None


class Named(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str


class Choice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    function: Named | None = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class Called(msgspec.Struct, kw_only=True):
    """A call in a message of the assistant. Clients send back what they got: fields of others
    (an index, extra content) say nothing here.
    """

    id: str | None = None
    type: str | None = None
    function: CalledFunction

    def plain(self, *, as_text: bool) -> dict[str, Any]:
        """As templates read it; `as_text`: its arguments are JSON, not a mapping."""
        given = self.function.arguments
        arguments = json.dumps(given, ensure_ascii=False) if as_text else given
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class Wanted(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request offers. Empty: nothing is a call."""

    offered: tuple[Tool, ...] = ()
    wanted: Wanted = Wanted.AUTO
    name: str | None = None  # the one function that is to be called
    parallel: bool = True
    given: tuple[Any, ...] = ()  # as the request wrote them, for templates

    @property
    def callable(self) -> bool:
        return bool(self.offered) and self.wanted is not Wanted.NONE

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters' JSON schemas, by the functions' names; of the wanted one alone."""
        found = [tool.function for tool in self.offered if tool.function is not None]
        return {f.name: f.parameters or {} for f in found if self.name in (None, f.name)}


def tools_of(tools: Unread, choice: Unread = NOTHING, parallel: bool | None = None) -> Tools:
    """What a request offers and wants. Raises Problem."""
    offered = tuple(_read(tools, list[Tool], "tools") or ())
    if len(offered) > MOST_TOOLS:
        raise Problem(f"tools: {len(offered)} of them; at most {MOST_TOOLS}", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(offered):
        _check(at, tool, names)
    wanted, name = _choice(choice, names)
    given = tuple(_read(tools, list[Any], "tools") or ())
    return Tools(offered, wanted, name, parallel is not False, given)


def _check(at: int, tool: Tool, names: set[str]) -> None:
    where = f"tools[{at}]"
    if tool.type != "function" or tool.function is None:
        raise Problem(
            f"{where} has the type {shown(tool.type)}; this engine knows tools of type function, "
            "which have a function",
            param=where,
            code="unsupported_value",
        )
    name = tool.function.name
    if not _NAME.fullmatch(name):
        raise Problem(
            f"{where}.function.name is {shown(name)}; allowed: 1 to 64 letters, digits, _, - or .",
            param=f"{where}.function.name",
        )
    if name in names:
        raise Problem(
            f"{where}.function.name {shown(name)} was given before; each needs its own name",
            param=f"{where}.function.name",
        )
    names.add(name)


def _choice(raw: Unread, names: set[str]) -> tuple[Wanted, str | None]:
    found = _read(raw, str | Choice, "tool_choice")
    if found is None:
        return Wanted.AUTO, None
    if isinstance(found, str):
        if found not in {one.value for one in Wanted}:
            raise Problem(
                f"tool_choice is {shown(found)}; allowed: none, auto, required, or a function's "
                "name in an object",
                param="tool_choice",
            )
        wanted, name = Wanted(found), None
    elif found.type != "function" or found.function is None:
        raise Problem(
            f"tool_choice has the type {shown(found.type)}; allowed: function, with its name",
            param="tool_choice",
        )
    else:
        wanted, name = Wanted.REQUIRED, found.function.name
    if wanted is Wanted.REQUIRED and not names:
        raise Problem(f"tool_choice={shown(found)} needs tools; send them", param="tool_choice")
    if name is not None and name not in names:
        raise Problem(
            f"tool_choice names {shown(name)}, which is none of the tools; send one of them",
            param="tool_choice",
        )
    return wanted, name


def calls_of(raw: Unread, where: str) -> list[Called]:
    """Calls of a message of the assistant. Raises Problem."""
    found = _read(raw, list[Called], where) or []
    for at, one in enumerate(found):
        given = one.function.arguments
        if isinstance(given, str):
            name = f"{where}[{at}].function.arguments"
            given = decoded(given.encode(), dict[str, Any], name) if given.strip() else {}
        one.function.arguments = given or {}
    return list(found)


def described(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation for a template that has no tools: a system message describes them, and calls
    and their results are text, as `GENERIC` writes them.
    """
    made = [_said(one) for one in messages]
    if tools:
        listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
        text = _SYSTEM.format(tools=listed)
        if made and made[0]["role"] == "system":
            made[0] = made[0] | {"content": f"{made[0]['content']}\n\n{text}"}
        else:
            made.insert(0, {"role": "system", "content": text})
    return made


def _said(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{GENERIC.open}\n{json.dumps(call['function'], ensure_ascii=False)}\n{GENERIC.close}"
        for call in calls
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": message["role"], "content": content}


def _read(raw: Unread, kind: Any, where: str) -> Any:
    """None where nothing was sent."""
    size = len(bytes(raw))
    if size > MOST_BYTES:
        raise Problem(f"{where}: {size} bytes of JSON; at most {MOST_BYTES}", param=where)
    return None if bytes(raw) in (b"", b"null") else decoded(raw, kind, where)
