"""Hyper-connections with NumPy: several residuals, which collapse to a module's input and take its
output in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.models.layers import HEAD_HYPER, HyperConnections
from twin.models.spec import ModelSpec
from twin.plan.shards import Array, Weights


class Hyper:
    """The residuals of all ranks, [n, residuals, hidden] each; n is 1 where all blocks agree."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, ranks: int, dtype: type[np.floating[Any]]
    ) -> None:
        assert spec.hyper is not None
        self.kind: HyperConnections = spec.hyper
        self.eps, self.weights, self.dtype = dtype(spec.norm_eps), weights, dtype
        empty = np.empty((1, self.kind.residuals, 0), dtype)
        self.residuals: list[Array] = [empty] * ranks
        # of the module under way: [n, residuals] by which its output spreads, [n, residuals,
        # residuals] by which they mix
        self._spread: list[Array] = [empty] * ranks
        self._mix: list[Array] = [empty] * ranks

    def begin(self, rank: int, embedded: Array) -> None:
        """All residuals are the embedding, [n, hidden]."""
        self.residuals[rank] = np.repeat(embedded[:, None], self.kind.residuals, axis=1)

    def land(self, rank: int, made: Array) -> None:
        """A module's output, [n, hidden], joins the residuals."""
        mixed = np.einsum("njk,njd->nkd", self._mix[rank], self.residuals[rank])
        self.residuals[rank] = self._spread[rank][..., None] * made[:, None] + mixed

    def products(self, name: str, rank: int, matrix: Array, first: int) -> Array:
        """[n, rows] of the rows from `first` on of a mixing matrix [residuals * mixes, hidden]:
        each times the residual that it belongs to, not normed.
        """
        held, count = self.residuals[rank], self.kind.residuals
        mixes = count if name == HEAD_HYPER else self.kind.mixes
        of = (first + np.arange(len(matrix))) // mixes % count
        made: Array = np.einsum("rd,nrd->nr", matrix, held[:, of])
        return made

    def collapse(self, name: str, layer: int, rank: int, products: Array) -> Array:
        """[n, hidden] a module's input, from the mixing matrix's products [n, parts, elements]; how
        its output will join the residuals is kept.
        """
        held, count = self.residuals[rank], self.kind.residuals
        where = name if layer < 0 else f"layers.{layer}.{name}"
        base, scale = (
            self.weights[f"{where}_{end}"].astype(self.dtype) for end in ("base", "scale")
        )
        factor = 1 / np.sqrt(np.mean(held**2, axis=(1, 2)) + self.eps)
        mixes = len(base)
        flat = products.reshape(len(products), -1)
        whole = flat.shape[1] // (count * mixes) * count * mixes  # ranks fill up their shares
        pieces = flat[:, :whole].reshape(len(products), -1, mixes)
        sums = pieces.sum(axis=1) * factor[:, None]
        eps = self.dtype(self.kind.eps)
        inward = _sigmoid(sums[:, :count] * scale[0] + base[:count]) + eps
        if name != HEAD_HYPER:
            outward = sums[:, count : 2 * count] * scale[1] + base[count : 2 * count]
            self._spread[rank] = 2 * _sigmoid(outward)
            among = sums[:, 2 * count :] * scale[2] + base[2 * count :]
            self._mix[rank] = self._balanced(among.reshape(-1, count, count))
        collapsed: Array = (inward[..., None] * held).sum(axis=1)
        return collapsed

    def _balanced(self, logits: Array) -> Array:
        """Doubly stochastic: softmax of the rows, then columns and rows are divided in turns."""
        eps = self.dtype(self.kind.eps)
        mix = np.exp(logits - logits.max(axis=-1, keepdims=True))
        mix = mix / mix.sum(axis=-1, keepdims=True) + eps
        mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
        for _ in range(self.kind.iterations - 1):
            mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
            mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
        balanced: Array = mix
        return balanced


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        made: Array = 1 / (1 + np.exp(-x))
    return made
