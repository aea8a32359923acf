"""The constants of a rank (norm scales, biases, sinks, rotary tables): where they lie and what they
hold. Offsets count floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.kernel.compressed import (
    TURNING,
    compressed_names,
    compressed_sizes,
    compressed_vector,
    compresses,
)
from twin.kernel.fields import COMPRESSED, STAGE_EXTRAS
from twin.kernel.scores import columns_of
from twin.models.spec import LaneHead
from twin.plan import shards
from twin.plan.biases import bias_shape, stage_bias, stage_sinks
from twin.plan.cache_scales import NUMBERS, has_cache_scales, stage_cache_scales
from twin.plan.catalogue import CARRYING, ROWS, StageKind
from twin.plan.delta_vectors import delta_sizes, delta_vectors
from twin.plan.shards import Weights
from twin.plan.types import Plan, Stage
from twin.schedule.block import up
from twin.schedule.memory import VECTOR_FLOATS
from twin.schedule.scores import by_own_rows, scores_of
from twin.schedule.types import Schedule

PARALLEL_NORMS = ("shared_post_norm", "experts_post_norm")
RESIDUAL_NORMS = ("norm", "post_norm", *PARALLEL_NORMS)


@frozen
class Constants:
    """Of one rank of a plan."""

    schedule: Schedule
    extras: tuple[str, ...]  # what the model's family has a stage say besides FIELDS
    floats: int
    # by stage and vector name; the rotary tables, cos then sin of each rotation, are at stage -1
    offsets: dict[int, dict[str, int]]
    rope_floats: tuple[int, ...]  # of one rotary table of each rotation

    def pack(self, weights: Weights, rank: int) -> NDArray[np.float32]:
        """Norm scales, biases and rotary tables of a rank, at their offsets. Where teams of warps
        load the residual's scales, they lie in the order in which these do.
        """
        plan, out = self.schedule.plan, np.zeros(self.floats, np.float32)

        def put(at: int, vector: NDArray[np.float32]) -> None:
            out[at : at + vector.size] = vector.reshape(-1)

        for stage in plan.stages:
            for name, at in self.offsets.get(stage.index, {}).items():
                if name == "rope":
                    continue
                vector = _vector(plan, stage, name, rank, weights)
                ordered = self.schedule.norm_order.of(vector) if name in RESIDUAL_NORMS else vector
                put(at, ordered)
        reach = plan.options.max_context
        for at, table in self.rope_vectors(reach, present=reach):
            put(at, table)
        return out

    def rope_vectors(
        self, positions: int, *, present: int
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(offset, vector) of the first `positions` of each rotary table, for a sequence of
        `present` tokens.
        """
        spec = self.schedule.plan.spec
        assert spec is not None
        at = self.offsets[-1]["rope"]
        tables = shards.rope_tables(spec, positions, present=present)
        for floats, both in zip(self.rope_floats, tables, strict=True):
            for table in both:
                yield at, table
                at += floats


