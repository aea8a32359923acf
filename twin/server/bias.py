"""What a request adds to the logits of its answer: a bias of tokens, penalties, a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.engine.bias import Bias
from twin.server.problem import Problem
from twin.server.wire import Chat, Completion
from twin.text import shown

MOST_BIASED = 1024  # tokens of a logit_bias
WIDEST_BIAS, WIDEST_PENALTY = 100.0, 2.0  # as OpenAI's API allows
WIDEST_REPETITION = 100.0  # beyond it a token that was there comes as good as never


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Of tokens [n] by `added` [n], and of those that were made: once, and for each time. None of
    `ends` comes among the first `least`.
    """

    tokens: NDArray[np.int64]
    added: NDArray[np.float32]
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    least: int = 0
    ends: tuple[int, ...] = ()

    @property
    def steady(self) -> bool:
        return not self.presence and not self.frequency and not self.least

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        row[:] = 0
        row[self.tokens] = self.added
        if made and not self.steady:
            tokens, times = np.unique(np.asarray(made), return_counts=True)
            row[tokens] -= self.presence + self.frequency * times.astype(np.float32)
        if len(made) < self.least:
            row[list(self.ends)] = -np.inf


@dataclass(frozen=True, slots=True)
class Sum:
    """Two of them. The first one's row is whole before the second is added."""

    first: Bias
    second: Bias

    @property
    def steady(self) -> bool:
        return self.first.steady and self.second.steady

    @property
    def repetition(self) -> float:
        return self.first.repetition * self.second.repetition

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        self.first.write(row, made)
        more = np.empty_like(row)
        self.second.write(more, made)
        row += more


def adjustment(
    body: Chat | Completion, vocab: int, least: int, ends: Iterable[int]
) -> Adjustment | None:
    """What a request's fields add; before `least` tokens none of `ends`. None where nothing is
    adjusted. Raises Problem.
    """
    presence, frequency = body.presence_penalty, body.frequency_penalty
    repetition = body.repetition_penalty
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if value is not None and not -WIDEST_PENALTY <= value <= WIDEST_PENALTY:
            raise Problem(
                f"{name}={value}: must lie between {-WIDEST_PENALTY:g} and {WIDEST_PENALTY:g}",
                param=name,
            )
    if repetition is not None and not 0 < repetition <= WIDEST_REPETITION:
        raise Problem(
            f"repetition_penalty={repetition}: must lie above 0 and at most {WIDEST_REPETITION:g}",
            param="repetition_penalty",
        )
    biased = body.logit_bias or {}
    if len(biased) > MOST_BIASED:
        raise Problem(
            f"logit_bias: {len(biased)} tokens; at most {MOST_BIASED}", param="logit_bias"
        )
    strange = [
        token
        for token in biased
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab)
    ]
    if strange:
        raise Problem(
            f"logit_bias names {shown(strange)}; allowed: a token of this vocabulary of {vocab}, "
            f"0 to {vocab - 1}",
            param="logit_bias",
        )
    wide = [token for token, value in biased.items() if not -WIDEST_BIAS <= value <= WIDEST_BIAS]
    if wide:
        raise Problem(
            f"logit_bias of token {wide[0]} is {biased[wide[0]]}: must lie between "
            f"{-WIDEST_BIAS:g} and {WIDEST_BIAS:g}",
            param="logit_bias",
        )
    if not (biased or presence or frequency or least) and repetition in (None, 1):
        return None
    tokens = np.array([int(token) for token in biased], np.int64)
    added = np.array([*biased.values()], np.float32)
    return Adjustment(
        tokens,
        added,
        presence or 0.0,
        frequency or 0.0,
        repetition or 1.0,
        least,
        tuple(end for end in ends if end < vocab),
    )


def together(
    grammar: Callable[[], Bias] | None, adjusted: Adjustment | None
) -> Callable[[], Bias] | None:
    """What makes the bias of each generation of a request."""
    if grammar is None:
        return None if adjusted is None else lambda: adjusted
    return grammar if adjusted is None else lambda: Sum(grammar(), adjusted)
