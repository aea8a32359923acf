"""Where the tokens of a prompt pass keep their numbers. How blocks make a pass:
twin/schedule/passes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from twin.frozen import frozen
from twin.kernel.draft_head import draft_sizes
from twin.models.mixers import Mamba2
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.matrix import MOST_WARPS
from twin.plan.types import Plan, Stage
from twin.schedule.block import LINE_FLOATS, up
from twin.schedule.memory import SUMMARY_FLOATS
from twin.schedule.pass_memory import FEW_TOKENS, STATE_TOKENS, attention_bytes, routing_floats
from twin.schedule.passes import Passes, eight_bits
from twin.schedule.types import Schedule

# What few models have, FP32: of a mixer that carries a state, rows of its matrix or outputs of its
# states; what is solved for before states are carried on (`Solved` in cuda_delta.cuh); what shared
# experts make, [tokens][hidden]
OTHER_COLUMNS = ("mixed", "solved", "shared")
CANDIDATE_FLOATS = 2  # a logit and its token
ROUND_FIRST = 2  # words of a round before its tokens: how many they are, the first one's position
# what blocks hand on one by one, of each token: INPUTS residuals in turn, normed but for a factor,
# of 16 bits, then each block's squares of them, then as they are; rows of QKV, FP32; what down and
# output projections multiply
HANDED, INPUTS = ("inputs", "heads", "fed", "outputs"), 4
ROUND_PARTS = ("logits", "best", "round", "drawn", "history", "parts", *HANDED)
PART_ENDS = (
    4  # floats behind a part of a head's outputs: its maximum, its sum, a filled-up 16 bytes
)


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
    # experts: of each token, [experts, weights][visited] and the gate of shared ones; a layer's
    # router, [rows][hidden] of the weight type; what each entry's down projection makes,
    # [tokens][visited][hidden] FP32
    choices: int = 0
    router: int = 0
    entries: int = 0
    order: int = 0  # a CPU's, in a block's scratch: entries sorted by expert
    # drafts: a round's logits, [tokens][rows of the LM head] FP32; each block's best one of each
    # token, [tokens][blocks][logit, token]; what the next round multiplies: tokens, the position of
    # the first, the tokens; those that were drawn, and whether another one is; all tokens so far,
    # [max_context]; on tensor cores what splits of the
    # cache make, [kv heads][splits][tokens][query heads of one][head_dim, PART_ENDS]
    rounds: Mapping[str, int] = field(default_factory=dict)
    # of a head that drafts: its shape, and where its weights and numbers lie, as draft_head.py says
    head: Mapping[str, int] = field(default_factory=dict)
    head_bytes: int = 0
    round_stages: int = 0  # a pass that verifies drafts ends before this stage
    # of OTHER_COLUMNS that a plan has
    others: Mapping[str, int] = field(default_factory=dict)
    # of a GPU's memory during passes: decoded rows, and what experts and OTHER_COLUMNS take besides
    decoded_bytes: int = 0
    routed_bytes: int = 0
    other_bytes: int = 0

    @property
    def gpu_bytes(self) -> int:
        """Of a GPU's memory, besides what the plan counts: where passes decode weights, and what
        they keep of experts and of mixers that carry a state.
        """
        return self.decoded_bytes + self.routed_bytes + self.other_bytes + self.head_bytes


def prompt_of(schedule: Schedule) -> Prompt:
    """Sizes and offsets of a plan."""
    plan, passes = schedule.plan, schedule.passes
    if passes is None:
        return Prompt(values=(-1,) * len(plan.values))
    columns = {"residual": plan.shard.hidden, "normed": plan.shard.hidden}
    if passes.tensor:
        own = plan.kernel_attention()
        columns["queries"] = own.heads * own.head_dim
    if plan.visited:
        visited = plan.visited.top_k
        columns |= {"choices": 2 * visited + 1, "entries": visited * plan.shard.hidden}
    columns |= _other_columns(plan, passes)
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
    behind = decoded + plan.blocks * (normed + summed)
    rounds, after = _rounds(plan, passes, behind)
    head, floats = draft_sizes(plan, passes, after)
    chip, order = _chip_floats(plan)
    others = {name: offsets[name] for name in OTHER_COLUMNS if name in offsets}
    return Prompt(
        floats=floats,
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
        others=others,
        rounds=rounds,
        head=head,
        head_bytes=4 * (floats - after),
        round_stages=max((one.stage.index + 1 for one in passes.rounds), default=0),
        other_bytes=4 * plan.ranks_per_gpu * _floats(columns, others, passes.chunk),
        decoded_bytes=4 * plan.ranks_per_gpu * plan.blocks * (normed + summed),
        routed_bytes=4 * plan.ranks_per_gpu * (_routed_floats(columns, passes.chunk) + routers),
    )


def _rounds(plan: Plan, passes: Passes, at: int) -> tuple[dict[str, int], int]:
    """(where what only rounds of drafts have lies, from float `at` on; where it ends)."""
    if not passes.rounds:
        return {}, at
    tokens, head = plan.options.lookup + 1, passes.rounds[-1].stage.matrix
    assert head is not None
    each = {
        "logits": tokens * up(head.rows, LINE_FLOATS),
        # or of one token the sampler's summaries
        "best": plan.blocks * max(tokens * CANDIDATE_FLOATS, SUMMARY_FLOATS),
        "round": ROUND_FIRST + tokens,
        "drawn": tokens + 1,
        "history": plan.options.max_context,
    }
    if passes.tensor:
        own = plan.kernel_attention()
        rows = own.kv_heads * passes.round_splits * tokens * own.group
        each["parts"] = rows * (own.head_dim + PART_ENDS)
    if passes.handed_on:
        each |= _handed(plan, passes)
    found = {}
    for name, floats in each.items():
        found[name] = at
        at += up(floats, LINE_FLOATS)
    return found, at


def _handed(plan: Plan, passes: Passes) -> dict[str, int]:
    """Floats of HANDED."""
    rows = {one.stage.kind: one.stage.matrix for one in passes.rounds if one.stage.matrix}
    feed, own = rows[StageKind.GATE_UP], plan.kernel_attention()
    return {
        "inputs": INPUTS * FEW_TOKENS * (plan.shard.hidden // 2 + plan.blocks + plan.shard.hidden),
        "heads": FEW_TOKENS * rows[StageKind.QKV].rows,
        "fed": FEW_TOKENS * feed.rows // feed.unit // 2,
        "outputs": FEW_TOKENS * own.heads * own.head_dim // 2,
    }


def _routed_floats(columns: Mapping[str, int], chunk: int) -> int:
    """Of a chunk's tokens, what only experts have; `columns` of each value by name."""
    return _floats(columns, ("choices", "entries", StageKind.ROUTED_UP.value), chunk)


