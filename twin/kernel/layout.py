"""How much memory of each kind a plan takes: the sizes that its kernel is told, and NVIDIA's shared
memory. Sizes count floats, except where the name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin.kernel import experts, recurrent
from twin.kernel.constants import VECTOR_FLOATS, stage_extras
from twin.kernel.fields import NUMBERS, up
from twin.kernel.prompt import Prompt, chip_bytes
from twin.models.formats import PACK, UNIT_BYTES
from twin.models.spec import LaneHead, ModelSpec, RopeStyle
from twin.plan.catalogue import ALWAYS
from twin.plan.step import SUMMARY
from twin.plan.types import (
    MOST_WARPS,
    PARTIAL_EXTRA,
    STAGGERED_LANES,
    Execution,
    HandOffKind,
    Parts,
    Plan,
    Sampling,
    StageKind,
)
from twin.schedule.block import ROWS_AT_ONCE, TEAM_WARPS, WARP
from twin.schedule.homes import Home
from twin.schedule.products import tensor_products
from twin.schedule.types import Schedule, WarpSchedule

BARRIER_BYTES = 8  # an mbarrier; each ring position has two: full and empty
PROGRESS_BYTES = 32  # Progress in block.cuh
# Signals in cuda_core.cuh besides the values of its warps; the sum is checked there
SIGNAL_BYTES = 32 * 16 + 48
HEAD_PACK, NARROW_PACK = 8, 4  # of one attention head: PACK in cuda_vector.cuh
STATE_EXTRA = 32  # floats that a block keeps between kernels besides its residual
# exchange rows and counters never share a 128-byte line, the widest of the targets
LINE_FLOATS = 32
# The full sampler (shelf.cuh, sampling.cuh). Buckets of logits, a temperature's sixteenth wide;
# words of what lies in one, and of what a block publishes
SAMPLE_BUCKETS, LEVEL_FLOATS, SUMMARY_FLOATS = 256, 4, SUMMARY
SHELF_FIRST = 4  # words of a block's shelf before its logits
SAMPLE_LISTED = 256  # logits that are compared one by one
SAMPLE_HELD = 1280  # of a bucket, on the chip
# in its scratch: a number of each warp; one block of one rank; which logit is the last one kept
MEETING_FLOATS, SHARE_FLOATS, FOUND_FLOATS = 64, 10, 16
PROBED_FLOATS = (256 + 16) * 4  # what threads found in the buckets that they were asked for
TEAM_SIZES = (  # of NVIDIA's blocks
    "consumer_warps",
    "scan_heads",
    "cache_tile",
    "tensor_scan",
    "wide_ffn",
    "ffn_in_registers",
    "ffn_at_once",
    "held_on_chip",
    "hidden_in_quads",
    "parts_together",
    *(
        f"{use}_{what}"
        for use in ALWAYS
        for what in ("cols", "tile", "vector", "team", "ahead_chunks", "ahead_groups")
    ),
)
HANDOFFS = {kind: at for at, kind in enumerate(HandOffKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """A block's scratch, FP32, one part behind the other."""

    stages: int  # what the worst stage needs besides its input
    # NVIDIA: the residual between the stages that use it, where few-bit weights leave it no
    # registers (Held in cuda_vector.cuh)
    held: int
    # NVIDIA: what of an input is too wide for registers (cuda_wide.cuh, cuda_tall.cuh), or an input
    # that tensor cores multiply as whole numbers (cuda_fragments.cuh)
    whole: int
    choice: int  # a token's experts, from ROUTE on until ROUTED_DOWN is over
    kept: int  # how much of the shared experts a token wants, and a block's rows of their sums
    half: int  # of `stages`: partial sums of one batch of rows
    whole_units: int  # of PACK elements, in `whole`: those that tensor cores multiply

    @property
    def floats(self) -> int:
        return self.stages + self.held + self.whole + self.choice + self.kept


