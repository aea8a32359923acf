"""`logprobs` of answers, as OpenAI's two endpoints write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twin.engine.logprobs import Scored, Spelling

LEAST = -9999.0  # for a token that cannot come: JSON has no infinity, and OpenAI writes this


@dataclass(slots=True)
class Scores:
    """Of one choice; what is added in parts reads as what is added at once."""

    spelling: Spelling
    chat: bool
    _characters: int = 0  # of the text so far
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def written(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """The `logprobs` of tokens that follow those of the last call."""
        if self.chat:
            return {"content": [self._entry(one) for one in tokens], "refusal": None}
        return {
            "tokens": [self._text(one.token) for one in tokens],
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [self._chosen_and_top(one) for one in tokens],
            "text_offset": [self._offset(one.token) for one in tokens],
        }

    def _entry(self, one: Scored) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in one.top]
        return self._one(one.token, one.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelt = self.spelling.bytes_of(token)
        return {"token": _readable(spelt), "logprob": _finite(logprob), "bytes": list(spelt)}

    def _chosen_and_top(self, one: Scored) -> dict[str, float | None] | None:
        if one.logprob is None:
            return None
        found = {self._text(token): _finite(logprob) for token, logprob in one.top}
        return found | {self._text(one.token): _finite(one.logprob)}

    def _text(self, token: int) -> str:
        return _readable(self.spelling.bytes_of(token))

    def _offset(self, token: int) -> int:
        """Characters of the choice's text before a token."""
        before = self._characters
        if not self.spelling.special(token):
            self._characters += len(self._decoder.decode(self.spelling.bytes_of(token)))
        return before


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > LEAST else LEAST


def _readable(spelt: bytes) -> str:
    """A piece of a character is written as OpenAI writes it."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
