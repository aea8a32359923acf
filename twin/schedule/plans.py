"""Plans with the tiles and splits that the schedule chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from twin.errors import PlanError
from twin.models.spec import ModelSpec
from twin.plan.attention import Attention
from twin.plan.build import outline
from twin.plan.options import Limits, Options
from twin.plan.types import Plan
from twin.schedule.choose import chooser_of
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
    chooser = chooser_of(plan.limits)
    own = attention_of(
        chooser, plan.limits, plan.spec, options, ranks=plan.ranks, blocks=plan.blocks
    )
    if _divided(own) != _divided(plan.attentions):
        return build(plan.spec, options, plan.limits)
    try:
        other = replace(plan, options=options, attentions=own)
        return tiled(other, chooser.cutter(other))
    except SmallSlot:
        return build(plan.spec, options, plan.limits)


def _divided(attentions: tuple[Attention, ...]) -> list[tuple[int, int]]:
    return [(own.splits, own.window_splits) for own in attentions]


def _build(spec: ModelSpec, options: Options, limits: Limits) -> Plan:
    chooser = chooser_of(limits)
    if options.head_window_slots and not chooser.own_head_window(spec):
        raise PlanError(
            f"head_window_slots={options.head_window_slots}: only models without experts on NVIDIA "
            "GPUs read the LM head with a window of its own; leave it out"
        )
    plan = outline(spec, options, limits, partial(attention_of, chooser, limits))
    return tiled(plan, chooser.cutter(plan))


def _least_slot(spec: ModelSpec, options: Options, limits: Limits, refusal: SmallSlot) -> int:
    """Bytes of a slot that holds a tile of every matrix, and for an NVIDIA block a cached key and
    its value.
    """
    while True:
        try:
            made = _build(spec, replace(options, slot_bytes=refusal.need), limits).attentions
        except SmallSlot as more:
            if more.need <= refusal.need:  # a slot of that size is refused, too
                raise
            refusal = more
        except PlanError:  # what else is wrong with the options is said once the slot is not
            return refusal.need
        else:
            chooser = chooser_of(limits)
            cached = [chooser.cached_slot_bytes(own, options) for own in made]
            return max([refusal.need, *cached])