def scratch_of(schedule: Schedule) -> Scratch:
    """What a block of the plan needs beside its ring and its stages' inputs."""
    half, units = _half_floats(schedule), _whole_units(schedule)
    return Scratch(
        stages=_stages_floats(schedule, half),
        held=_held_floats(schedule),
        whole=_whole_floats(schedule, units),
        choice=_choice_floats(schedule.plan),
        kept=_kept_floats(schedule.plan),
        half=half,
        whole_units=units,
    )


def sizes_of(schedule: Schedule, scratch: Scratch, prompt: Prompt) -> dict[str, int | float]:
    """Everything about a plan that is one number. `*_floats` of a block's own memory come from the
    worst stage.
    """
    plan = schedule.plan
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
            "resident": int(options.execution is Execution.RESIDENT),
            "hidden": shard.hidden,
            "heads": own.heads if own else 0,
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
            "input_floats": input_floats(schedule),
            "scratch_floats": scratch.floats,
            "half_floats": scratch.half,
            "shelf_rows": shelf_rows(plan),
            "shelf_floats": _shelf_floats(plan),
        }
        | _team_sizes(schedule)
        | _prompt_sizes(schedule, prompt)
    )


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


def _team_sizes(schedule: Schedule) -> dict[str, int]:
    """NVIDIA: warps that compute, and how they share the matrices of each input. Zero where a
    device has no such warps.
    """
    warps, plan = schedule.warps, schedule.plan
    if warps is None:
        return dict.fromkeys(TEAM_SIZES, 0)
    portions = warps.teams["hidden"].portions
    sizes = {
        "consumer_warps": TEAM_WARPS,
        "scan_heads": schedule.scan.heads,
        "cache_tile": schedule.scan.positions,
        "tensor_scan": int(schedule.scan.tensor),
        "wide_ffn": int(warps.ffn.in_memory),
        "ffn_in_registers": warps.ffn.in_registers,
        "ffn_at_once": warps.ffn.at_once,
        "held_on_chip": int(warps.residual.home is Home.SHARED),
        "hidden_in_quads": int(warps.residual.home is Home.BY_FOURS),
        "parts_together": warps.parts_together(portions, coded=plan.coded),
    }
    kinds = {stage.kind for stage in plan.stages}
    used = (n for n, its in plan.kinds_by_input.items() if n in ALWAYS or kinds & set(its))
    for name in used:
        team, prefetch = warps.teams[name], warps.prefetch[name]
        sizes |= {
            f"{name}_cols": team.cols,
            f"{name}_tile": team.tile,
            f"{name}_vector": team.vector,
            f"{name}_team": team.size,
            f"{name}_ahead_chunks": prefetch.portions,
            f"{name}_ahead_groups": prefetch.groups,
        }
    return sizes


def _prompt_sizes(schedule: Schedule, prompt: Prompt) -> dict[str, int]:
    plan, passes = schedule.plan, schedule.passes
    return {
        "prompt_chunk": plan.options.prompt_chunk if plan.spec else 1,
        "prompt_floats": prompt.floats,
        "prompt_residual": prompt.residual,
        "prompt_normed": prompt.normed,
        "prompt_stages": prompt.stages,
        "prompt_chip_floats": prompt.chip_floats,
        "prompt_bytes": chip_bytes(plan) if plan.limits.teams else 0,
        "prompt_queries": prompt.queries,
        "prompt_decoded": prompt.decoded,
        "prompt_normed_floats": prompt.normed_floats,
        "prompt_summed_floats": prompt.summed_floats,
        "prompt_choices": prompt.choices,
        "prompt_router": prompt.router,
        "prompt_entries": prompt.entries,
        "prompt_order": prompt.order,
        "prompt_lot": passes.batch if passes else 0,
        "prompt_owners": passes.owners if passes else 1,
        "tensor_pass": int(passes is not None and passes.tensor),
    }


