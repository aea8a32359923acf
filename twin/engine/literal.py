"""Spellings of special tokens that are text: those that a client wrote, not the chat template.

A template's marks of turns are special tokens. Whoever may write one within a message could end
the message and begin another of the system. llama.cpp's engine of templates tracks which text is
input for this purpose (its issues 18462 and 28249; its server does not use it yet); transformers
and vLLM read such spellings as the tokens. Here the client's spellings are broken by a sign
before the template runs, so that the template's own ones can be distinguished behind it. They
become tokens under names that nobody can guess, in one pass over the whole text, and the signs go.

Only tokens that a tokenizer calls special are concerned, as llama.cpp's `parse_special` has it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from twin.engine.resumed import Resumed
from twin.engine.tokenizer import Tokenizer
from twin.errors import ConfigError

Json = TypeVar("Json")
SIGNS = range(0xE000, 0xF900)  # characters without a meaning of their own


@dataclass(frozen=True, slots=True)
class Marked:
    """A text in which `sign` stands behind the first character of each such spelling."""

    marked: str
    sign: str = ""  # empty: there are none

    @property
    def plain(self) -> str:
        return unsigned(self.marked, self.sign)


def unsigned(text: str, sign: str) -> str:
    """Without the signs; a template may have written them as JSON does."""
    if not sign:
        return text
    return text.replace(sign, "").replace(f"\\u{ord(sign):04x}", "")


@dataclass(frozen=True)
class Spellings:
    """Of one tokenizer's special tokens."""

    tokenizer: Tokenizer
    reuse: bool = True  # what the last text was encoded to: times could show what it was
    _secret: str = field(default_factory=lambda: secrets.token_hex(8))
    _plain: Resumed = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", Resumed(self.tokenizer))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokenizer.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, filter(_breakable, longest_first))) or r"(?!)")

    def prepare(self) -> None:
        """What the first such text would wait for: 0.2 s for 150,000 words."""
        _ = self._literal, self._numbers

    def broken(self, values: Json) -> tuple[Json, str]:
        """JSON values with a sign in each spelling, also of an object's keys; and the sign, empty
        where there is none. Raises ConfigError.
        """
        texts = [*_texts(values)]
        if not any(map(self._pattern.search, texts)):
            return values, ""
        sign = next((sign for sign in map(chr, SIGNS) if not any(sign in t for t in texts)), None)
        if sign is None:
            raise ConfigError(
                f"the messages hold all {len(SIGNS)} characters that no text needs; leave one out"
            )
        changed: Json = _changed(values, lambda text: self._break(text, sign))
        return changed, sign

    def _break(self, text: str, sign: str) -> str:
        return self._pattern.sub(lambda found: found[0][0] + sign + found[0][1:], text)

    def encode(self, text: Marked) -> list[int]:
        """As `Tokenizer.encode_plain`, but for the spellings. Raises ConfigError."""
        if not text.sign:
            plain = self._plain if self.reuse else self.tokenizer
            return plain.encode_plain(text.marked)
        special = self.tokenizer.special
        named, count = self._pattern.subn(lambda f: self._alias(special[f[0]]), text.marked)
        written = unsigned(named, text.sign)
        tokens = self.as_text(written)
        numbers = set(special.values())
        if sum(token in numbers for token in tokens) != count:
            raise ConfigError(
                "a message spells a special token, which this tokenizer cannot encode as text; "
                "write it in another way"
            )
        return tokens

    def as_text(self, text: str) -> list[int]:
        """Tokens of a text none of which is special, whatever it spells. Raises ConfigError."""
        return [self._numbers.get(one, one) for one in self._literal.encode_plain(text)]

    def _alias(self, token: int) -> str:
        return f"\U000f0000{self._secret}{token}\U000f0001"

    @cached_property
    def _literal(self) -> Tokenizer:
        """The same tokenizer with its special tokens by other names. It shares the vocabulary."""
        backend = self.tokenizer.backend
        made = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (found := getattr(backend, part)) is not None:
                setattr(made, part, found)
        for token, added in sorted(self.tokenizer.added.items()):
            made.add_tokens([self._renamed(token, added)])
        return Tokenizer(made, None, frozenset())

    def _renamed(self, token: int, added: Any) -> Any:
        return tokenizers.AddedToken(
            self._alias(token) if _renamed(added) else added.content,
            single_word=added.single_word,
            lstrip=added.lstrip,
            rstrip=added.rstrip,
            normalized=added.normalized,
            special=added.special,
        )

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Numbers of added tokens there, as the tokenizer has them."""
        find = self._literal.backend.token_to_id
        return {
            find(self._alias(token) if _renamed(added) else added.content): token
            for token, added in self.tokenizer.added.items()
        }


def _breakable(spelling: str) -> bool:
    return len(spelling) > 1


def _renamed(added: Any) -> bool:
    return bool(added.special) and _breakable(added.content)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(one, change) for one in value]
    return value