def constants_of(schedule: Schedule) -> Constants:
    plan, spec = schedule.plan, schedule.plan.spec
    used = (
        spec is not None and spec.variant.norms.after,
        spec is not None and len(spec.rotations) > 1,
        spec is not None and (spec.sinks or compresses(plan)) and plan.attention is not None,
        plan.kernel_recurs,
        *(2 * (bool(plan.delta_stages),)),
        plan.kernel_experts is not None and plan.kernel_experts.choice_bias,
        spec is not None and spec.variant.layer_scalar,
        len(plan.attentions) > 1,
        any(has_cache_scales(plan, stage) for stage in plan.stages),
        *(3 * (plan.kernel_experts is not None and plan.kernel_experts.parallel,)),
        *(2 * (scores_of(plan) is not None,)),
        *(len(COMPRESSED) * (compresses(plan),)),
    )
    extras = tuple(name for name, wanted in zip(STAGE_EXTRAS, used, strict=True) if wanted)
    if spec is None:
        return Constants(schedule, extras, 1, {}, ())
    total = 0
    offsets: dict[int, dict[str, int]] = {}
    for stage in plan.stages:
        for name, size in _vector_sizes(plan, stage):
            offsets.setdefault(stage.index, {})[name] = total
            total += up(size, VECTOR_FLOATS)
    offsets[-1] = {"rope": total}
    reach = plan.options.max_context
    tables = tuple(
        up(reach * spec.rotated_dim(number) // 2, VECTOR_FLOATS)
        for number in range(len(spec.rotations))
    )
    if "rope" in extras:
        for stage in plan.stages:
            if stage.kind in TURNING:
                at = total + 2 * sum(tables[: spec.rotation(stage.layer)])
                offsets.setdefault(stage.index, {})["rope"] = at
    return Constants(schedule, extras, total + 2 * sum(tables), offsets, tables)


def _vector_sizes(plan: Plan, stage: Stage) -> Iterable[tuple[str, int]]:
    assert plan.spec is not None
    mean = plan.spec.lanes is not None and plan.spec.lanes.head is LaneHead.MEAN
    # lanes are normed where they meet, or in the head
    unnormed = StageKind.LM_HEAD if mean else StageKind.LANE_MEAN
    if ROWS[stage.kind].norm and stage.kind is not unnormed:
        if plan.spec.variant.norms.before or stage.kind is StageKind.LM_HEAD:
            yield "norm", plan.shard.hidden
        if plan.spec.variant.norms.after and stage.reads:
            yield "post_norm", plan.shard.hidden
    kind = plan.kernel_experts
    if shards.layer_ended(plan.spec, stage) is not None:
        if plan.spec.variant.layer_scalar:
            yield "layer_scalar", 1
        if kind is not None and kind.parallel:
            yield from ((name, plan.shard.hidden) for name in PARALLEL_NORMS)
    yield from compressed_sizes(plan, stage).items()
    if shape := bias_shape(plan.spec, stage):
        yield "bias", math.prod(shape)
    if ROWS[stage.kind].sinks and plan.spec.sinks:
        yield "sinks", plan.attention_of(stage).heads
    if has_cache_scales(plan, stage):
        yield "cache_scales", NUMBERS * plan.attention_of(stage).kv_heads
    yield from delta_sizes(plan, stage).items()
    if (made := scores_of(plan)) is not None and by_own_rows(plan, stage):
        yield "own_norm", plan.shard.hidden
        yield "columns", plan.blocks * made.words
    chosen = bool(compressed_names(plan, stage))  # by a table, which needs no biases
    if stage.kind is StageKind.ROUTE and kind is not None and kind.choice_bias and not chosen:
        yield "choice_bias", kind.experts
    if stage.kind is StageKind.ROUTE and kind is not None and kind.parallel:
        yield "expert_scales", kind.experts
    if stage.kind is StageKind.ATTENTION and plan.spec.qk_norm:
        own, together = plan.attention_of(stage), plan.spec.whole_qk_norm
        yield "q_norm", own.head_dim * (own.heads if together else 1)
        yield "k_norm", own.head_dim * (own.kv_heads if together else 1)


def _vector(
    plan: Plan, stage: Stage, name: str, rank: int, weights: Weights
) -> NDArray[np.float32]:
    own = compressed_vector(plan, stage, name, rank, weights)
    if own is not None:
        return own
    if name == "norm":
        found = shards.stage_norm(stage, weights)
    elif name == "post_norm":
        found = shards.stage_post_norm(stage, weights)
    elif name == "layer_scalar":
        found = shards.layer_scalar(stage, weights)
    elif name == "bias":
        found = stage_bias(plan, stage, rank, weights)
    elif name == "sinks":
        found = stage_sinks(plan, stage, rank, weights)
    elif name == "cache_scales":
        found = stage_cache_scales(plan, stage, rank)
    elif name == "own_norm":
        found = shards.stage_norm(stage, weights)
    elif name == "columns":
        found = columns_of(plan, stage, weights)
    elif name in PARALLEL_NORMS:
        found = shards.parallel_norms(stage, weights)[name]
    elif name in ("choice_bias", "expert_scales"):
        found = weights[f"layers.{stage.layer}.{name}"].astype(np.float32)
    elif stage.kind in CARRYING:
        found = delta_vectors(plan, stage, rank, weights)[name]
    else:
        norms = shards.query_key_norms(stage, weights)
        found = norms[name == "k_norm"] if norms else None
    assert found is not None, f"{stage.name} has room for {name}, but the model has none"
    return found
