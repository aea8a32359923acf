"""The plan computed with NumPy: the judge of every other executor's numbers.

It walks the plan's stages, spans, reads, scales and resets as they are written, all ranks in lock
step, so a wrong plan gives wrong numbers or is refused. Blocks that see the same input are computed
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, repeat
from types import EllipsisType
from typing import Any

import ml_dtypes
import numpy as np

from twin.errors import EngineError, InvalidPlan, PlanError
from twin.models.feeds import ExpertFeed
from twin.models.spec import DType, LaneHead, ModelSpec
from twin.plan import matrices, shards
from twin.plan.attention import Attention
from twin.plan.biases import stage_bias, stage_sinks
from twin.plan.cache_scales import LARGEST, stage_cache_scales
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import Sampling
from twin.plan.shards import Array, Weights
from twin.plan.step import CANDIDATE, SUMMARY
from twin.plan.types import Plan, Stage, Value
from twin.reference.activations import ACTIVATIONS
from twin.reference.compressed import Compressed, with_sinks
from twin.reference.experts import Choices, Experts, gated
from twin.reference.hyper import Hyper
from twin.reference.memory import Memory, numbers_of
from twin.reference.norms import rms_norm, rotate
from twin.reference.states import States

Sampler = Callable[[Array, int], int]  # (logits [vocab], generated position) -> token

KV_TYPES: dict[DType, Any] = {
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.FP32: np.float32,
    DType.FP8: ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a sequence stands: its position, what its exchange memory and its states hold."""

    position: int
    memory: list[tuple[Array, Array]]
    states: tuple[dict[Any, Array], dict[Any, Array]]


