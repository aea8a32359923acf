"""Text from a session: tokens become pieces of text as they are made, and stop texts end a
generation. Prints and parses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from twin.engine.bias import Bias
from twin.engine.generation import Generation
from twin.engine.logprobs import Scored, scored
from twin.engine.sampling import SamplingParams
from twin.engine.session import Cancelled, Session
from twin.engine.tokenizer import Detokenizer, Tokenizer
from twin.errors import EngineError

ECHO_TOKENS = 128  # of a prompt whose logits the host holds at once: 78 MB of 151,936 each
NOTHING = Generation([], np.zeros(0, np.int64), 0, "length")
MARK = 0xD800  # the first character that no text has: half of a pair in UTF-16


class Stop(Enum):
    """What ended a generation."""

    LENGTH = "length"  # as many tokens as were requested
    TOKEN = "stop-token"
    TEXT = "stop-text"
    CANCELLED = "cancelled"  # by Ctrl-C or `Session.cancel`


@dataclass(frozen=True, slots=True)
class Request:
    """What to continue, and when to end."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  # frozen
    stop_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()  # none of them is empty
    reuse: bool = False  # keys and values that the session still holds for the prompt's beginning
    logprobs: int | None = None  # of each token, and of so many of the most probable ones
    named: frozenset[str] = frozenset()  # special tokens that stand in the text by their names
    bias: Callable[[], Bias] | None = None  # makes what is added to this generation's logits
    echo: bool = False  # the prompt's text and log probabilities come first; 0 tokens may follow


@dataclass(frozen=True, slots=True)
class Piece:
    """What became known at once: a token, and the text that may be shown since.

    The text is often empty: within a character of several tokens, or while it may be the beginning
    of a stop text.
    """

    text: str
    token: int | None = None  # None: the rest of the text, after the last token
    scored: Scored | None = None  # of the token, where the request wants log probabilities


@dataclass(frozen=True, slots=True)
class Completion:
    """A generation that has ended, with its timings."""

    text: str  # without the stop text, and what came after it
    stop: Stop
    made: Generation
    stop_text: str = ""  # the one that ended it


OnPiece = Callable[[Piece], None]


def complete(
    session: Session, tokenizer: Tokenizer | None, request: Request, on_piece: OnPiece | None = None
) -> Completion:
    """One request, in the caller's thread; `on_piece` gets the text as it is made. Without a
    tokenizer the text is token ids.

    `session.cancel` ends it from another thread, or from `on_piece`. Raises EngineError.
    """
    if "" in request.stop_texts:
        raise EngineError("a stop text is empty: it would end every generation before it begins")
    detokenizer = tokenizer.detokenizer(request.prompt) if tokenizer else None
    text = Text(detokenizer, request.stop_texts, request.named)

    def tell(piece: Piece) -> None:
        if on_piece is not None:
            on_piece(piece)

    before = ""
    if request.echo:
        try:
            before = _echoed(session, tokenizer, request, tell)
        except Cancelled:
            return Completion("", Stop.CANCELLED, NOTHING)
    if request.max_tokens == 0:
        return Completion(before, Stop.LENGTH, NOTHING)
    logits: list[NDArray[np.float32]] = []  # of the next token

    def take(token: int) -> None:
        if text.found is not None:
            return  # the engine was a token ahead of the cancellation
        found = None
        if request.logprobs is not None:
            found = scored(logits.pop(), token, request.logprobs)
        tell(Piece(text.push(token, shown=token not in request.stop_tokens), token, found))
        if text.found is not None:
            session.cancel()

    made = session.generate(
        request.prompt,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop=request.stop_tokens,
        on_token=take,
        on_logits=logits.append if request.logprobs is not None else None,
        reuse=request.reuse,
        bias=request.bias() if request.bias is not None else None,
    )
    if rest := text.finish():
        tell(Piece(rest))
    return Completion(before + text.whole, _stop(made, text), made, text.found or "")


