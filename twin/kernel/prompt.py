"""Where the tokens of a prompt pass keep their numbers. How blocks make a pass:
twin/schedule/passes.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from twin.frozen import frozen
from twin.models.feeds import ExpertFeed
from twin.plan.catalogue import ROWS
from twin.plan.types import MOST_WARPS, Plan, Stage, StageKind
from twin.schedule.block import LINE_FLOATS, up
from twin.schedule.pass_memory import attention_bytes, routing_floats
from twin.schedule.passes import Passes
from twin.schedule.types import Schedule


@frozen(kw_only=True)
class Prompt:
    """A rank's memory for one chunk, in floats: rows of `prompt_chunk` tokens. All zero without
    passes.
    """

    floats: int = 0
    residual: int = 0  # [tokens][hidden] FP32
    normed: int = 0  # [tokens][hidden], the input of QKV and GATE_UP, as the platform multiplies it
    queries: int = 0  # [tokens][heads][head_dim] 16-bit, where attention runs on tensor cores
    # by value: QKV and partial sums in FP32, attention and GATE_UP as inputs; -1: not in a pass
    values: tuple[int, ...] = ()
    stages: int = 0  # a pass ends before this stage
    chip_floats: int = 0  # of a block
    # NVIDIA, low-bit weights: where decoded rows lie; a block's of a stage that multiplies the
    # normed residual, and of one whose output is added to it
    decoded: int = 0
    normed_floats: int = 0
    summed_floats: int = 0
    # experts: of each token, [experts, weights][top_k]; a layer's router, [rows][hidden] of the
    # weight type; what each entry's down projection makes, [tokens][top_k][hidden] FP32
    choices: int = 0
    router: int = 0
    entries: int = 0
    order: int = 0  # a CPU's, in a block's scratch: entries sorted by expert
    # of a GPU's memory during passes: decoded rows, and what experts take besides
    decoded_bytes: int = 0
    routed_bytes: int = 0

    @property
    def gpu_bytes(self) -> int:
        """Of a GPU's memory, besides what the plan counts: where passes decode weights, and what
        they keep of experts.
        """
        return self.decoded_bytes + self.routed_bytes


def prompt_of(schedule: Schedule) -> Prompt:
    """Sizes and offsets of a plan."""
    plan, passes = schedule.plan, schedule.passes
    if passes is None:
        return Prompt(values=(-1,) * len(plan.values))
    columns = {"residual": plan.shard.hidden, "normed": plan.shard.hidden}
    if passes.tensor:
        own = plan.kernel_attention()
        columns["queries"] = own.heads * own.head_dim
    feed = plan.kernel_experts
    if feed:
        columns |= {"choices": 2 * feed.top_k, "entries": feed.top_k * plan.shard.hidden}
    names = [_row(plan, plan.stages[value.stage]) for value in plan.values]
    columns |= {name: width for name, width in names if name}
    at, offsets = 0, {"": -1}
    for name, width in columns.items():
        offsets[name] = at
        at += passes.chunk * up(width, LINE_FLOATS)
    routers = 0
    if plan.kernel_routed:
        rows = (s.matrix.rows for s in plan.stages if s.matrix and s.kind is StageKind.ROUTER)
        size = plan.shard.hidden * plan.options.weight_dtype.bytes
        routers = up(max(rows, default=0) * size // 4, LINE_FLOATS)
    router, decoded = at, at + routers
    normed, summed = _decoded_floats(plan, passes)
    chip, order = _chip_floats(plan, feed)
    return Prompt(
        floats=decoded + plan.blocks * (normed + summed),
        residual=offsets["residual"],
        normed=offsets["normed"],
        queries=offsets.get("queries", 0),
        values=tuple(offsets[name] for name, _ in names),
        stages=max(one.stage.index for one in passes.stages) + 1,
        chip_floats=chip,
        decoded=decoded,
        normed_floats=normed,
        summed_floats=summed,
        choices=offsets.get("choices", 0),
        router=router,
        entries=offsets.get("entries", 0),
        order=order,
        decoded_bytes=4 * plan.ranks_per_gpu * plan.blocks * (normed + summed),
        routed_bytes=4 * plan.ranks_per_gpu * (_routed_floats(columns, passes.chunk) + routers),
    )


def _routed_floats(columns: Mapping[str, int], chunk: int) -> int:
    """Of a chunk's tokens, what only experts have; `columns` of each value by name."""
    own = (columns.get(name, 0) for name in ("choices", "entries", StageKind.ROUTED_UP.value))
    return chunk * sum(up(width, LINE_FLOATS) for width in own)


def _chip_floats(plan: Plan, feed: ExpertFeed | None) -> tuple[int, int]:
    """(floats of a block, where among them entries lie that are sorted by expert)."""
    options, chunk = plan.options, plan.options.prompt_chunk
    attention = attention_bytes(
        plan.kernel_attention(), chunk=chunk, blocks=plan.blocks, kv_bytes=options.kv_dtype.bytes
    )
    used = [
        attention // 4,
        MOST_WARPS * (chunk + 1) * max(s.matrix.tile_rows for s in plan.stages if s.matrix),
    ]
    if feed:
        used.append(routing_floats(feed, plan.shard.hidden, MOST_WARPS))
    order = up(max(used), LINE_FLOATS)
    return order + (up(feed.experts + 1 + chunk * feed.top_k, LINE_FLOATS) if feed else 0), order


# ---- decoded rows --------------------------------------------------------------------------------


def _decoded_floats(plan: Plan, passes: Passes) -> tuple[int, int]:
    """Floats in which one block keeps a stage's decoded rows: of stages that multiply the normed
    residual, and of those whose output is added to it. Both are zero where nothing is decoded
    before it is multiplied: on a CPU, and of a plan whose weights are not coded.

    A block's batch of an expert's rows lies where rows of the first kind do: no neighbour reads it.
    """
    if not plan.coded or not passes.decodes:
        return 0, 0
    size = plan.options.weight_dtype.bytes
    widest = [0, 0]
    for one in passes.stages:
        if one.multiplied:
            kind = int(ROWS[one.stage.kind].summed and not one.stage.routed)
            floats = up(one.rows * one.multiplied.cols * size // 4, LINE_FLOATS)
            widest[kind] = max(widest[kind], floats)
    return widest[0], widest[1]


def _row(plan: Plan, made: Stage) -> tuple[str, int]:
    """(name, columns) of what a stage publishes in a pass; a collective, or a sum of late parts,
    what it reads.

    Partial sums are read by other ranks up to `delay` layers later, before the barrier behind the
    next layer's norm.
    """
    match made.kind:
        case StageKind.COLLECTIVE | StageKind.REDUCE:
            return _row(plan, plan.stages[plan.values[made.reads[0].value].stage])
        case StageKind.ATTENTION:
            own = plan.kernel_attention()
            return made.kind.value, own.heads * own.head_dim
        case StageKind.ROUTED_UP:
            assert made.matrix is not None
            assert made.routed is not None
            # rows of entries: whole lines each, as the columns of other values
            width = up(made.matrix.rows // made.matrix.unit, LINE_FLOATS)
            return made.kind.value, made.routed.top_k * width
        case kind if ROWS[kind].summed:
            return f"{kind.value}.{made.layer % (1 + (plan.options.delay or 0))}", plan.shard.hidden
        case StageKind.ROUTER | StageKind.LM_HEAD:  # logits are each block's own
            return "", 0
        case kind if made.matrix:
            return kind.value, made.matrix.rows // made.matrix.unit
        case _:
            return "", 0
