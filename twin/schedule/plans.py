"""Plans with the tiles and splits that the schedule chooses."""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.models.spec import ModelSpec
from twin.plan.build import outline
from twin.plan.types import Limits, Options, Plan
from twin.schedule.coded_tiles import SmallSlot
from twin.schedule.splits import attention_of
from twin.schedule.tiles import tiled


def build(spec: ModelSpec, options: Options, limits: Limits) -> Plan:
    """Plan one decode step.

    Raises PlanError when the options do not fit the model. The result still has to pass `validate`.
    """
    try:
        return _build(spec, options, limits)
    except SmallSlot as refusal:
        least = _least_slot(spec, options, limits, refusal)
        raise SmallSlot(options.slot_bytes, refusal.rows, least) from None


def resized(plan: Plan, slot_bytes: int) -> Plan:
    """The plan of a model with another size of slots. It is laid out again only where its attention
    is divided otherwise. Raises as `build`.
    """
    assert plan.spec is not None
    options = replace(plan.options, slot_bytes=slot_bytes)
    own = attention_of(plan.spec, options, plan.limits, ranks=plan.ranks, blocks=plan.blocks)
    was = plan.attention
    if own and was and (own.splits, own.window_splits) != (was.splits, was.window_splits):
        return build(plan.spec, options, plan.limits)
    try:
        return tiled(replace(plan, options=options, attention=own))
    except SmallSlot:
        return build(plan.spec, options, plan.limits)


def _build(spec: ModelSpec, options: Options, limits: Limits) -> Plan:
    _check_head_window(spec, options, limits)
    return tiled(outline(spec, options, limits, attention_of))


def _least_slot(spec: ModelSpec, options: Options, limits: Limits, refusal: SmallSlot) -> int:
    """Bytes of a slot that holds a tile of every matrix, and for an NVIDIA block a cached key and
    its value.
    """
    while True:
        try:
            own = _build(spec, replace(options, slot_bytes=refusal.need), limits).attention
        except SmallSlot as more:
            if more.need <= refusal.need:  # a slot of that size is refused, too
                raise
            refusal = more
        except PlanError:  # what else is wrong with the options is said once the slot is not
            return refusal.need
        else:
            cached = own.position_bytes(options.kv_dtype) if own and limits.teams else 0
            return max(refusal.need, cached)


def _check_head_window(spec: ModelSpec, options: Options, limits: Limits) -> None:
    if options.head_window_slots and (not limits.teams or spec.experts):
        raise PlanError(
            f"head_window_slots={options.head_window_slots}: only models without experts on NVIDIA "
            "GPUs read the LM head with a window of its own; leave it out"
        )
