"""What the host adds to the logits of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_UNMARKED = np.uint32(0xFFFFFFFE)


class Bias(Protocol):
    """What is added to the logits of generated tokens. Raises nothing: what it raises ends the
    generation.
    """

    @property
    def steady(self) -> bool:
        """The same for every token."""
        ...

    @property
    def repetition(self) -> float:
        """What the logit of a token of the prompt or of the answer is first divided by where it is
        positive, and multiplied by where it is not: above 0; 1 changes nothing.
        """
        ...

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        """Into `row` [vocab], for the token behind those `made` by this request; -inf: it cannot
        come. At least one must be able to.
        """
        ...


class GivenBias:
    """The rows of a bias [1 or 2, vocab] in memory that the kernel reads: one that is steady, or
    two in turn.

    Of a bias with a repetition penalty, the lowest bit of a word says that its token was there
    before: the kernel clears it before it adds the word, which changes a bias by one part in 2**23.
    """

    def __init__(
        self, bias: Bias, rows: NDArray[np.float32], before: Sequence[int], made: Sequence[int]
    ) -> None:
        """`before`: the prompt of this run; `made`: what the request has made of it already."""
        self._bias, self._rows = bias, rows
        self._made, self._begun = list(made), len(made)
        self._marks: NDArray[np.uint32] | None = None  # [vocab] 1: the token was there before
        if bias.repetition != 1:
            self._marks = np.zeros(rows.shape[1], np.uint32)
            self._marks[list(before)] = 1
        self._write()

    @staticmethod
    def count(bias: Bias) -> int:
        """Of its rows."""
        return 1 if bias.steady and bias.repetition == 1 else 2

    def push(self, token: int) -> int:
        """Writes the row for what follows a token. Returns how many were written behind the
        first.
        """
        self._made.append(token)
        if self._marks is not None:
            self._marks[token] = 1
        return self._write()

    def _write(self) -> int:
        given = len(self._made) - self._begun
        row = self._rows[given % len(self._rows)]
        self._bias.write(row, self._made)
        if self._marks is not None:
            words = row.view(np.uint32)
            words &= _UNMARKED
            words |= self._marks
        return given
