"""Everything about a plan that is one number, as its kernel gets it."""

from __future__ import annotations

from twin.kernel.fields import NUMBERS
from twin.kernel.prompt import Prompt
from twin.models.spec import LaneHead, ModelSpec, RopeStyle
from twin.plan.options import STAGGERED_LANES, HandOffKind, Sampling
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS, ROWS_AT_ONCE, up
from twin.schedule.memory import STATE_EXTRA, Scratch, block_logits, logits_buffer_floats
from twin.schedule.passes import Passes
from twin.schedule.types import Schedule

HANDOFFS = {kind: at for at, kind in enumerate(HandOffKind)}


def sizes_of(schedule: Schedule, prompt: Prompt) -> dict[str, int | float]:
    """Everything about a plan that is one number. `*_floats` of a block's own memory come from the
    worst stage.
    """
    plan, scratch = schedule.plan, schedule.memory.scratch
    spec, shard, options, lanes = (
        plan.spec,
        plan.shard,
        plan.options,
        plan.spec.lanes if plan.spec else None,
    )
    own = plan.attention
    return (
        {
            "ranks": plan.ranks,
            "ranks_per_gpu": plan.ranks_per_gpu,
            "blocks": plan.blocks,
            "stage_count": len(plan.stages),
            "handoff": HANDOFFS[options.handoff],
            "full": int(options.sampling is Sampling.FULL),
            "probe": int(spec is None),
            "kinds": sum(1 << NUMBERS[kind] for kind in {stage.kind for stage in plan.stages}),
            "resident": int(options.resident),
            "hidden": shard.hidden,
            "heads": own.heads if own else 0,
            "heads_floats": max((one.heads * one.head_dim for one in plan.attentions), default=0),
            "kv_heads": own.kv_heads if own else 0,
            "shard_vocab": shard.vocab,
            "vocab": spec.vocab if spec else shard.vocab,
            "splits": own.splits if own else 1,
            "page": options.kv_page,
            "together": own.together if own else 1,
            "first_pages": own.first_pages if own else 0,
            "item_positions": own.item_positions if own else 0,
            "kv_items": own.items if own else 0,
            "context": options.context,
            "max_context": options.max_context,
            "interleaved": int(spec is not None and spec.rope.style is RopeStyle.INTERLEAVED),
            "mean_of": lanes.count if lanes and lanes.head is LaneHead.MEAN else 1,
            "norm_eps": spec.norm_eps if spec else 0.0,
            "biased": int(spec is not None and _biased(spec)),
            "slot_bytes": options.slot_bytes,
            "ring_slots": options.ring_slots,
            "window_slots": options.window_slots,
            "head_window_slots": options.head_window,
            "head_rows": plan.head_rows,
            "stagger_ns": options.lane_stagger_ns,
            "staggered": STAGGERED_LANES,
            "pieces_inside": int(_pieces_inside(plan, scratch)),
            "state_floats": up(shard.hidden, LINE_FLOATS) + STATE_EXTRA,
            "input_floats": schedule.memory.input_floats,
            "scratch_floats": scratch.floats,
            "half_floats": scratch.half,
            "block_logits": block_logits(plan),
            "logits_buffer_floats": logits_buffer_floats(plan),
        }
        | _others(plan)
        | dict(schedule.warp_sizes)
        | _prompt_sizes(schedule, prompt)
    )


OTHER = ("heads", "kv_heads", "splits", "together", "first_pages", "item_positions")


def _others(plan: Plan) -> dict[str, int]:
    """Of the heads of a second shape, and of their caches."""
    if len(plan.attentions) < 2:
        return {}
    other = plan.attentions[1]
    return {f"other_{name}": getattr(other, name) for name in OTHER} | {
        "other_kv_items": other.items
    }


def _pieces_inside(plan: Plan, scratch: Scratch) -> bool:
    """NVIDIA: may a thread load ROWS_AT_ONCE rows from the first of any piece on? Those that a low
    tile has not lie in the next slot, or behind the ring.
    """
    room = plan.options.slot_bytes + 4 * scratch.floats
    low = [m for s in plan.stages for m in s.matrices if m.tile_rows % ROWS_AT_ONCE]
    return all(
        m.format is None
        and m.tile_rows <= ROWS_AT_ONCE
        and ROWS_AT_ONCE * m.tile_cols * plan.options.weight_dtype.bytes <= room
        for m in low
    )


def _biased(spec: ModelSpec) -> bool:
    """Do products of the residual have biases, besides those of experts?"""
    return spec.qkv_bias or (spec.experts is not None and spec.experts.router_bias)


def _prompt_sizes(schedule: Schedule, prompt: Prompt) -> dict[str, int]:
    plan, passes = schedule.plan, schedule.passes
    return (
        {
            "prompt_chunk": plan.options.prompt_chunk if plan.spec else 1,
            "prompt_floats": prompt.floats,
            "prompt_residual": prompt.residual,
            "prompt_normed": prompt.normed,
            "prompt_stages": prompt.stages,
            "prompt_chip_floats": prompt.chip_floats,
            "prompt_bytes": schedule.memory.pass_bytes,
            "prompt_queries": prompt.queries,
            "prompt_decoded": prompt.decoded,
            "prompt_normed_floats": prompt.normed_floats,
            "prompt_summed_floats": prompt.summed_floats,
            "prompt_choices": prompt.choices,
            "prompt_router": prompt.router,
            "prompt_entries": prompt.entries,
            "prompt_order": prompt.order,
            "prompt_batch": passes.batch if passes else 0,
            "prompt_owners": passes.owners if passes else 1,
            "tensor_pass": int(passes is not None and passes.tensor),
        }
        | {f"prompt_{name}": at for name, at in prompt.others.items()}
        | _round_sizes(plan, passes, prompt)
    )


def _round_sizes(plan: Plan, passes: Passes | None, prompt: Prompt) -> dict[str, int]:
    """Of a plan that verifies drafts."""
    if passes is None or not passes.rounds:
        return {}
    offsets = {f"round_{name}": at for name, at in prompt.rounds.items()}
    return {
        "drafts": plan.options.lookup,
        "round_stages": prompt.round_stages,
        "round_splits": passes.round_splits,
        "handed_on": int(passes.handed_on),
    } | (offsets | dict(prompt.head))
