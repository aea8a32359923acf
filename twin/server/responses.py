"""`/v1/responses`: OpenAI's second way to chat, without state: a request holds all of a
conversation. Its body becomes a chat's; its answer and its stream of events are built here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twin.engine.generate import Stop
from twin.server.delta import Delta, merged
from twin.server.job import Ended, Failed, Job, Text
from twin.server.problem import Problem
from twin.server.replies import Reply, encoded
from twin.server.wire import Chat, Message, Responses, Unread, decoded
from twin.text import shown

LOGPROBS = "message.output_text.logprobs"  # of `include`
_SAME = (  # fields of both
    "chat_template_kwargs",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TEXTS = {"input_text", "output_text", "text", "reasoning_text"}
_MESSAGE, _CALL, _RESULT, _REASONING = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
)


class Content(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Format(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """Of a conversation. Clients send back what they got: fields that say nothing here are left."""

    type: str = _MESSAGE
    role: str | None = None
    content: str | list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Content] | None = None
    summary: list[Content] | None = None


def chat_of(body: Responses) -> Chat:
    """The same request as a chat. Raises Problem."""
    scored = LOGPROBS in (body.include or ())
    if body.top_logprobs and not scored:
        raise Problem(f"top_logprobs needs include=[{LOGPROBS!r}]", param="top_logprobs")
    messages = [] if body.instructions is None else [_said("system", body.instructions)]
    found: Any = decoded(body.input, str | list[Item], "input")
    if isinstance(found, str):
        messages.append(_said("user", found))
    else:
        messages += _messages(found)
    text: TextOptions | None = _read(body.text, TextOptions, "text")
    reasoning: Reasoning | None = _read(body.reasoning, Reasoning, "reasoning")
    return Chat(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=_tools(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.effort if reasoning else None,
        response_format=_format(text),
        logprobs=scored,
        top_logprobs=body.top_logprobs,
        **{name: getattr(body, name) for name in _SAME},
    )


def _read(raw: Unread, kind: Any, where: str) -> Any:
    return None if bytes(raw) in (b"", b"null") else decoded(raw, kind, where)


def _said(role: str, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def _messages(items: Sequence[Item]) -> list[Message]:
    """Calls in a row, and what was thought before, belong to one message of the assistant."""
    made: list[Message] = []
    calls: list[dict[str, Any]] = []
    thought = ""

    def close() -> None:
        nonlocal thought
        if calls or thought:
            raw = Unread(encoded(calls))
            made.append(_said("assistant", "", tool_calls=raw, reasoning_content=thought or None))
            calls.clear()
            thought = ""

    for at, item in enumerate(items):
        where = f"input[{at}]"
        if item.type == _REASONING:
            thought += _texts(item.content or item.summary, f"{where}.content")
        elif item.type == _CALL:
            function = {"name": item.name or "", "arguments": item.arguments or "{}"}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == _RESULT:
            close()
            text = _texts(item.output, f"{where}.output")
            made.append(_said("tool", text, tool_call_id=item.call_id))
        elif item.type == _MESSAGE:
            if item.role == "assistant" and thought and not calls:
                text = _texts(item.content, f"{where}.content")
                made.append(_said("assistant", text, reasoning_content=thought))
                thought = ""
                continue
            close()
            made.append(_said(item.role or "", _texts(item.content, f"{where}.content")))
        else:
            raise Problem(
                f"{where} has the type {shown(item.type)}; this engine reads {_MESSAGE}, {_CALL}, "
                f"{_RESULT} and {_REASONING}",
                param=where,
                code="unsupported_value",
            )
    close()
    return made


def _texts(content: str | list[Content] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        if part.type not in {*_TEXTS, "summary_text", "refusal"}:
            raise Problem(
                f"{where}[{at}] has the type {shown(part.type)}; this engine reads texts",
                param=f"{where}[{at}]",
                code="unsupported_value",
            )
    return "".join(part.text or "" for part in content)


def _tools(raw: Unread) -> Unread:
    """A function's fields stand next to its type here."""
    made = []
    for tool in _read(raw, list[dict[str, Any]], "tools") or []:
        if tool.get("type") != "function":
            made.append(tool)
            continue
        kept = {key: tool[key] for key in tool if key not in ("type", "defer_loading")}
        made.append({"type": "function", "function": kept})
    return Unread(encoded(made))


