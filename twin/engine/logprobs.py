"""Log probabilities of generated tokens, and how tokens are spelt.

The probabilities are the model's own: before temperature, top-k and top-p, as vLLM gives them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.engine.tokenizer import Tokenizer, byte_characters

SPACE = "▁"  # of SentencePiece
_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probability, and the most probable tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable first, of equal ones the lower number


def scored(logits: NDArray[np.float32], token: int, top: int) -> Scored:
    """Of a token that was chosen from logits [vocab]; `top`: how many others are told."""
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


@dataclass(frozen=True)
class Spelling:
    """The bytes of each token: what a byte-level or SentencePiece vocabulary spells."""

    tokenizer: Tokenizer

    def bytes_of(self, token: int) -> bytes:
        """Empty for a row of the vocabulary without a token."""
        piece = self.tokenizer.backend.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return str(piece).encode()
        if "ByteLevel" in self._kinds:
            try:
                return bytes(_BYTES[character] for character in piece)
            except KeyError:  # a word that was put in as it is
                return str(piece).encode()
        if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(SPACE, " ").encode()

    def special(self, token: int) -> bool:
        """Such a token stands for no text."""
        found = self._added.get(token)
        return found is not None and bool(found.special)

    @cached_property
    def _added(self) -> dict[int, Any]:
        found: dict[int, Any] = self.tokenizer.backend.get_added_tokens_decoder()
        return found

    @cached_property
    def _kinds(self) -> set[str]:
        decoder = self.tokenizer.backend.decoder
        return _types(json.loads(decoder.__getstate__())) if decoder is not None else set()


def _types(state: Any) -> set[str]:
    """The kinds of decoders in one that may be a sequence of them."""
    if isinstance(state, list):
        return set().union(*map(_types, state)) if state else set()
    if not isinstance(state, dict):
        return set()
    return {str(state.get("type"))} | _types(state.get("decoders", []))
