"""DeepSeek-V4's attention with NumPy: a window, compressed entries of what lies before, and an
indexer that chooses among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from twin.errors import PlanError
from twin.models.mixers import CompressedAttention
from twin.plan.attention import partial_words
from twin.plan.catalogue import StageKind
from twin.plan.compressed_shards import FROM_RESIDUAL, compressing, projected, spec_of
from twin.plan.options import Common
from twin.plan.shards import Array, Weights, padded, rope_tables
from twin.plan.types import Plan, Stage
from twin.reference.memory import numbers_of
from twin.reference.norms import rms_norm, rotate

# stages and what is seen of them, [parts, elements] each
Latents = list[tuple[Stage, Array]]


class Compressed:
    """The caches of all layers of a plan, on all ranks; `stored` is the type of what is cached."""

    def __init__(
        self, plan: Plan, weights: Weights, dtype: type[np.floating[Any]], stored: Any
    ) -> None:
        self.plan, self.weights, self.dtype, self.stored = plan, weights, dtype, stored
        # by name, layer and rank: [positions, width]
        self._caches: dict[tuple[str, int, int], Array] = {}
        self._turns = self._rotations()  # by their bases
        self._vectors: dict[str, Array] = {}

    def _rotations(self) -> dict[float, tuple[Array, Array]]:
        spec, reach = spec_of(self.plan), self.plan.options.max_context
        tables = rope_tables(spec, reach, present=reach) if self._compresses() else []
        return {
            rope.theta: (cos.astype(self.dtype), sin.astype(self.dtype))
            for rope, (cos, sin) in zip(spec.rotations, tables, strict=False)
            if rope
        }

    def _compresses(self) -> bool:
        spec = spec_of(self.plan)
        return any(isinstance(spec.layer(i).mixer, CompressedAttention) for i in range(spec.layers))

    # ---- queries, scores -------------------------------------------------------------------------

    def queries(self, stage: Stage, seen: Array) -> Array:
        """[n, q_rank] normed, from [n, parts, elements] of what stage LATENT published."""
        latent = self._maker(stage, 0)
        made = np.stack([self._of([(latent, view)], "q_a") for view in seen])
        return rms_norm(made, self._vector(stage, "q_a_norm"), spec_of(self.plan).norm_eps)

    def scores(self, stage: Stage, rank: int, position: int, inputs: list[Array]) -> Array:
        """[n, entries] that the stage publishes on this rank, minus infinity of entries that no
        position has closed yet. A new key joins the cache.
        """
        kind, scan = compressing(self.plan, stage), stage.scan
        assert scan is not None
        query = self._maker(stage, 0)
        out = np.full((len(stage.items), scan.entries), np.nan, self.dtype)
        count, heads = kind.entries(position + 1), scan.group
        for block, views in self._views(stage, inputs):
            latents = self._latents(stage, views)
            keys = self._compress(stage, rank, position, latents, "index")
            lo, hi = projected(self.plan, query)["index_q"]
            q = views[0][0, lo:hi].reshape(-1, kind.index_dim)[:heads]
            q = self._rotated(kind, q, position)
            weights = self._of(latents, "index_heads") * self.dtype(
                (kind.index_heads * kind.index_dim) ** -0.5
            )
            # ranks that share divide the heads, or where these are whole the entries
            whole = heads == kind.index_heads
            first = rank * scan.entries if whole and self._shared() else 0
            own = weights if whole else padded(weights, rank * heads, heads)
            there = keys[first : min(first + scan.entries, count)].astype(self.dtype)
            made = own @ np.maximum(q @ there.T, 0)
            out[block] = -np.inf
            out[block, : len(made)] = made
        return out if len(inputs[0]) > 1 else out[[stage.items.index(_first(stage))]]

    def _chosen(self, kind: CompressedAttention, position: int, scores: Array | None) -> Array:
        """Numbers of the entries that a step attends: the best by [entries] scores, of equal ones
        the earlier; all without scores.
        """
        count = kind.entries(position + 1)
        if scores is None or kind.top_k >= count:
            return np.arange(count)
        return np.sort(np.argsort(-scores[:count], kind="stable")[: kind.top_k])

    # ---- attention -------------------------------------------------------------------------------

    def attend(self, stage: Stage, rank: int, position: int, inputs: list[Array]) -> Array:
        """[1, words of all items(, numbers)]: each block appends what is new and attends its items'
        share of the entries, from its own view.
        """
        kind, scan = compressing(self.plan, stage), stage.scan
        assert scan is not None
        query = self._maker(stage, 0)
        out = np.full((scan.items, scan.group, kind.head_dim + 2), np.nan, self.dtype)
        for block, views in self._views(stage, inputs):
            lo, hi = projected(self.plan, query)["q_b"]
            q = views[0][0, lo:hi].reshape(scan.group, kind.head_dim)
            q = self._rotated(kind, rms_norm(q, None, spec_of(self.plan).norm_eps), position)
            entries = self._entries(stage, rank, position, views)
            for item in range(*stage.items[block]) if len(inputs[0]) > 1 else range(scan.items):
                out[item] = self._item(kind, q, self._dealt(scan.splits, item, entries))
                if item == 0:
                    sinks = self._vector(stage, "sinks")[rank * scan.group :][: scan.group]
                    out[item] = with_sinks(out[item], sinks)
        return self._worded(stage, kind, out)

    def _entries(self, stage: Stage, rank: int, position: int, views: list[Array]) -> Array:
        """[entries, head_dim] that a step attends: the window's positions, then what stands for
        those before.
        """
        kind = compressing(self.plan, stage)
        window = self._cache("window", stage, rank, kind.head_dim, self.stored)
        latents = self._latents(stage, views)
        made = rms_norm(
            self._of(latents, "kv"),
            self._vector(stage, "kv_norm"),
            spec_of(self.plan).norm_eps,
        )
        window[position] = self._rotated(kind, made, position)
        near = window[max(0, position + 1 - kind.window) : position + 1].astype(self.dtype)
        if not kind.ratio:
            return near
        closed = self._compress(stage, rank, position, latents, "compress")
        scores, last = None, self._maker(stage, len(views) - 1)
        if last.scan is not None:  # ranks have scores of their entries, or sums over their heads
            whole = last.scan.group == kind.index_heads
            scores = views[-1].reshape(-1) if whole else views[-1].sum(axis=0)
        far: Array = closed[self._chosen(kind, position, scores)].astype(self.dtype)
        return np.concatenate([near, far])

    def _shared(self) -> bool:
        """Do ranks divide what all of them need?"""
        return self.plan.options.common is Common.SHARDED

    def _dealt(self, splits: int, item: int, entries: Array) -> Array:
        """A split's pages of the entries, in turn."""
        pages = np.arange(len(entries)) // self.plan.options.kv_page
        own: Array = entries[pages % splits == item % splits]
        return own

    def _item(self, kind: CompressedAttention, q: Array, entries: Array) -> Array:
        """[heads, head_dim + 2]: output, maximum and sum over `entries`, keys that are values."""
        out = np.zeros((len(q), kind.head_dim + 2), self.dtype)
        out[:, -2] = -np.inf
        if len(entries):
            scores = q @ entries.T / self.dtype(math.sqrt(kind.head_dim))
            out[:, -2] = scores.max(axis=1)
            weights = np.exp(scores - out[:, -2, None])
            out[:, :-2], out[:, -1] = weights @ entries, weights.sum(axis=1)
        return out

    def _worded(self, stage: Stage, kind: CompressedAttention, items: Array) -> Array:
        """[1, words(, numbers)]: of each item one output group behind the other, its outputs, then
        its maxima and sums.
        """
        value = self.plan.values[stage.publishes or 0]
        numbers, groups = numbers_of(self.plan, value), self._groups(stage)
        heads = items.shape[1] // groups
        one = partial_words(heads, kind.head_dim, self.plan.options.kv_dtype)
        words = np.zeros((len(items), groups, one, numbers), self.dtype)
        parts, outputs = items.reshape(len(items), groups, heads, -1), heads * kind.head_dim
        made = parts[..., : kind.head_dim].reshape(len(items), groups, -1, numbers)
        words[:, :, : outputs // numbers] = made
        ends = parts[..., kind.head_dim :].reshape(len(items), groups, -1)
        words[:, :, outputs // numbers : outputs // numbers + 2 * heads, 0] = ends
        return words.reshape(1, -1, numbers) if numbers > 1 else words.reshape(1, -1)

    def _groups(self, stage: Stage) -> int:
        """Output groups on a rank."""
        return compressing(self.plan, stage).o_groups // self.plan.ranks

    def grouped(self, stage: Stage, rank: int, position: int, partials: Array, o_a: Array) -> Array:
        """[n, groups * o_rank]: the splits of each group's heads combined, turned back, and carried
        through the group's own rows of `o_a`.
        """
        attended = self._maker(stage, 0)
        kind, scan = compressing(self.plan, stage), attended.scan
        assert scan is not None
        groups = self._groups(stage)
        heads, numbers = scan.group // groups, partials.shape[2] if partials.ndim > 2 else 1
        words = partials.reshape(len(partials), scan.splits, groups, -1, numbers)
        outputs = heads * kind.head_dim // numbers
        made = words[..., :outputs, :].reshape(*words.shape[:3], heads, kind.head_dim)
        ends = words[..., outputs : outputs + 2 * heads, 0].reshape(*words.shape[:3], heads, 2)
        by = np.exp(ends[..., 0] - ends[..., 0].max(axis=1, keepdims=True))
        total = (by * ends[..., 1]).sum(axis=1)
        combined = (by[..., None] * made).sum(axis=1) / total[..., None]
        combined = self._rotated(kind, combined, position, back=True)
        carried = np.einsum(
            "ngc,grc->ngr",
            combined.reshape(len(partials), groups, -1),
            o_a.reshape(groups, kind.o_rank, -1),
        )
        made_of: Array = carried.reshape(len(partials), -1)
        return made_of

    # ---- what is cached --------------------------------------------------------------------------

    def _compress(
        self, stage: Stage, rank: int, position: int, latents: Latents, name: str
    ) -> Array:
        """[entries, dim] cached, with the entry that this position closes."""
        kind = compressing(self.plan, stage)
        dim = kind.index_dim if name == "index" else kind.head_dim
        wide = kind.overlap * dim
        values = self._cache(f"{name}_values", stage, rank, wide, self.dtype)
        gates = self._cache(f"{name}_gates", stage, rank, wide, self.dtype)
        closed = self._cache(f"{name}_closed", stage, rank, dim, self.stored)
        at = position % kind.ratio
        values[position] = self._of(latents, f"{name}_kv")
        gates[position] = self._of(latents, f"{name}_gate") + self._vector(stage, f"{name}_bias")[
            at
        ].astype(self.dtype)
        if at == kind.ratio - 1:
            first, number = position + 1 - kind.ratio, position // kind.ratio
            own, before = slice(first, position + 1), slice(first - kind.ratio, first)
            v, g = values[own, -dim:], gates[own, -dim:]
            if kind.overlap > 1 and first:
                v = np.concatenate([values[before, :dim], v])
                g = np.concatenate([gates[before, :dim], g])
            by = np.exp(g - g.max(axis=0))
            made = rms_norm(
                (v * (by / by.sum(axis=0))).sum(axis=0),
                self._vector(stage, f"{name}_norm"),
                spec_of(self.plan).norm_eps,
            )
            closed[number] = self._rotated(kind, made, first)
        return closed

    def _cache(self, name: str, stage: Stage, rank: int, width: int, dtype: Any) -> Array:
        key = (name, stage.layer, rank)
        if key not in self._caches:
            self._caches[key] = np.zeros((self.plan.options.max_context, width), dtype)
        return self._caches[key]

    def _rotated(
        self, kind: CompressedAttention, x: Array, position: int, *, back: bool = False
    ) -> Array:
        """x [..., dim] with its last rope_dim elements turned to a position, or back from it."""
        spec = spec_of(self.plan)
        cos, sin = (table[position] for table in self._turns[kind.theta])
        out, rest = x.copy(), x.shape[-1] - kind.rope_dim
        out[..., rest:] = rotate(x[..., rest:], cos, -sin if back else sin, spec.rope.style)
        return out

    # ---- who reads what --------------------------------------------------------------------------

    def _views(self, stage: Stage, inputs: list[Array]) -> Iterator[tuple[int, list[Array]]]:
        """Blocks with items and what they see, [parts, elements(, numbers)] of each read; one for
        all where they see the same.
        """
        whole = all(len(seen) == 1 for seen in inputs)
        for block, (lo, hi) in enumerate(stage.items):
            if lo < hi:
                yield block, [seen[block if len(seen) > 1 else 0] for seen in inputs]
                if whole:
                    return

    def _latents(self, stage: Stage, views: list[Array]) -> Latents:
        """What the stage sees of projections from the residual."""
        makers = [self._maker(stage, read) for read in range(len(views))]
        return [
            (maker, view)
            for maker, view in zip(makers, views, strict=True)
            if maker.kind in FROM_RESIDUAL
        ]

    def _of(self, latents: Latents, name: str) -> Array:
        """A projection's elements: ranks that divide its rows have them one behind the other."""
        hidden = self.plan.shard.hidden
        for maker, view in latents:
            kind, found = compressing(self.plan, maker), projected(self.plan, maker).get(name)
            if found is None:
                continue
            rows = {w.name: w.rows for w in kind.weights(hidden, spec_of(self.plan).formats)}[name]
            own: Array = view[:, slice(*found)]
            made: Array = own.reshape(-1)[:rows] if own.shape[1] < rows else own[0]
            return made
        raise PlanError(f"no stage before makes {name}")

    def _maker(self, stage: Stage, read: int) -> Stage:
        """The stage whose value is the stage's read of that number."""
        made = self.plan.stages[self.plan.values[stage.reads[read].value].stage]
        if made.kind is not StageKind.COLLECTIVE:
            return made
        return self._maker(made, 0)

    def _vector(self, stage: Stage, name: str) -> Array:
        full = f"layers.{stage.layer}.{name}"
        if full not in self._vectors:
            self._vectors[full] = self.weights[full].astype(self.dtype)
        return self._vectors[full]


def with_sinks(partial: Array, sinks: Array) -> Array:
    """[heads, outputs, maximum, sum] with a logit more for each head, which has no value: it stands
    in the first split.
    """
    made, most = partial.copy(), np.maximum(partial[:, -2], sinks.astype(partial.dtype))
    by = np.exp(partial[:, -2] - most)
    made[:, :-2] *= by[:, None]
    made[:, -1] = partial[:, -1] * by + np.exp(sinks.astype(partial.dtype) - most)
    made[:, -2] = most
    return made


def _first(stage: Stage) -> tuple[int, int]:
    return next(span for span in stage.items if span[0] < span[1])
