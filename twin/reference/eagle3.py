"""What an EAGLE-3 head drafts, in NumPy: all positions at once, as its paper computes them.

A position's input is the hidden state there and the embedding of the token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twin.plan.catalogue import StageKind
from twin.plan.shards import Weights, rope_table
from twin.plan.types import Plan, Stage
from twin.reference.memory import Array
from twin.reference.norms import rms_norm
from twin.reference.step import Reference


class Watched(Reference):
    """A reference that keeps what the head takes of each position: [three][hidden]."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        super().__init__(plan, weights)
        assert self.spec.draft_head is not None
        self._layers = self.spec.draft_head.taken
        self.watched: list[Array] = []

    def step(self, token: int) -> Array:
        self.watched.append(np.zeros((len(self._layers), self.spec.hidden), self.dtype))
        return super().step(token)

    def _hidden(self, stage: Stage, rank: int, inputs: list[Array]) -> Array:
        made = super()._hidden(stage, rank, inputs)
        if stage.kind is StageKind.QKV and stage.layer in self._layers:
            self.watched[-1][self._layers.index(stage.layer)] = self.residual[rank][0]
        return made


def drafts(
    weights: Weights, states: Sequence[Array], tokens: Sequence[int], count: int
) -> list[int]:
    """What the head drafts behind `tokens`; `states`: of all but the last one."""
    head = _Head(weights)
    hidden = np.stack([head.of("fc") @ one.reshape(-1) for one in states])
    found: list[int] = []
    for state, token in zip(hidden, tokens[1:], strict=True):
        last, logits = head.read(state, token)
    while True:
        found.append(int(head.ids[int(np.argmax(logits))]))
        if len(found) == count:
            return found
        last, logits = head.read(last, found[-1])


class _Head:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        spec = weights.spec
        assert spec.draft_head is not None
        self._spec, self._head = spec, spec.draft_head
        self._table = (
            self.of("embed")
            if self._head.own_table
            else np.asarray(weights["embed"]).astype(np.float32)
        )
        self.ids = np.asarray(weights["draft.ids"])
        self._keys: list[Array] = []
        self._values: list[Array] = []

    def of(self, name: str) -> Array:
        found: Array = np.asarray(self._weights[f"draft.{name}"]).astype(np.float32)
        return found

    def read(self, hidden: Array, token: int) -> tuple[Array, Array]:
        """(the layer's output, its logits) at the next position."""
        head, eps = self._head, self._head.norm_eps
        at = len(self._keys)
        x = np.concatenate(
            [
                rms_norm(self._table[token], self.of("input_norm"), eps),
                rms_norm(hidden, self.of("hidden_norm"), eps),
            ]
        )
        query = self._turned((self.of("q") @ x).reshape(head.heads, head.head_dim), at)
        self._keys.append(
            self._turned((self.of("k") @ x).reshape(head.kv_heads, head.head_dim), at)
        )
        self._values.append((self.of("v") @ x).reshape(head.kv_heads, head.head_dim))
        group = head.heads // head.kv_heads
        keys, values = (
            np.repeat(np.stack(one), group, axis=1) for one in (self._keys, self._values)
        )
        scores = np.einsum("hd,phd->hp", query, keys) / np.sqrt(np.float32(head.head_dim))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mixed = np.einsum("hp,phd->hd", shares, values).reshape(-1)
        hidden = hidden + self.of("o") @ mixed
        x = rms_norm(hidden, self.of("post_norm"), eps)
        gate = self.of("gate") @ x
        hidden = hidden + self.of("down") @ (gate / (1 + np.exp(-gate)) * (self.of("up") @ x))
        return hidden, self.of("lm_head") @ rms_norm(hidden, self.of("norm"), eps)

    def _turned(self, heads: Array, at: int) -> Array:
        cos, sin = rope_table(self._spec, at + 1, self._head.rope, dim=self._head.head_dim)
        half = self._head.head_dim // 2
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate(
            [first * cos[at] - second * sin[at], second * cos[at] + first * sin[at]], axis=1
        )