class Reference:
    """One sequence through a plan; `dtype` is the type of all arithmetic.

    `kv_dtype` is what cached keys and values are rounded to: the plan's unless given, None for no
    rounding.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        dtype: type[np.floating[Any]] = np.float32,
        *,
        kv_dtype: DType | EllipsisType | None = ...,
    ) -> None:
        if plan.spec is None:
            raise PlanError(f"{plan.name} is a probe: the reference computes plans of models")
        self.plan = plan
        self._check_rows()
        self.spec: ModelSpec = plan.spec
        self.weights = weights
        self.dtype = dtype
        self.sampled = -1  # what the plan's own SAMPLE chose greedily, -1 if a logit is NaN
        # [n, hidden]; n is 1 when all blocks agree
        self.residual: list[Array] = [np.empty(0, dtype)] * plan.ranks
        self.logits = np.empty(self.spec.vocab, dtype)
        chosen = plan.options.kv_dtype if isinstance(kv_dtype, EllipsisType) else kv_dtype
        stored = KV_TYPES[chosen] if chosen else dtype
        self._scaled = chosen is DType.FP8
        shapes = {}
        for stage in plan.stages:
            if stage.kind is StageKind.ATTENTION and stage.scan is None:
                own, window = plan.attention_of(stage), stage.window
                items, positions = own.items_of(window), own.positions_of(window)
                shapes[stage.layer] = (plan.ranks, items, positions, own.head_dim)
        # by layer, [ranks][items][positions][head_dim]
        self.keys = {layer: np.zeros(shape, stored) for layer, shape in shapes.items()}
        self.values = {layer: np.zeros(shape, stored) for layer, shape in shapes.items()}
        self.turn(plan.options.max_context)
        self.compressed = Compressed(plan, weights, dtype, stored)
        self.hyper = Hyper(self.spec, weights, plan.ranks, dtype) if self.spec.hyper else None
        self.experts = Experts(plan, weights, dtype)
        # [n, hidden] that a router and its experts see
        self.normed: list[Array] = [np.empty(0, dtype)] * plan.ranks
        self.choices: list[Choices] = [()] * plan.ranks  # of the last router
        # [n, hidden] what the last output projection made
        self.made: list[Array] = [np.empty(0, dtype)] * plan.ranks
        # [n, 1] how much of the shared experts tokens want; [n, hidden] these experts' rows
        self.gates: list[Array] = [np.ones((1, 1), dtype)] * plan.ranks
        self.kept: list[Array] = [np.zeros((1, 1), dtype)] * plan.ranks
        self._embedding = weights["embed"]
        self._matrices: dict[tuple[int, int], Array] = {}
        self._vectors: dict[tuple[str, int, int], Any] = {}

    # ---- one token -------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        """Each block must compute exactly the rows of the elements that it publishes."""
        for stage in self.plan.stages:
            if stage.matrix is None or stage.publishes is None or not stage.matrix.owned:
                continue
            if stage.kind is StageKind.LM_HEAD or self._adds_up(stage):
                continue
            if _published_rows(stage) != self.plan.values[stage.publishes].owned:
                raise InvalidPlan(
                    f"{stage.name}: the rows that blocks own are not those of the elements they "
                    "publish"
                )

    def step(self, token: int) -> Array:
        """Logits [vocab] after `token` at the next position, which joins the cache."""
        if not 0 <= token < self.spec.vocab:
            raise EngineError(f"token {token}: must lie between 0 and {self.spec.vocab - 1}")
        if self.position >= self.plan.options.max_context:
            raise EngineError(
                f"position {self.position}: the plan was made for "
                f"max_context={self.plan.options.max_context}"
            )
        if self.plan.options.sampling is Sampling.FULL and self.position > 0:
            self._publish_token(token)
        self.logits = np.full(self.spec.vocab, np.nan, self.dtype)
        for stage in self.plan.stages:
            self._run(stage, token)
        self.position += 1
        return self.logits

    def turn(self, present: int) -> None:
        """Start again with a sequence of `present` tokens, which choose LongRoPE's factors; by
        default those of the longest one.
        """
        tables = shards.rope_tables(self.spec, self.plan.options.max_context, present=present)
        self.turns = [(cos.astype(self.dtype), sin.astype(self.dtype)) for cos, sin in tables]
        self.memory = Memory(self.plan, self.dtype)
        self.states = States(self.plan, self.weights, self.dtype)
        self.position = 0

    def mark(self) -> Mark:
        """Where the sequence stands: `back_to` it undoes the steps made since. Cached keys and
        values are written again by the step that follows.
        """
        return Mark(self.position, self.memory.copied(), self.states.copied())

    def back_to(self, mark: Mark) -> None:
        self.position = mark.position
        self.memory.restore(mark.memory)
        self.states.restore(mark.states)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampler: Sampler | None = None,
        stop: Container[int] = (),
    ) -> list[int]:
        """Up to `max_tokens` tokens after `prompt`, a stop token included; greedy without a
        sampler. Where LongRoPE's factors change, all tokens are read again.
        """
        if not prompt:
            raise EngineError("the prompt is empty: give at least one token")
        logits = self._read(prompt)
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            tokens.append(sampler(logits, len(tokens)) if sampler else self.sampled)
            if tokens[-1] in stop or len(tokens) == max_tokens:
                break
            if self.position == shards.factors_change(self.spec):
                logits = self._read([*prompt, *tokens])
            else:
                logits = self.step(tokens[-1])
        return tokens

    def _read(self, tokens: Sequence[int]) -> Array:
        if shards.factors_change(self.spec) is not None:
            self.turn(len(tokens))
        for token in tokens:
            logits = self.step(token)
        return logits

    def _publish_token(self, token: int) -> None:
        """What SAMPLE published at the end of the previous step, known only now: a prompt overrides
        it.
        """
        published = self.plan.stages[-1].publishes
        assert published is not None
        for rank in range(self.plan.ranks):
            self.memory.publish(
                self.plan.values[published],
                rank,
                self.position - 1,
                np.array([[token]], self.dtype),
            )

    def _run(self, stage: Stage, token: int) -> None:
        """All ranks wait, then reset, then compute and publish."""
        first = self.position == 0
        ranks = range(self.plan.ranks)
        reads = [r for r in stage.reads if not (first and r.previous_step)]
        inputs = [
            [self.memory.gather(read, rank, self.position, stage.name) for read in reads]
            for rank in ranks
        ]
        for reset in stage.resets:
            if not (first and reset.previous_step):
                for rank in ranks:
                    self.memory.reset(reset, rank)
        for rank in ranks:
            out = self._compute(stage, rank, inputs[rank], token)
            if stage.publishes is not None and stage.kind is not StageKind.SAMPLE:
                self.memory.publish(self.plan.values[stage.publishes], rank, self.position, out)

    def _compute(self, stage: Stage, rank: int, inputs: list[Array], token: int) -> Array:
        """[n, elements] that the stage publishes on this rank."""
        match stage.kind:
            case StageKind.EMBED:
                return self._embed(rank, inputs, token)
            case StageKind.QKV:
                return self._rows(stage, rank, self._hidden(stage, rank, inputs))
            case StageKind.DELTA_IN:
                self.normed[rank] = self._hidden(stage, rank, inputs)
                return self._rows(stage, rank, self.normed[rank])
            case StageKind.CONV_IN:
                rows = self._rows(stage, rank, self._hidden(stage, rank, inputs))
                return self.states.convolve(stage, rank, self.position, rows)
            case StageKind.DELTA_GATES | StageKind.COMPRESS:
                return self._rows(stage, rank, self.normed[rank])
            case StageKind.DELTA:
                return self.states.run(stage, rank, self.position, [seen[:, 0] for seen in inputs])
            case StageKind.HYPER:
                return self._mixed(stage, rank, inputs)
            case StageKind.LATENT:
                self.normed[rank] = self._hidden(stage, rank, inputs)
                return self._rows(stage, rank, self.normed[rank])
            case StageKind.QUERY:
                return self._rows(stage, rank, self.compressed.queries(stage, inputs[0]))
            case StageKind.INDEX:
                return self.compressed.scores(stage, rank, self.position, inputs)
            case StageKind.HEAD_OUT:
                o_a = self._matrix(stage, rank)
                return self.compressed.grouped(stage, rank, self.position, inputs[0][:, 0], o_a)
            case StageKind.ATTENTION if stage.scan is not None:
                return self.compressed.attend(stage, rank, self.position, inputs)
            case StageKind.ATTENTION:
                return self._attention(stage, rank, *(seen[:, 0] for seen in inputs))
            case StageKind.O_PROJ:
                heads = self._heads_out(stage, [i[:, 0] for i in inputs])
                self.made[rank] = self._rows(stage, rank, heads)
                return self.made[rank]
            case StageKind.GATE_UP:
                rows = self._rows(stage, rank, self._hidden(stage, rank, inputs))
                return self._activated(stage, rows)
            case StageKind.DOWN:
                return self._rows(stage, rank, inputs[0][:, 0])
            case StageKind.ROUTER if self._adds_up(stage):
                return self._added_up(stage, rank)
            case StageKind.ROUTER:
                self.normed[rank] = self._hidden(stage, rank, inputs)
                return self._rows(stage, rank, self.normed[rank])
            case StageKind.ROUTE:
                logits = inputs[-1]
                if len(inputs) > 1:
                    logits = self._normed_logits(stage, rank, inputs)
                self.choices[rank] = self.experts.choose(stage, logits, token)
                self.gates[rank] = self.experts.shared_gates(logits)
                return logits
            case StageKind.SHARED_UP:
                return self._activated(
                    stage, self._rows(stage, rank, self._normed_again(stage, rank))
                )
            case StageKind.SHARED_DOWN:
                sums = self.gates[rank] * self._rows(stage, rank, inputs[0][:, 0])
                if stage.kept:
                    self.kept[rank] = sums
                return sums
            case StageKind.ROUTED_UP:
                x = self._normed_again(stage, rank)
                return self.experts.up(stage, rank, x, self.choices[rank])
            case StageKind.ROUTED_DOWN:
                routed = self.experts.down(stage, rank, inputs[0][:, 0], self.choices[rank])
                kept, self.kept[rank] = self.kept[rank], np.zeros((1, 1), dtype=self.dtype)
                return routed + kept
            case StageKind.COLLECTIVE:
                return inputs[0][:, 0]
            case StageKind.REDUCE:
                reduced: Array = inputs[0].sum(axis=1)
                return reduced
            case StageKind.LANE_MEAN:
                return self._hidden(stage, rank, inputs)
            case StageKind.LM_HEAD:
                return self._head(stage, rank, self._hidden(stage, rank, inputs))
            case StageKind.SAMPLE:
                return self._sample(rank, inputs[0])
            case _:
                raise PlanError(f"{stage.name} is a probe's stage")

    # ---- stages ----------------------------------------------------------------------------------

    def _embed(self, rank: int, inputs: list[Array], token: int) -> Array:
        if inputs:
            token = int(inputs[0][0, 0, 0])
        self.residual[rank] = self._embedding[token].astype(self.dtype)[None] * self.dtype(
            self.spec.variant.embedding
        )
        if self.hyper is not None:
            self.hyper.begin(rank, self.residual[rank])
        return self.residual[rank]

    def _mixed(self, stage: Stage, rank: int, inputs: list[Array]) -> Array:
        """[n, rows] of a mixing matrix, once a module's output has joined the residuals."""
        assert self.hyper is not None
        for made in inputs:
            self.hyper.land(rank, made.sum(axis=1))
        value, matrix = self.plan.values[stage.publishes or 0], self._matrix(stage, rank)
        first = rank * len(matrix) if value.pushed else 0
        return self.hyper.products(_base(value), rank, matrix, first)

    def _collapsed(self, stage: Stage, rank: int, inputs: list[Array]) -> Array | None:
        """[n, hidden] that several residuals collapse to; None where the stage reads no mixture."""
        value = self.plan.values[stage.reads[0].value] if stage.reads else None
        if self.hyper is None or value is None:
            return None
        return self.hyper.collapse(_base(value), stage.layer, rank, inputs[0])

    def _hidden(self, stage: Stage, rank: int, inputs: list[Array]) -> Array:
        """[n, hidden]: the residual (or the meeting lanes) after the stage's reads, normed if the
        stage norms.
        """
        collapsed = self._collapsed(stage, rank, inputs)
        if collapsed is not None:
            scale = self._vector("norm", stage, 0, lambda: shards.stage_norm(stage, self.weights))
            return rms_norm(collapsed, scale, self.spec.norm_eps)
        after = self._vector(
            "post_norm", stage, 0, lambda: shards.stage_post_norm(stage, self.weights)
        )
        sums, scales = [parts.sum(axis=1) for parts in inputs], self._parallel_norms(stage)
        if scales:
            first, second = (
                rms_norm(made, scale, self.spec.norm_eps)
                for made, scale in zip(sums, scales, strict=True)
            )
            sums = [first + second]
        for read, made in zip(stage.reads, sums, strict=False):
            total = self.dtype(read.scale) * (
                made if after is None else rms_norm(made, after, self.spec.norm_eps)
            )
            self.residual[rank] = self.residual[rank] + total if read.residual else total
        scalar = self._vector(
            "layer_scalar", stage, 0, lambda: shards.layer_scalar(stage, self.weights)
        )
        if scalar is not None:
            self.residual[rank] = self.residual[rank] * scalar.astype(self.dtype)
        x, lanes = self.residual[rank], self.spec.lanes
        if stage.kind is StageKind.LM_HEAD and lanes and lanes.head is LaneHead.MEAN:
            x = x / self.dtype(lanes.count)
        scale = self._vector("norm", stage, 0, lambda: shards.stage_norm(stage, self.weights))
        return x if scale is None else rms_norm(x, scale, self.spec.norm_eps)

    def _parallel_norms(self, stage: Stage) -> tuple[Array, ...]:
        made: tuple[Array, ...] = self._vector(
            "parallel_norms",
            stage,
            0,
            lambda: tuple(shards.parallel_norms(stage, self.weights).values()),
        )
        return made

    def _normed_again(self, stage: Stage, rank: int) -> Array:
        """[n, hidden] that experts, or those next to them, see: what the router does, but for
        families that norm it for each.
        """
        kind = self.spec.experts
        if kind is None or not kind.parallel:
            return self.normed[rank]
        scale = self._vector("norm", stage, 0, lambda: shards.stage_norm(stage, self.weights))
        return rms_norm(self.residual[rank], scale, self.spec.norm_eps)

    def _rows(self, stage: Stage, rank: int, x: Array) -> Array:
        """[n, rows]: the stage's matrix times x ([n, cols]); with n > 1 a block computes only the
        rows it owns.
        """
        matrix, owned = self._matrix(stage, rank), stage.matrix.owned if stage.matrix else ()
        if len(x) == 1:
            rows: Array = (matrix @ x[0])[None]
        else:
            rows = np.full((len(x), len(matrix)), np.nan, self.dtype)
            for block, (lo, hi) in enumerate(owned):
                rows[block, lo:hi] = matrix[lo:hi] @ x[block]
        bias = self._vector(
            "bias", stage, rank, lambda: stage_bias(self.plan, stage, rank, self.weights)
        )
        if bias is not None:
            rows += bias
        return rows

    def _adds_up(self, stage: Stage) -> bool:
        return stage.publishes is not None and self.plan.values[stage.publishes].summed

    def _router_norm(self, stage: Stage) -> Array:
        scale: Array = self._vector(
            "norm", stage, 0, lambda: shards.stage_norm(stage, self.weights)
        )
        return scale

    def _added_up(self, stage: Stage, rank: int) -> Array:
        """[1, elements] sums over all blocks, of a router times what each makes of the residual in
        the stage before, not yet normed; the first elements are the logits.
        """
        made, value = self.made[rank], self.plan.values[stage.publishes or 0]
        rows = self.plan.stages[stage.index - 1].matrix
        read = self.plan.stages[stage.index + 1].reads[0]
        held = self.residual[rank]
        x = np.zeros(self.spec.hidden, self.dtype)
        for block, (lo, hi) in enumerate(rows.owned if rows else ()):
            own, at = (block if len(seen) > 1 else 0 for seen in (held, made))
            x[lo:hi] = held[own, lo:hi] + self.dtype(read.scale) * made[at, lo:hi]
        out = np.zeros((1, value.elements), self.dtype)
        matrix = self._matrix(stage, rank)
        out[0, : len(matrix)] = matrix @ (x * self._router_norm(stage))
        return out

    def _normed_logits(self, stage: Stage, rank: int, inputs: list[Array]) -> Array:
        """[n, 1, logits]: the sums times the factor of the residual, which is whole here, and the
        router's biases.
        """
        router = self.plan.stages[stage.index - 1]
        x = self._hidden(replace(stage, reads=stage.reads[:1]), rank, inputs[:1])
        self.normed[rank] = rms_norm(x, self._router_norm(router), self.spec.norm_eps)
        factor = 1 / np.sqrt(
            np.mean(x * x, axis=-1, keepdims=True) + self.dtype(self.spec.norm_eps)
        )
        rows = len(self._matrix(router, rank))
        logits: Array = inputs[-1][:, :, :rows] * factor[:, None]
        bias = self._vector(
            "bias", router, rank, lambda: stage_bias(self.plan, router, rank, self.weights)
        )
        return logits if bias is None else logits + bias

    def _activated(self, stage: Stage, rows: Array) -> Array:
        """[n, elements] of [n, rows]: what passes the gates, or rows that have none."""
        kind, activation = (
            self.spec.layer(stage.layer).feed,
            ACTIVATIONS[self.spec.variant.activation],
        )
        if isinstance(kind, ExpertFeed) and stage.kind is StageKind.SHARED_UP and kind.limit:
            return gated(kind, self.spec.variant.activation, rows[:, 0::2], rows[:, 1::2])
        if stage.matrix is not None and stage.matrix.unit == 1:
            return activation(rows)
        return activation(rows[:, 0::2]) * rows[:, 1::2]

    def _attention(self, stage: Stage, rank: int, qkv: Array, qk: Array | None = None) -> Array:
        """[1, words of all items, numbers of a word]: each block appends and scans its own items,
        from its own view of q, k and v.

        `qk`: all heads of q and k, of a model that norms them together.
        """
        own = self.plan.attention_of(stage)
        group = own.group
        splits, items = own.splits_of(stage.window), own.items_of(stage.window)
        out = np.full((items, group, own.head_dim + 2), np.nan, self.dtype)
        sinks = self._vector(
            "sinks", stage, rank, lambda: stage_sinks(self.plan, stage, rank, self.weights)
        )
        alike = len(qkv) == 1 and (qk is None or len(qk) == 1)
        q = k = v = np.empty((0, own.head_dim), self.dtype)
        for block, (lo, hi) in enumerate(stage.items):
            if lo == hi:
                continue
            if not alike or not len(q):
                q, k, v = self._heads(stage, qkv, qk, block)
            for item in range(lo, hi):
                head = item // splits
                queries = q[head * group : (head + 1) * group]
                out[item] = self._item(stage, rank, item, queries, k[head], v[head])
                if sinks is not None and item % splits == 0:
                    out[item] = with_sinks(out[item], sinks[head * group : (head + 1) * group])
        return self._worded(stage, out)

    def _heads(
        self, stage: Stage, qkv: Array, qk: Array | None, block: int
    ) -> tuple[Array, Array, Array]:
        """[heads, head_dim] of q, k and v as a block sees them, q and k at the current position."""
        own = self.plan.attention_of(stage)
        view = qkv[block if len(qkv) > 1 else 0]
        if qk is not None:
            view = self._normed_together(stage, qk[block if len(qk) > 1 else 0], view)
        # behind them lie the gates of the outputs, if any
        heads = view[: own.head_rows].reshape(-1, own.head_dim)
        q, k = heads[: own.heads], heads[own.heads : own.heads + own.kv_heads]
        v = heads[-own.kv_heads :]  # the keys themselves where these are the values
        if self.spec.value_norm:
            v = rms_norm(v, np.ones(own.head_dim), self.spec.norm_eps)
        return self._rotated(stage, q, 0), self._rotated(stage, k, 1), v

    def _worded(self, stage: Stage, items: Array) -> Array:
        """[1, words, numbers] as they are published, from [items, group, head_dim + 2]: outputs of
        all heads, then maxima and sums.
        """
        assert stage.publishes is not None
        value = self.plan.values[stage.publishes]
        numbers = numbers_of(self.plan, value)
        count, group, dim = len(items), items.shape[1], items.shape[2] - 2
        words = np.zeros((count, value.elements // count, numbers), self.dtype)
        outputs = group * dim // numbers
        words[:, :outputs] = items[..., :dim].reshape(count, outputs, numbers)
        words[:, outputs : outputs + 2 * group, 0] = items[..., dim:].reshape(count, 2 * group)
        return words.reshape(1, -1, numbers) if numbers > 1 else words.reshape(1, -1)

    def _item(self, stage: Stage, rank: int, item: int, q: Array, k: Array, v: Array) -> Array:
        """[query heads of the group, head_dim + 2]: unnormalised output, maximum, sum over the
        item's positions.
        """
        own, page_size, newest, variant = (
            self.plan.attention_of(stage),
            self.plan.options.kv_page,
            self.position,
            self.spec.variant,
        )
        split = item % own.splits_of(stage.window)
        keys, values = (
            self.keys[stage.layer][rank, item],
            self.values[stage.layer][rank, item],
        )
        first = max(0, newest + 1 - stage.window) if stage.window else 0
        dealt = dealt_pages(own, stage.window, newest // page_size + 1)
        lo, hi = (
            slots_before(position, split, dealt, page_size) for position in (first, newest + 1)
        )
        k_scale, v_scale = self.dtype(1), self.dtype(1)
        if self._scaled:
            by_key, k_scale, by_value, v_scale = self._cache_scales(stage, rank, item)
            k, v = (np.clip(x * by, -LARGEST, LARGEST) for x, by in ((k, by_key), (v, by_value)))
        if dealt[-1] == split:
            keys[hi - 1], values[hi - 1] = k, v
        out = np.zeros((len(q), own.head_dim + 2), self.dtype)
        out[:, -2] = -np.inf
        if lo < hi:
            scores = (q * k_scale) @ keys[lo:hi].astype(self.dtype, copy=False).T
            scores = (
                scores / self.dtype(math.sqrt(own.head_dim))
                if variant.score is None
                else scores * self.dtype(variant.score)
            )
            scores = capped(scores, variant.score_cap)
            out[:, -2] = scores.max(axis=1)
            weights = np.exp(scores - out[:, -2, None])
            out[:, :-2] = weights @ values[lo:hi].astype(self.dtype, copy=False) * v_scale
            out[:, -1] = weights.sum(axis=1)
        return out

    def _cache_scales(self, stage: Stage, rank: int, item: int) -> Array:
        """[NUMBERS] of the item's KV head."""
        scales: Array = self._vector(
            "cache_scales", stage, rank, lambda: stage_cache_scales(self.plan, stage, rank)
        )
        own = self.plan.attention_of(stage)
        of_head: Array = scales[item // own.splits_of(stage.window)].astype(self.dtype)
        return of_head

    def _normed_together(self, stage: Stage, qk: Array, qkv: Array) -> Array:
        """`qkv` with the heads of q, and those of k, normed as one vector each."""
        scales = self._qk_norms(stage)
        assert scales is not None
        q, k, _ = np.split(qk, np.cumsum([len(scale) for scale in scales]))
        made = [
            rms_norm(x, scale, self.spec.norm_eps) for x, scale in zip((q, k), scales, strict=True)
        ]
        return np.concatenate([*made, qkv[len(q) + len(k) :]])

    def _rotated(self, stage: Stage, x: Array, which: int) -> Array:
        """q (which 0) or k (1), [..., head_dim], normed if the model norms each head, and rotated
        to the current position.
        """
        scales, last = self._qk_norms(stage), self.spec.variant.norms_turned
        if scales is not None and not self.spec.whole_qk_norm and not last:
            x = rms_norm(x, scales[which], self.spec.norm_eps)
        cos, sin = self.turns[self.spec.rotation(stage.layer)]
        turned = rotate(x, cos[self.position], sin[self.position], self.spec.rope.style)
        return rms_norm(turned, scales[which], self.spec.norm_eps) if scales and last else turned

    def _qk_norms(self, stage: Stage) -> tuple[Array, Array] | None:
        scales: tuple[Array, Array] | None = self._vector(
            "qk_norm", stage, 0, lambda: shards.query_key_norms(stage, self.weights)
        )
        return scales

    def _heads_out(self, stage: Stage, inputs: list[Array]) -> Array:
        """[n, heads * head_dim] that an output projection multiplies."""
        made = self.plan.stages[self.plan.values[stage.reads[0].value].stage]
        if made.kind in (StageKind.CONV_IN, StageKind.HEAD_OUT):
            return inputs[0]
        if made.kind is StageKind.DELTA:
            return self.states.normed(made, inputs[0])
        combined = self._combine(stage, inputs[0])
        if not self.spec.output_gate:
            return combined
        with np.errstate(over="ignore"):
            gated: Array = combined / (1 + np.exp(-inputs[1][:, -combined.shape[1] :]))
        return gated

    def _combine(self, stage: Stage, partials: Array) -> Array:
        """[n, heads * head_dim]: the splits of each head, weighed by their maxima and sums, in
        split order.
        """
        own = self.plan.attention_of(stage)
        group = own.group
        attended = self.plan.stages[self.plan.values[stage.reads[0].value].stage]
        splits = own.splits_of(attended.window)
        numbers = partials.shape[2] if partials.ndim > 2 else 1
        words = partials.reshape(len(partials), own.kv_heads, splits, -1, numbers)
        outputs = group * own.head_dim // numbers
        heads = words[..., :outputs, :].reshape(*words.shape[:3], group, own.head_dim)
        ends = words[..., outputs : outputs + 2 * group, 0].reshape(*words.shape[:3], group, 2)
        weights = np.exp(ends[..., 0] - ends[..., 0].max(axis=2, keepdims=True))
        total = (weights * ends[..., 1]).sum(axis=2)
        output: Array = (weights[..., None] * heads).sum(axis=2) / total[..., None]
        return output.reshape(len(partials), -1)

    def _head(self, stage: Stage, rank: int, x: Array) -> Array:
        """[1, elements]: each block's best (logit, index); also keeps the logits of the
        valid rows.
        """
        assert stage.matrix is not None
        rows, first = (
            capped(self._rows(stage, rank, x), self.spec.variant.logit_cap),
            rank * self.plan.shard.vocab,
        )
        out: list[tuple[float, int]] = []
        logits = np.full(self.plan.shard.vocab, -np.inf, self.dtype)
        for block, (lo, hi) in enumerate(stage.matrix.owned):
            valid = max(lo, min(hi, self.spec.vocab - first))
            logits[lo:valid] = rows[block if len(rows) > 1 else 0, lo:valid]
            best = lo + int(np.argmax(logits[lo:hi])) if lo < hi else 0
            out.append((float(logits[best]) if lo < hi else -math.inf, first + best))
        count = max(0, min(len(logits), self.spec.vocab - first))
        self.logits[first : first + count] = logits[:count]
        words = np.zeros((len(out), self._candidate_words()), self.dtype)
        words[:, :2] = out  # masses depend on a request, and are left out
        return words.reshape(1, -1)

    def _candidate_words(self) -> int:
        """Of a block's best logit and its token; the full sampler's blocks add their mass."""
        return SUMMARY if self.plan.options.sampling is Sampling.FULL else CANDIDATE

    def _sample(self, rank: int, parts: Array) -> Array:
        """The greedy token of this rank, from all ranks' candidates; ranks must agree."""
        seen = parts[0].reshape(-1, self._candidate_words())  # block 0 always samples
        logits, tokens = seen[:, 0], seen[:, 1]
        token = -1 if np.isnan(logits).any() else int(tokens[logits == logits.max()].min())
        if rank and token != self.sampled:
            raise InvalidPlan(
                f"position {self.position}: rank {rank} chose token {token}, rank 0 chose "
                f"{self.sampled}"
            )
        self.sampled = token
        return np.array([[token]], self.dtype)

    # ---- weights ---------------------------------------------------------------------------------

    def _matrix(self, stage: Stage, rank: int) -> Array:
        key = (stage.index, rank)
        if key not in self._matrices:
            self._matrices[key] = matrices.stage_matrix(
                self.plan, stage, rank, self.weights
            ).astype(self.dtype)
        return self._matrices[key]

    def _vector(self, name: str, stage: Stage, rank: int, make: Callable[[], Any]) -> Any:
        key = (name, stage.index, rank)
        if key not in self._vectors:
            self._vectors[key] = make()
        return self._vectors[key]


def capped(x: Array, cap: float | None) -> Array:
    """Softly limited to -cap..cap; as it is without a cap."""
    return x if cap is None else np.tanh(x / x.dtype.type(cap)) * x.dtype.type(cap)


def _published_rows(stage: Stage) -> tuple[Span, ...]:
    """[blocks] elements that the rows which each block owns make, of all matrices one behind the
    other.
    """
    spans: list[Span] = [(0, 0)] * len(stage.matrix.owned if stage.matrix else ())
    first = 0
    for matrix in stage.matrices:
        made = [(first + lo // matrix.unit, first + hi // matrix.unit) for lo, hi in matrix.owned]
        empty = [lo == hi for lo, hi in spans]
        spans = [
            own if new[0] == new[1] and not none else (new if none else (own[0], new[1]))
            for own, new, none in zip(spans, made, empty, strict=True)
        ]
        first += matrix.rows // matrix.unit
    return tuple(spans)


def _base(value: Value) -> str:
    """A value's name without its layer."""
    return value.name.partition("[")[0].partition(".")[0]


@lru_cache(maxsize=1024)
def dealt_pages(own: Attention, window: int, pages: int) -> tuple[int, ...]:
    """The split of each page: the first splits take pages in turn until they have their first ones,
    then the next splits do; then all do.
    """
    splits = range(own.splits_of(window))
    rounds = chain(
        (
            splits[first : first + own.together]
            for first in splits[:: own.together]
            for _ in range(own.first_pages)
        ),
        repeat(splits),
    )
    return tuple(islice(chain.from_iterable(rounds), pages))


def slots_before(position: int, split: int, dealt: tuple[int, ...], page: int) -> int:
    """How many positions below `position` a split holds: whole pages, and its part of the one that
    is not full.
    """
    full, rest = divmod(position, page)
    return dealt[:full].count(split) * page + (rest if rest and dealt[full] == split else 0)