def _choice(raw: Unread) -> Unread:
    found = _read(raw, str | dict[str, Any], "tool_choice")
    if isinstance(found, dict) and "name" in found:
        found = {"type": found.get("type"), "function": {"name": found["name"]}}
    return Unread(encoded(found))


def _format(text: TextOptions | None) -> Unread:
    if text is None or text.format is None:
        return Unread()
    found = text.format
    if found.type != "json_schema":
        return Unread(encoded({"type": found.type}))
    schema = {"name": found.name, "schema": found.schema, "strict": found.strict}
    return Unread(encoded({"type": found.type, "json_schema": schema}))


@dataclass(slots=True)
class _Item:
    """Of an answer, as it grows."""

    kind: str
    index: int
    id: str
    text: str = ""  # or a call's arguments
    name: str = ""
    call_id: str = ""
    done: bool = False
    logprobs: list[Any] = field(default_factory=list)  # of a message's tokens

    def written(self, status: str) -> dict[str, Any]:
        if self.kind == _CALL:
            return {
                "id": self.id,
                "type": _CALL,
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
        begun = self.text or self.done
        if self.kind == _REASONING:
            parts = [{"type": "reasoning_text", "text": self.text}] if begun else []
            return {
                "id": self.id,
                "type": _REASONING,
                "status": status,
                "summary": [],
                "content": parts,
            }
        return {
            "id": self.id,
            "type": _MESSAGE,
            "status": status,
            "role": "assistant",
            "content": [_part(self.text, self.logprobs)] if begun else [],
        }


def _part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(slots=True)
class ResponsesReply(Reply):
    """The same request's answer in the form of `/v1/responses`."""

    body: Responses | None = None
    _items: list[_Item] = field(default_factory=list)
    _number: int = 0  # of the next event
    _opened: bool = False

    def __post_init__(self) -> None:
        self.id = "resp_" + secrets.token_hex(12)

    # ---- whole ---------------------------------------------------------------------------------

    def whole(self, job: Job) -> bytes:
        (one,) = self.ended
        for _ in self._finish():
            pass
        return encoded(self._response(self._status(one), job))

    def hear(self, text: Text) -> None:
        for _ in self._taken([text]):
            pass

    def _taken(self, texts: Iterable[Text]) -> Iterator[bytes]:
        """Texts as events: one by one where the log probabilities of each are to be sent."""
        if self.requests[0].logprobs is None:
            yield from self._grow(merged(delta for one in texts for delta in self._split(one)))
            return
        for one in texts:
            self._score(one)
            yield from self._grow(merged(self._split(one)))

    def _split(self, text: Text) -> list[Delta]:
        if self.parsers:
            return Reply._split(self, text)
        return [Delta(content=text.text)] if text.text else []

    def _finish(self) -> Iterator[bytes]:
        yield from self._grow(self.parsers[0].finish() if self.parsers else [])
        yield from self._end()

    @staticmethod
    def _status(one: Ended) -> str:
        return "incomplete" if one.completion.stop is Stop.LENGTH else "completed"

    def _response(self, status: str, job: Job | None = None) -> dict[str, Any]:
        body = self.body
        assert body is not None
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        said: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None if status == "in_progress" else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [one.written("completed") for one in self._items if one.done],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": _read(body.reasoning, dict[str, Any], "reasoning")
            or {"effort": None, "summary": None},
            "service_tier": body.service_tier or "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": _read(body.text, dict[str, Any], "text") or {"format": {"type": "text"}},
            "tool_choice": _read(body.tool_choice, Any, "tool_choice") or "auto",
            "tools": _read(body.tools, list[Any], "tools") or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": _read(body.metadata, dict[str, Any], "metadata") or {},
        }
        if job is not None:
            said |= {"usage": self._used(), "timings": self.timings(job)}
        return said

    def _used(self) -> dict[str, Any]:
        used = self.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    # ---- a stream ------------------------------------------------------------------------------

    def text_chunks(self, texts: Iterable[Text]) -> bytes:
        return self._openings() + b"".join(self._taken(texts))

    def end_chunk(self, one: Ended) -> bytes:
        return self._openings() + b"".join(self._finish())

    def last_chunks(self, job: Job) -> bytes:
        status = self._status(self.ended[0])
        return self._event(f"response.{status}", response=self._response(status, job))

    def failed_chunk(self, failed: Failed) -> bytes:
        error = failed.problem.body()["error"]
        return self._event("error", code=error["code"], message=error["message"], param=None)

    def _openings(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _event(self, kind: str, **said: Any) -> bytes:
        body = encoded({"type": kind, "sequence_number": self._number} | said)
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)

    def _grow(self, deltas: Iterable[Delta]) -> Iterator[bytes]:
        for one in deltas:
            kind = _CALL if one.call >= 0 else _REASONING if one.reasoning else _MESSAGE
            last = self._items[-1] if self._items else None
            if last is None or last.done or last.kind != kind or one.begins:
                yield from self._close()
                last = self._new(kind, one)
                yield from self._opening(last)
            text = one.arguments or one.reasoning or one.content
            scores = (self._logprobs(0) or {"content": []})["content"]
            if text:
                last.text += text
                said = {"logprobs": scores} if kind == _MESSAGE else {}
                last.logprobs += said.get("logprobs", [])
                yield self._event(_DELTAS[kind], **self._place(last), delta=text, **said)

    def _new(self, kind: str, delta: Delta) -> _Item:
        name = {_CALL: "fc_", _REASONING: "rs_", _MESSAGE: "msg_"}[kind] + secrets.token_hex(12)
        item = _Item(kind, len(self._items), name, name=delta.begins, call_id=delta.id)
        self._items.append(item)
        return item

    def _place(self, item: _Item) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return place if item.kind == _CALL else place | {"content_index": 0}

    def _opening(self, item: _Item) -> Iterator[bytes]:
        written = item.written("in_progress")
        yield self._event("response.output_item.added", output_index=item.index, item=written)
        if item.kind == _MESSAGE:
            yield self._event("response.content_part.added", **self._place(item), part=_part(""))

    def _end(self) -> Iterator[bytes]:
        """An answer without anything is an empty message."""
        if not self._items:
            yield from self._opening(self._new(_MESSAGE, Delta()))
        yield from self._close()

    def _close(self) -> Iterator[bytes]:
        """Of the item that is open, if there is one."""
        if not self._items or self._items[-1].done:
            return
        item = self._items[-1]
        item.done = True
        said: dict[str, Any] = (
            {"arguments": item.text} if item.kind == _CALL else {"text": item.text}
        )
        if item.kind == _CALL:
            said["name"] = item.name
        if item.kind == _MESSAGE:
            said["logprobs"] = item.logprobs
        yield self._event(_DONES[item.kind], **self._place(item), **said)
        if item.kind == _MESSAGE:
            part = _part(item.text, item.logprobs)
            yield self._event("response.content_part.done", **self._place(item), part=part)
        written = item.written("completed")
        yield self._event("response.output_item.done", output_index=item.index, item=written)


_DELTAS = {
    _CALL: "response.function_call_arguments.delta",
    _REASONING: "response.reasoning_text.delta",
    _MESSAGE: "response.output_text.delta",
}
_DONES = {kind: name.removesuffix("delta") + "done" for kind, name in _DELTAS.items()}
