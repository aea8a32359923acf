"""Log probabilities of generated tokens, and how tokens are spelt.

The probabilities are the model's own: before temperature, top-k and top-p, as vLLM gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.engine.tokenizer import BYTE, Tokenizer, bytes_of

SPACE = "▁"  # of SentencePiece


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probability, and the most probable tokens at its place."""

    token: int
    logprob: float | None  # None: of a prompt's first token, which follows nothing
    top: tuple[tuple[int, float], ...]  # the most probable first, of equal ones the lower number


def scored(logits: NDArray[np.float32], token: int, top: int) -> Scored:
    """Of a token that was chosen from logits [vocab]; `top`: how many others are reported."""
    shifted = logits - logits.max()
    with np.errstate(under="ignore"):
        total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
    best: Sequence[int] = ()
    if top:
        least = np.partition(shifted, -min(top, len(shifted)))[-min(top, len(shifted))]
        found = np.flatnonzero(shifted >= least)
        best = found[np.argsort(-shifted[found], kind="stable")][:top].tolist()
    return Scored(
        token,
        float(shifted[token]) - total,
        tuple((one, float(shifted[one]) - total) for one in best),
    )


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes of each token: what a byte-level or SentencePiece vocabulary spells."""

    tokenizer: Tokenizer

    def bytes_of(self, token: int) -> bytes:
        """Empty for a row of the vocabulary without a token."""
        piece = self.tokenizer.piece(token)
        if piece is None:
            return b""
        if token in self.tokenizer.added:
            return piece.encode()
        if self.tokenizer.byte_level:
            return bytes_of(piece)
        if BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def special(self, token: int) -> bool:
        """Such a token stands for no text."""
        found = self.tokenizer.added.get(token)
        return found is not None and bool(found.special)
