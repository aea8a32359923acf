"""Gated DeltaNet, Mamba-2 and short convolutions with NumPy: the states of a plan's layers, item by
item, and channels' histories.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from twin.models.mixers import Mamba2, Recurring
from twin.plan.delta_vectors import delta_vectors
from twin.plan.matrix import CONV_UNIT
from twin.plan.shards import Array, Weights
from twin.plan.types import Plan, Stage
from twin.reference.activations import silu

LEAST_SQUARE = 1e-6  # is added to the square of a key's and of a query's length


class States:
    """The states of all items of all ranks; `dtype` is the type of all arithmetic."""

    def __init__(self, plan: Plan, weights: Weights, dtype: type[np.floating[Any]]) -> None:
        self.plan, self.weights, self.dtype = plan, weights, dtype
        # by stage, rank and item: [key_dim, columns]; [positions, channels], the newest last
        self._states: dict[tuple[int, int, int], Array] = {}
        self._histories: dict[tuple[int, int, int], Array] = {}
        self._vectors: dict[tuple[int, int], dict[str, Array]] = {}

    def copied(self) -> tuple[dict[Any, Array], dict[Any, Array]]:
        """All states and histories; a step puts new ones in their places."""
        return dict(self._states), dict(self._histories)

    def restore(self, copied: tuple[dict[Any, Array], dict[Any, Array]]) -> None:
        """Hold again what `copied` gave."""
        self._states, self._histories = (dict(held) for held in copied)

    def run(self, stage: Stage, rank: int, position: int, inputs: list[Array]) -> Array:
        """[1, words of all items] that the stage publishes: each block's items from its own view
        of the projections, and of what steers the states.
        """
        scan = stage.scan
        assert scan is not None
        assert stage.publishes is not None
        kind = self._kind()
        words = self.plan.values[stage.publishes].elements // scan.items
        out = np.full((scan.items, words), np.nan, self.dtype)
        for block, (lo, hi) in enumerate(stage.items):
            seen = [view[block if len(view) > 1 else 0] for view in inputs]
            for item in range(lo, hi):
                out[item] = self._item(kind, stage, rank, item, position, seen, words)
        return out.reshape(1, -1)

    def convolve(self, stage: Stage, rank: int, position: int, rows: Array) -> Array:
        """[1, channels]: c * conv(b * x) of the rows [n, channels x (b, c, x)] of a stage CONV_IN,
        of each channel by the block that has its rows.
        """
        assert stage.matrix is not None
        own = rows[0].copy()
        for block, (lo, hi) in enumerate(stage.matrix.owned if len(rows) > 1 else ()):
            own[lo:hi] = rows[block, lo:hi]
        b, c, x = own.reshape(-1, CONV_UNIT).T
        taps, key = self._vectors_of(stage, rank)["taps"], (stage.index, rank, 0)
        if position == 0:
            self._histories[key] = np.zeros_like(taps)
        seen = self._histories[key] = np.concatenate([self._histories[key][1:], (b * x)[None]])
        convolved: Array = c * (seen * taps).sum(axis=0)
        return convolved[None]

    def _item(
        self,
        kind: Recurring,
        stage: Stage,
        rank: int,
        item: int,
        position: int,
        seen: list[Array],
        words: int,
    ) -> Array:
        scan, vectors = stage.scan, self._vectors_of(stage, rank)
        assert scan is not None
        ranks, columns = self.plan.ranks, scan.page
        keys, values = kind.key_heads // ranks * kind.key_dim, kind.value_heads // ranks
        head, split = divmod(item, scan.splits)
        first = head // kind.per_key * kind.key_dim
        of_head = head * kind.value_dim + split * columns
        channels = np.concatenate(
            [
                np.arange(first, first + kind.key_dim),
                np.arange(keys + first, keys + first + kind.key_dim),
                np.arange(2 * keys + of_head, 2 * keys + of_head + columns),
            ]
        )
        convolved = self._convolved(
            kind,
            (stage.index, rank, item),
            position,
            seen[0][channels],
            vectors["taps"][:, channels],
        )
        query, key = np.split(convolved[: 2 * kind.key_dim], 2)
        value = convolved[2 * kind.key_dim :]
        gates = 2 * keys + values * kind.value_dim + of_head
        passed = silu(seen[0][gates : gates + columns])
        # of the last value read, write strengths and steps
        steering = seen[-1][-kind.steering * values :].reshape(-1, values)[:, head]
        factor, bias, *skip = vectors["decays"].reshape(-1, values)[:, head]
        step = np.logaddexp(self.dtype(0), steering[-1] + bias)
        state = self._states.get((stage.index, rank, item))
        if state is None or position == 0:
            state = np.zeros((kind.key_dim, columns), self.dtype)
        if isinstance(kind, Mamba2):
            step = np.clip(step, kind.least_step, kind.most_step)
            state = np.exp(factor * step) * state + key[:, None] * (step * value)
            made = squared = (query @ state + skip[0] * value) * passed
            first = of_head
        else:
            query, key = unit(query) / self.dtype(math.sqrt(kind.key_dim)), unit(key)
            state = np.exp(factor * step) * state
            strength = 1 / (1 + np.exp(-steering[0]))
            state = state + key[:, None] * ((value - key @ state) * strength)
            squared = query @ state
            made, first = squared * passed, split * columns
        self._states[stage.index, rank, item] = state
        out = np.zeros(words, self.dtype)
        out[:columns] = made * vectors["gated_norm"][first : first + columns]
        out[columns] = (squared * squared).sum()
        return out

    def _convolved(
        self, kind: Recurring, key: tuple[int, int, int], position: int, new: Array, taps: Array
    ) -> Array:
        """[channels] behind the convolution over the last positions. `taps`: behind them what it
        adds, if anything.
        """
        before = self._histories.get(key)
        if before is None or position == 0:
            before = np.zeros((kind.conv - 1, len(new)), self.dtype)
        seen = np.concatenate([before, new[None].astype(self.dtype)])
        self._histories[key] = seen[1:]
        sums = (seen * taps[: kind.conv]).sum(axis=0)
        return silu(sums + taps[kind.conv] if len(taps) > kind.conv else sums)

    def normed(self, stage: Stage, words: Array) -> Array:
        """[n, value heads * value_dim]: the items' outputs, those that are normed together divided
        by their length.
        """
        scan, kind = stage.scan, self._kind()
        assert scan is not None
        assert self.plan.spec is not None
        together = kind.normed // scan.page  # items
        items = words.reshape(len(words), -1, together, words.shape[1] // scan.items)
        squares = items[..., scan.page].sum(axis=2) / self.dtype(kind.normed)
        by = 1 / np.sqrt(squares + self.dtype(self.plan.spec.norm_eps))
        out: Array = items[..., : scan.page] * by[..., None, None]
        return out.reshape(len(words), -1)

    def _kind(self) -> Recurring:
        assert self.plan.spec is not None
        kind = self.plan.spec.recurrence
        assert kind is not None
        return kind

    def _vectors_of(self, stage: Stage, rank: int) -> dict[str, Array]:
        key = (stage.index, rank)
        if key not in self._vectors:
            made = delta_vectors(self.plan, stage, rank, self.weights)
            convolved = self.plan.spec.convolution if self.plan.spec else None
            channels = (convolved or self._kind()).channels // self.plan.ranks
            taps = made["taps"].reshape(-1, channels)
            self._vectors[key] = {
                name: vector.astype(self.dtype) for name, vector in (made | {"taps": taps}).items()
            }
        return self._vectors[key]


def unit(x: Array) -> Array:
    """Divided by its length."""
    by: Array = x / np.sqrt((x * x).sum() + x.dtype.type(LEAST_SQUARE))
    return by
