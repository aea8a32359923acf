"""The constants of a rank (norm scales, biases, sinks, rotary tables): where they lie and what they
hold. Offsets count floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from twin.kernel.fields import STAGE_EXTRAS, up
from twin.models.spec import LaneHead
from twin.plan import shards
from twin.plan.biases import bias_shape, stage_bias, stage_sinks
from twin.plan.catalogue import ROWS
from twin.plan.delta_vectors import delta_sizes, delta_vectors
from twin.plan.shards import Weights
from twin.plan.types import Plan, Stage, StageKind
from twin.schedule.choose import schedule_of
from twin.schedule.types import Schedule

RESIDUAL_NORMS = ("norm", "post_norm")
VECTOR_FLOATS = 16  # constants start on a 64-byte line


def stage_extras(plan: Plan) -> tuple[str, ...]:
    """What the model's family has a stage say besides FIELDS."""
    spec = plan.spec
    used = (
        spec is not None and spec.variant.norms.after,
        spec is not None and len(spec.rotations) > 1,
        spec is not None and spec.sinks and plan.attention is not None,
        *(3 * (plan.kernel_recurs,)),
    )
    return tuple(name for name, wanted in zip(STAGE_EXTRAS, used, strict=True) if wanted)


def constant_offsets(plan: Plan) -> tuple[int, dict[int, dict[str, int]]]:
    """(floats, offset by stage and vector name); the rotary tables, cos then sin of each rotation,
    stand at stage -1.
    """
    if plan.spec is None:
        return 1, {}
    total = 0
    offsets: dict[int, dict[str, int]] = {}
    for stage in plan.stages:
        for name, size in _vector_sizes(plan, stage):
            offsets.setdefault(stage.index, {})[name] = total
            total += up(size, VECTOR_FLOATS)
    offsets[-1] = {"rope": total}
    if "rope" in stage_extras(plan):
        for stage in plan.stages:
            if stage.kind is StageKind.ATTENTION:
                offsets.setdefault(stage.index, {})["rope"] = _rope_offsets(
                    plan, total, plan.spec.rotation(stage.layer)
                )[0]
    return total + 2 * _rope_floats(plan) * len(plan.spec.rotations), offsets


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
    if shape := bias_shape(plan.spec, stage):
        yield "bias", math.prod(shape)
    if ROWS[stage.kind].sinks and plan.spec.sinks:
        yield "sinks", plan.kernel_attention().heads
    yield from delta_sizes(plan, stage).items()
    if stage.kind is StageKind.ATTENTION and plan.spec.qk_norm:
        own, together = plan.kernel_attention(), plan.spec.variant.whole_qk_norm
        yield "q_norm", own.head_dim * (own.heads if together else 1)
        yield "k_norm", own.head_dim * (own.kv_heads if together else 1)


def _rope_floats(plan: Plan) -> int:
    return up(plan.options.max_context * plan.kernel_attention().head_dim // 2, VECTOR_FLOATS)


def _rope_offsets(plan: Plan, at: int, number: int) -> tuple[int, int]:
    """Of the cosines and of the sines of a rotation."""
    at += 2 * number * _rope_floats(plan)
    return at, at + _rope_floats(plan)


def pack_constants(plan: Plan, weights: Weights, rank: int) -> NDArray[np.float32]:
    """Norm scales, biases and rotary tables of a rank, at the offsets that the stage table gives.
    Where teams of warps load the residual's scales, they lie in the order in which these do.
    """
    total, vectors = constant_offsets(plan)
    out, schedule = np.zeros(total, np.float32), schedule_of(plan)

    def put(at: int, vector: NDArray[np.float32]) -> None:
        out[at : at + vector.size] = vector.reshape(-1)

    for stage in plan.stages:
        for name, at in vectors.get(stage.index, {}).items():
            if name == "rope":
                continue
            vector = _vector(plan, stage, name, rank, weights)
            put(at, in_norm_order(schedule, vector) if name in RESIDUAL_NORMS else vector)
    reach = plan.options.max_context
    for at, table in rope_vectors(plan, reach, present=reach):
        put(at, table)
    return out


def in_norm_order(schedule: Schedule, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """A norm's weights [hidden] as the threads of an NVIDIA block load them, `norm_place` in
    native/platform/cuda_vector.cuh: of each column slice the first four of every thread, then the
    next four of every thread; as they are where a thread has four neighbours, and elsewhere.
    """
    if schedule.warps is None or schedule.by_fours:
        return weights
    team = schedule.warps.teams["hidden"]
    slices = (weights[at : at + team.tile] for at in range(0, weights.size, team.tile))
    fours = (of.reshape(-1, team.vector // 4, 4).swapaxes(0, 1) for of in slices)
    return np.concatenate([of.reshape(-1) for of in fours])


def rope_vectors(
    plan: Plan, positions: int, *, present: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(offset, vector) of the first `positions` of each rotary table, for a sequence of `present`
    tokens.
    """
    assert plan.spec is not None
    begin = constant_offsets(plan)[1][-1]["rope"]
    for number, tables in enumerate(shards.rope_tables(plan.spec, positions, present=present)):
        yield from zip(_rope_offsets(plan, begin, number), tables, strict=True)


def _vector(
    plan: Plan, stage: Stage, name: str, rank: int, weights: Weights
) -> NDArray[np.float32]:
    if name == "norm":
        found = shards.stage_norm(stage, weights)
    elif name == "post_norm":
        found = shards.stage_post_norm(stage, weights)
    elif name == "bias":
        found = stage_bias(plan, stage, rank, weights)
    elif name == "sinks":
        found = stage_sinks(plan, stage, rank, weights)
    elif stage.kind is StageKind.DELTA:
        found = delta_vectors(plan, stage, rank, weights)[name]
    else:
        norms = shards.query_key_norms(stage, weights)
        found = norms[name == "k_norm"] if norms else None
    assert found is not None, f"{stage.name} has room for {name}, but the model has none"
    return found
