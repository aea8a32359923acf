"""Answers as bytes: whole ones, and streams whose chunks are put together by hand."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twin.engine.generate import Request, Stop
from twin.engine.logprobs import Scored, Spelling
from twin.server.delta import Delta, merged
from twin.server.job import Ended, Failed, Job, Text
from twin.server.parsing import Parser
from twin.server.scores import Scores

_REASON = {Stop.LENGTH: "length", Stop.TOKEN: "stop", Stop.TEXT: "stop"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def _written(delta: Delta) -> dict[str, Any]:
    """A delta as OpenAI's streams have it."""
    if delta.begins:
        function = {"name": delta.begins, "arguments": ""}
        call = {"index": delta.call, "id": delta.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if delta.call >= 0:
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.arguments}}]}
    return _thought(delta.reasoning) if delta.reasoning else {"content": delta.content}


def _thought(text: str) -> dict[str, str]:
    """By DeepSeek's and llama.cpp's name, and by that of vLLM and OpenRouter: clients know one."""
    return {"reasoning_content": text, "reasoning": text}


def _calls(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    made: dict[int, dict[str, Any]] = {}
    for one in deltas:
        if one.begins:
            function = {"name": one.begins, "arguments": ""}
            made[one.call] = {"id": one.id, "type": "function", "function": function}
        elif one.call >= 0:
            made[one.call]["function"]["arguments"] += one.arguments
    return list(made.values())


def encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)