def input_floats(schedule: Schedule) -> int:
    """The vector that a stage computes with: a matrix's input, or what a probe gathers."""
    plan = schedule.plan
    wanted = [matrix.cols for matrix in schedule.matrices if matrix]
    wanted += [
        2 * sum(plan.values[r.value].elements for r in s.reads)
        for s in plan.stages
        if s.kind is StageKind.EXCHANGE
    ]
    return up(max([plan.shard.hidden, 1, *wanted]), LINE_FLOATS)


def _stages_floats(schedule: Schedule, half: int) -> int:
    """What a stage needs besides its input: gathered q, k, v; partials of heads; sums of rows; the
    sampler's sums.
    """
    plan, warps = schedule.plan, schedule.warps
    wanted = [1024, 2 * half + (warps.residual.exchange_floats if warps else 0)]
    scanned = schedule.scan.partials if warps else MOST_WARPS
    widths: dict[int, int] = {}  # of spans by identity: layers that are alike share theirs
    for stage in plan.stages:
        if stage.kind is StageKind.ATTENTION:
            own = plan.kernel_attention()
            partials = max(scanned, own.group)
            merge = up(partials * (own.head_dim + PARTIAL_EXTRA), VECTOR_FLOATS)
            heads = (own.group + 2) * own.head_dim  # without reads, one constant head
            for read in stage.reads:
                if id(read.spans) not in widths:
                    widths[id(read.spans)] = max(
                        sum(hi - lo for lo, hi in spans) for spans in read.spans
                    )
            gathered = max([heads, *(widths[id(read.spans)] for read in stage.reads)])
            # behind them the sinks of their queries
            sinks = gathered // heads * own.group if "sinks" in stage_extras(plan) else 0
            wanted.append(merge + gathered + sinks)
        if stage.kind is StageKind.O_PROJ:
            wanted.append(_shared_floats(schedule))
        if stage.kind is StageKind.DELTA:
            wanted.append(recurrent.scratch_floats(plan, stage))
        if stage.kind is StageKind.SAMPLE and plan.options.sampling is Sampling.FULL:
            wanted += _sampler_floats(plan, half)
        if stage.kind is StageKind.EMBED and stage.reads:
            wanted.append(LINE_FLOATS)
        if stage.kind is StageKind.LANE_MEAN and stage.publishes is not None:
            wanted += [hi - lo for lo, hi in plan.values[stage.publishes].owned]
        if stage.kind is StageKind.ROUTE:
            wanted += [
                sum(
                    plan.values[read.value].elements
                    * (plan.ranks if read.parts is Parts.ALL else 1)
                    for read in stage.reads
                ),
                experts.contest_floats(plan),
            ]
        if stage.late:
            wanted += [hi - lo for read in stage.reads for spans in read.spans for lo, hi in spans]
    return up(max(wanted), LINE_FLOATS)


def _shared_floats(schedule: Schedule) -> int:
    """NVIDIA: where threads that hold the same columns meet when they have combined attention's
    splits (combine.cuh).
    """
    if schedule.warps is None:
        return 0
    team, head = schedule.warps.teams["heads"], schedule.plan.kernel_attention().head_dim
    if team.groups == 1:
        return 0
    pack = min(team.vector, HEAD_PACK) if head % team.vector == 0 else NARROW_PACK
    record = team.vector // pack * (pack + PARTIAL_EXTRA)
    return team.groups * record * team.slices * team.size * WARP


def _held_floats(schedule: Schedule) -> int:
    warps = schedule.warps
    if warps is None or warps.residual.home is not Home.SHARED:
        return 0
    team = warps.teams["hidden"]
    return team.portions * team.vector * team.warps * WARP