def _echoed(session: Session, tokenizer: Tokenizer | None, request: Request, tell: OnPiece) -> str:
    """Hands out the prompt, and returns its text. Logits of a part at a time: all of them at once
    would take gigabytes.
    """
    detokenizer, prompt = tokenizer.detokenizer() if tokenizer else None, list(request.prompt)
    text = ""

    def say(token: int, found: Scored | None) -> None:
        nonlocal text
        piece = detokenizer.push(token) if detokenizer else f"{token} "
        text += piece
        tell(Piece(piece, scored=found))

    say(prompt[0], None if request.logprobs is None else Scored(prompt[0], None, ()))
    for at in range(0, len(prompt) - 1, ECHO_TOKENS):
        read, follow = prompt[at:][:ECHO_TOKENS], prompt[at + 1 :][:ECHO_TOKENS]
        if request.logprobs is None:
            for token in follow:
                say(token, None)
            continue
        rows = session.logits(read[: len(follow)], after=prompt[:at])
        for row, token in zip(rows, follow, strict=True):
            say(token, scored(row, token, request.logprobs))
    if rest := detokenizer.finish() if detokenizer else "":
        text += rest
        tell(Piece(rest))
    return text


def _stop(made: Generation, text: Text) -> Stop:
    if text.found is not None:
        return Stop.TEXT
    return {"stop": Stop.TOKEN, "cancelled": Stop.CANCELLED, "length": Stop.LENGTH}[
        made.stop_reason
    ]


class Text:
    """Text as it grows, up to the first stop text. What may be the beginning of one is held back.

    A stop text may name special tokens, which have no text: a mark stands for each of them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        named: Collection[str] = (),
    ) -> None:
        self.found: str | None = None  # the stop text that ended it
        self._detokenizer = detokenizer
        self._stops = {stop: stop for stop in stops}  # what is looked for -> what was requested
        self._marks: dict[int, str] = {}  # a special token that a stop text names -> its mark
        special = detokenizer.tokenizer.special if detokenizer else {}
        self._names = {special[name]: name for name in named if name in special}
        for text, token in sorted(special.items()):
            if text not in named and any(text in stop for stop in stops):
                self._marks[token] = chr(MARK + len(self._marks))
                self._stops |= {
                    looked.replace(text, self._marks[token]): stop
                    for looked, stop in self._stops.items()
                }
        self._given: list[str] = []
        self._held = ""  # back

    @property
    def whole(self) -> str:
        """Without the stop text, and what came after it."""
        return "".join(self._given) + self._visible(self._held)

    def push(self, token: int, *, shown: bool = True) -> str:
        """What may be shown since the last call; of a token that is not `shown`, nothing."""
        if not shown:
            return ""
        mark = self._marks.get(token, "") or self._names.get(token, "")
        text = self._detokenizer.push(token) if self._detokenizer else f"{token} "
        return self.add(mark + text)

    def add(self, piece: str) -> str:
        """The same, of text."""
        text = self._held + piece
        if found := [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            first, looked = min(found)
            self.found = self._stops[looked]
            return self._give(text[:first], "")
        end = len(text) - self._begun(text)
        return self._give(text[:end], text[end:])

    def finish(self) -> str:
        """What was held back, and what is left of a character that never became whole (U+FFFD)."""
        if self.found is not None:
            return ""
        shown = self.add(self._detokenizer.finish()) if self._detokenizer else ""
        return shown + self._give(self._held, "")

    def _give(self, text: str, held: str) -> str:
        self._held, text = held, self._visible(text)
        if text:
            self._given.append(text)
        return text

    def _visible(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def _begun(self, text: str) -> int:
        """Characters at the end that a stop text begins with."""
        longest = min(max((len(stop) - 1 for stop in self._stops), default=0), len(text))
        return next(
            (
                n
                for n in range(longest, 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stops)
            ),
            0,
        )