@dataclass(slots=True)
class Reply:
    """One request's answer as it grows."""

    chat: bool
    model: str
    fingerprint: str
    requests: Sequence[Request]
    parsers: Sequence[Parser] = ()  # of chats whose answers hold more than content, one a choice
    reasoning: bool = True  # is sent
    usage_chunk: bool = False  # stream_options.include_usage
    usage_always: bool = False  # of what was made so far in each chunk, too
    step_times: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    ended: list[Ended] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    spelling: Spelling | None = None  # where log probabilities may be requested
    _sent: int = 0  # tokens in chunks so far
    _reasoned: int = 0  # tokens
    _split_up: dict[int, list[Delta]] = field(default_factory=dict)  # of whole answers, by choice
    _owed: dict[int, int] = field(default_factory=dict)  # tokens by choice whose text is held back
    _scored: dict[int, list[Scored]] = field(default_factory=dict)  # by choice, not yet written
    _scores: dict[int, Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)

    def hear(self, text: Text) -> None:
        """A part of an answer that is sent whole."""
        self._score(text)
        if self.parsers:
            self._split_up.setdefault(text.choice, []).extend(self._split(text))

    def _split(self, text: Text) -> list[Delta]:
        parser = self.parsers[text.choice]
        reasoned = parser.reasons
        made = parser.push(text.text)
        self._reasoned += text.tokens * (reasoned or parser.reasons)
        return made

    # ---- log probabilities ---------------------------------------------------------------------

    def _score(self, text: Text) -> None:
        """Tokens whose log probabilities are to be sent."""
        if text.scored:
            self._scored.setdefault(text.choice, []).extend(text.scored)

    def _logprobs(self, choice: int) -> dict[str, Any] | None:
        """Of what was heard since the last call; None where nobody wants them, or nothing came."""
        wanted = self.requests[choice].logprobs is not None and self.spelling is not None
        there = self._scored.pop(choice, [])
        if not wanted or self.spelling is None or not there:
            return None
        scores = self._scores.setdefault(choice, Scores(self.spelling, self.chat))
        return scores.written(there)

    # ---- whole ---------------------------------------------------------------------------------

    def whole(self, job: Job) -> bytes:
        choices = []
        for one in self.ended:
            choice: dict[str, Any] = {"index": one.choice}
            if self.chat:
                choice["message"] = self._message(one)
            else:
                choice["text"] = one.completion.text
            choices.append(
                choice
                | {
                    "logprobs": self._logprobs(one.choice),
                    "finish_reason": self._reason(one),
                }
            )
        said = self._head("chat.completion" if self.chat else "text_completion")
        return encoded(
            said | {"choices": choices, "usage": self.usage(), "timings": self.timings(job)}
        )

    def _message(self, one: Ended) -> dict[str, Any]:
        said: dict[str, Any] = {
            "role": "assistant",
            "content": one.completion.text,
            "refusal": None,
        }
        if not self.parsers:
            return said
        parser = self.parsers[one.choice]
        deltas = [*self._split_up.pop(one.choice, []), *parser.finish()]
        content = "".join(delta.content for delta in deltas)
        said["content"] = content if content or not parser.calls else None
        reasoning = "".join(delta.reasoning for delta in deltas)
        if reasoning and self.reasoning:
            said |= _thought(reasoning)
        if any(delta.begins for delta in deltas):
            said["tool_calls"] = _calls(deltas)
        return said

    def _reason(self, one: Ended) -> str:
        called = self.parsers and self.parsers[one.choice].calls
        reason = _REASON[one.completion.stop]
        return "tool_calls" if called and reason == "stop" else reason

    # ---- a stream ------------------------------------------------------------------------------

    def text_chunks(self, texts: Iterable[Text]) -> bytes:
        """What came since the last chunk, for each choice; nothing for what is held back."""
        joined: dict[int, list[Text]] = {}
        for one in texts:
            joined.setdefault(one.choice, []).append(one)
            self._owed[one.choice] = self._owed.get(one.choice, 0) + one.tokens
            self._score(one)
        made = []
        for choice, parts in joined.items():
            if choice not in self._begun:
                self._begun.add(choice)
                if self.chat:
                    made.append(self._chunk(choice, b'{"role":"assistant","content":""}', None))
            made += [self._grown(choice, body) for body in self._bodies(parts)]
        return b"".join(made)

    def _bodies(self, texts: Sequence[Text]) -> list[bytes]:
        """What texts add to an answer, a chunk each."""
        if self.parsers:
            return self._deltas(merged(delta for one in texts for delta in self._split(one)))
        text = "".join(one.text for one in texts)
        if not text:
            return []
        return [encoded({"content": text} if self.chat else text)]

    def _deltas(self, deltas: Iterable[Delta]) -> list[bytes]:
        return [encoded(_written(one)) for one in deltas if self.reasoning or not one.reasoning]

    def _grown(self, choice: int, body: bytes) -> bytes:
        """A chunk with the tokens and log probabilities that came since the last one."""
        scores = self._logprobs(choice)
        return self._chunk(choice, body, None, self._owed.pop(choice, 0), scores)

    def end_chunk(self, one: Ended) -> bytes:
        begin = self.text_chunks([Text(one.choice, "", 0)])  # of a choice without text
        if self.parsers:
            rest = self._deltas(self.parsers[one.choice].finish())
            begin += b"".join(self._grown(one.choice, body) for body in rest)
        body = b"{}" if self.chat else b'""'
        reason = self._reason(one)
        owed, scores = self._owed.pop(one.choice, 0), self._logprobs(one.choice)
        return begin + self._chunk(one.choice, body, reason, owed, scores)

    def last_chunks(self, job: Job) -> bytes:
        """Usage where it was requested, our timings in any case, and the end."""
        if not self.usage_chunk:
            return DONE
        said = self._head(self._object()) | {"choices": [], "usage": self.usage()}
        return b"data: " + encoded(said | {"timings": self.timings(job)}) + b"\n\n" + DONE

    def failed_chunk(self, failed: Failed) -> bytes:
        return b"data: " + encoded(failed.problem.body()) + b"\n\n"

    def _chunk(
        self,
        choice: int,
        body: bytes,
        reason: str | None,
        tokens: int = 0,
        scores: dict[str, Any] | None = None,
    ) -> bytes:
        name = b'"delta":' if self.chat else b'"text":'
        head = encoded(self._head(self._object()))[:-1]
        self._sent += tokens
        usage = b',"usage":null' if self.usage_chunk else b""
        if self.usage_always:
            usage = b',"usage":' + encoded(self._counts(self._sent))
        count = b',"tokens":%d' % tokens if tokens else b""
        return (
            b'data: %s,"choices":[{"index":%d,%s%s,"logprobs":%s,"finish_reason":%s}]%s%s}\n\n'
            % (head, choice, name, body, encoded(scores), encoded(reason), count, usage)
        )

    # ---- what both say -------------------------------------------------------------------------

    def _object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """What was kept of a prompt with several choices, by its first one."""
        firsts = self._firsts().values()
        kept = sum(one.completion.made.kept for one in self.ended if one.choice in firsts)
        made = sum(one.tokens for one in self.ended)
        said = self._counts(made) | {"prompt_tokens_details": {"cached_tokens": kept}}
        if self.chat:
            said["completion_tokens_details"] = {"reasoning_tokens": self._reasoned}
        return said

    def _counts(self, made: int) -> dict[str, Any]:
        prompt = sum(len(self.requests[at].prompt) for at in self._firsts().values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }

    def _firsts(self) -> dict[int, int]:
        """The first choice of each prompt: one with several counts once."""
        return {id(r.prompt): i for i, r in reversed([*enumerate(self.requests)])}

    def timings(self, job: Job) -> dict[str, Any]:
        """Ours: by the kernel's clock, but for the queue and the first token."""
        mades = [one.completion.made for one in self.ended]
        decode_s = sum(float(made.step_ns[1:].sum()) for made in mades) / 1e9
        steps = sum(max(0, len(made.step_ns) - 1) for made in mades)
        first_s = (job.first_s or job.born_s) - job.born_s
        said: dict[str, Any] = {
            "queue_ms": round(job.queued_s * 1e3, 3),
            "first_token_ms": round(first_s * 1e3, 3),
            "prompt_ms": sum(made.first_ns for made in mades) / 1e6,
            "decode_ms": decode_s * 1e3,
            "tokens_per_s": steps / decode_s if decode_s else 0.0,
            "kept_tokens": sum(made.kept for made in mades),
            "saved_ms": sum(one.saved_s for one in self.ended) * 1e3,
        }
        if self.step_times:
            said["step_us"] = [[int(ns) // 1000 for ns in made.step_ns] for made in mades]
        return said