def _whole_floats(schedule: Schedule, units: int) -> int:
    """NVIDIA: the widest input of a matrix that tensor cores multiply as whole numbers, and zeros
    for what a tile's last columns lack; or what of one is too wide for registers.
    """
    warps = schedule.warps
    if warps is None:
        return 0
    # two bytes of each element, a scale of each unit; a load of zeros
    tensor = units * (2 * PACK // 4 + 1) + UNIT_BYTES // 4 if units else 0
    wide = _wide_units(schedule.plan, warps) * (2 * PACK // 4 + 2)  # a scale and a sum of each unit
    return up(max(tensor, wide, _beside_registers(warps)), LINE_FLOATS)


def _beside_registers(warps: WarpSchedule) -> int:
    """Elements of a feed-forward's input for which threads have no registers: of whole slices."""
    team = warps.teams["ffn"]
    return (team.portions - warps.ffn.in_registers) * team.vector * team.warps * WARP


def _wide_units(plan: Plan, warps: WarpSchedule) -> int:
    """Of PACK elements, that a feed-forward's input has on the chip: a thread's parts of all
    slices, those of threads without columns too. None where tensor cores have theirs.
    """
    if not warps.ffn.in_memory:
        return 0
    kinds = plan.kinds_by_input["ffn"]
    ffn = (s.matrix for s in plan.stages if s.matrix and s.kind in kinds)
    if any(map(tensor_products, ffn)):
        return 0
    team = warps.teams["ffn"]
    return team.portions * team.warps * WARP


def _whole_units(schedule: Schedule) -> int:
    """Of PACK elements, that an input of tensor cores has, with those that fill the last load of
    their scales: zeros follow, and a load of them is aligned.
    """
    if schedule.warps is None:
        return 0
    wide = [-(-m.cols // PACK) for m in schedule.matrices if m and tensor_products(m)]
    return up(max(wide, default=0), UNIT_BYTES // 4)


def _sampler_floats(plan: Plan, half: int) -> tuple[int, int]:
    """What the full sampler needs: of every block behind its head, and of the block that draws."""
    items, buckets = plan.ranks * plan.blocks, LEVEL_FLOATS * SAMPLE_BUCKETS
    # a probe's logits lie on its shelf
    rows = shelf_rows(plan) if plan.spec else 0
    held = SAMPLE_HELD + -(-SAMPLE_HELD // 2)  # and the share of each
    looked_at = max(PROBED_FLOATS + held, 2 * items)
    return (
        max(2 * half, MEETING_FLOATS + buckets) + rows,
        MEETING_FLOATS + SHARE_FLOATS * items + looked_at,
    )


def shelf_rows(plan: Plan) -> int:
    """Logits of a block, at most."""
    return up(-(-plan.shard.vocab // plan.blocks), 4)


def shelves_floats(plan: Plan) -> int:
    """What the blocks of a rank make of their logits for the full sampler, in two steps."""
    if plan.options.sampling is not Sampling.FULL:
        return 0
    return 2 * plan.blocks * _shelf_floats(plan)


def _shelf_floats(plan: Plan) -> int:
    """What one block makes of its logits (shelf.cuh)."""
    return SHELF_FIRST + LEVEL_FLOATS * SAMPLE_BUCKETS + 2 * shelf_rows(plan)


def _choice_floats(plan: Plan) -> int:
    if not plan.kernel_routed:
        return 0
    top_k = max(stage.routed.top_k for stage in plan.stages if stage.routed)
    return up(experts.CHOICE_WORDS * top_k + experts.COUNTS, LINE_FLOATS)


def _kept_floats(plan: Plan) -> int:
    kept = [m.owned for s in plan.stages if s.kept and plan.kernel_routed for m in s.matrices]
    rows = max((hi - lo for owned in kept for lo, hi in owned), default=-experts.KEPT_FIRST)
    return up(experts.KEPT_FIRST + rows, LINE_FLOATS)


def _half_floats(schedule: Schedule) -> int:
    """Partial sums of one batch of rows."""
    sums = [matrix.sums_floats for matrix in schedule.matrices if matrix]
    return up(max([0, *sums]), LINE_FLOATS)