def _floats(columns: Mapping[str, int], names: Iterable[str], chunk: int) -> int:
    return chunk * sum(up(columns.get(name, 0), LINE_FLOATS) for name in names)


def _other_columns(plan: Plan, passes: Passes) -> dict[str, int]:
    """OTHER_COLUMNS that a plan has, and their floats a token."""
    found: dict[str, int] = {}
    for stage in plan.convolving_stages:
        assert stage.matrix is not None
        found["mixed"] = stage.matrix.rows
    kind = plan.spec.recurrence if plan.spec else None
    if plan.delta_stages and kind:
        heads = kind.value_heads // plan.ranks
        found["mixed"] = heads * kind.value_dim
        if passes.decodes:
            keys = kind.key_heads // plan.ranks * kind.key_dim
            each = STATE_TOKENS + (2 if isinstance(kind, Mamba2) else kind.key_dim + 1)
            found["solved"] = 2 * keys + heads * each
    if any(stage.kind is StageKind.SHARED_DOWN for stage in plan.stages):
        found["shared"] = plan.shard.hidden
    return found


def _chip_floats(plan: Plan) -> tuple[int, int]:
    """(floats of a block, where among them entries lie that are sorted by expert)."""
    options, chunk = plan.options, plan.options.prompt_chunk
    attention = attention_bytes(
        plan.kernel_attention(), chunk=chunk, blocks=plan.blocks, kv_bytes=options.kv_dtype.bytes
    )
    used = [
        attention // 4,
        MOST_WARPS * (chunk + 1) * max(s.matrix.tile_rows for s in plan.stages if s.matrix),
    ]
    feed, visited = plan.kernel_experts, plan.visited
    if feed and visited:
        hidden, always = plan.shard.hidden, visited.always
        used.append(routing_floats(feed, hidden, warps=MOST_WARPS, always=always))
    order = up(max(used), LINE_FLOATS)
    sorted_floats = visited.total + 1 + chunk * visited.top_k if visited else 0
    return order + up(sorted_floats, LINE_FLOATS), order


# ---- decoded rows --------------------------------------------------------------------------------

# Stages whose rows lie there: those whose output is added to the residual, and those that decode
# theirs while a neighbour may still read what lies in the first place (Chunk::decoded in
# cuda_prompt.cuh).
SECOND_PLACE = (
    StageKind.O_PROJ,
    StageKind.DOWN,
    StageKind.DELTA_GATES,
    StageKind.SHARED_DOWN,
)


def _decoded_floats(plan: Plan, passes: Passes) -> tuple[int, int]:
    """Floats in which one block keeps a stage's decoded rows: of stages in the first place, and of
    those in the second. Both are zero where nothing is decoded
    before it is multiplied: on a CPU, and of a plan whose weights are not coded.

    A block's batch of an expert's rows lies where rows of the first kind do: no neighbour reads it.
    """
    if not plan.coded or not passes.decodes:
        return 0, 0
    size = plan.options.weight_dtype.bytes
    widest = [0, 0]
    for one in passes.stages:
        in_steps = one.stage.routed is not None and eight_bits(plan)  # in shared memory
        if one.multiplied and not in_steps:
            kind = int(one.stage.kind in SECOND_PLACE)
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
        case StageKind.DELTA:
            assert made.scan is not None
            return made.kind.value, made.scan.heads * made.scan.entries
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
