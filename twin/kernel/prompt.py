"""Where the tokens of a prompt pass keep their numbers, and what a block needs for them.
How blocks make a pass: twin/schedule/passes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin.errors import PlanError
from twin.kernel.fields import up
from twin.models.feeds import ExpertFeed
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import ROWS
from twin.plan.types import MOST_WARPS, PARTIAL_EXTRA, Attention, Plan, Stage, StageKind
from twin.schedule.block import TEAM_WARPS
from twin.schedule.passes import SCAN_ROWS, Passes, scan_positions, tensor_heads
from twin.schedule.splits import KEPT_HEAD
from twin.schedule.types import Schedule

LINE_FLOATS = 32  # rows of different values never share a 128-byte line
TOKENS = 16  # of a pass on a CPU
# between the keys and values of neighbouring positions on the chip, without tensor cores
PITCH_BYTES = 64
TILE_BYTES = 64  # of a column of a tile of cached keys: 32 positions of 16 bits
TILES = 4  # on the chip
MOST_STEPS = 24  # of a product on the chip
ALIGNED_BYTES = 1024  # of eight rows of a step
ROOM_BYTES = 192 << 10  # of steps: four of 256 weight rows and 128 tokens
BEGINS_BYTES = 8 << 10  # where a thread's rows begin
ROWS_BYTES = 256  # and whose rows they are
SCAN_TILES = 4  # on the chip: one in use, the others under way
CHUNKS = (16, 32, 64, 128, 256, 512, 1024)  # tokens of a pass
SMALL_CHUNKS = (16, 32, 64)  # where attention keeps the chunk's keys on the chip


@dataclass(frozen=True, slots=True)
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
    # NVIDIA, few-bit weights: where decoded rows lie; a block's of a stage that multiplies the
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


def prompt_of(schedule: Schedule) -> Prompt:
    """Sizes and offsets of a plan."""
    plan, passes = schedule.plan, schedule.passes
    if passes is None:
        return Prompt(values=(-1,) * len(plan.values))
    columns = {"residual": plan.shard.hidden, "normed": plan.shard.hidden}
    if passes.tensor:
        own = plan.kernel_attention()
        columns["queries"] = own.heads * own.head_dim
    feed = experts_of(plan)
    if feed:
        columns |= {"choices": 2 * feed.top_k, "entries": feed.top_k * plan.shard.hidden}
    names = [_row(plan, plan.stages[value.stage]) for value in plan.values]
    columns |= {name: width for name, width in names if name}
    at, offsets = 0, {"": -1}
    for name, width in columns.items():
        offsets[name] = at
        at += passes.chunk * up(width, LINE_FLOATS)
    router = at
    at += router_floats(plan)
    decoded, (normed, summed) = at, decoded_floats(plan, passes)
    at += plan.blocks * (normed + summed)
    end = max(one.stage.index for one in passes.stages) + 1
    chip, order = _chip_floats(plan)
    values = tuple(offsets[name] for name, _ in names)
    return Prompt(
        at,
        offsets["residual"],
        offsets["normed"],
        offsets.get("queries", 0),
        values,
        end,
        chip,
        decoded,
        normed,
        summed,
        offsets.get("choices", 0),
        router,
        offsets.get("entries", 0),
        order,
    )


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
    feed = experts_of(plan)
    if feed:
        used.append(routing_floats(feed, plan.shard.hidden, MOST_WARPS))
    order = up(max(used), LINE_FLOATS)
    return order + (up(feed.experts + 1 + chunk * feed.top_k, LINE_FLOATS) if feed else 0), order


# ---- experts -------------------------------------------------------------------------------------


def experts_of(plan: Plan) -> ExpertFeed | None:
    """The experts of a plan that the kernel runs."""
    return plan.spec.experts if plan.spec and plan.kernel_routed else None


def routing_floats(feed: ExpertFeed, hidden: int, warps: int) -> int:
    """What a block needs on the chip while it chooses experts: a token of each warp; `Routing` in
    native/monokernel/prompt_experts.cuh.
    """
    return LINE_FLOATS + warps * (hidden + feed.experts + 2 * feed.top_k)


def routed_chip_bytes(feed: ExpertFeed | None, chunk: int) -> int:
    """NVIDIA: 16-bit entries sorted by expert, and where each expert's begin; ChunkShared in
    cuda_prompt.cuh.
    """
    return up(2 * chunk * feed.top_k + 4 * (feed.experts + 1), 16) if feed else 0


def router_floats(plan: Plan) -> int:
    """A rank's rows of a layer's router."""
    if not plan.kernel_routed:
        return 0
    routers = (s.matrix for s in plan.stages if s.kind is StageKind.ROUTER)
    rows = max((matrix.rows for matrix in routers if matrix), default=0)
    return up(rows * plan.shard.hidden * plan.options.weight_dtype.bytes // 4, LINE_FLOATS)


def routed_bytes(plan: Plan) -> int:
    """What experts take of a GPU's memory during passes, beside what they decode."""
    feed = experts_of(plan)
    if feed is None or plan.options.prompt_chunk == 1:
        return 0
    widest = max(
        width
        for name, width in (_row(plan, plan.stages[v.stage]) for v in plan.values)
        if name == "routed_up"
    )
    columns = sum(up(c, LINE_FLOATS) for c in (2 * feed.top_k, feed.top_k * plan.shard.hidden))
    tokens = plan.options.prompt_chunk * (columns + up(widest, LINE_FLOATS))
    return 4 * plan.ranks_per_gpu * (tokens + router_floats(plan))


# ---- decoded rows --------------------------------------------------------------------------------


def decoded_floats(plan: Plan, passes: Passes) -> tuple[int, int]:
    """Floats in which one block keeps a stage's decoded rows: of stages that multiply the normed
    residual, and of those whose output is added to it. Both are zero where nothing is decoded
    before it is multiplied: on a CPU, and of a plan whose weights are not coded.

    A block's lot of an expert lies where rows of the first kind do: no neighbour reads it.
    """
    if not plan.coded or not plan.limits.teams:
        return 0, 0
    size = plan.options.weight_dtype.bytes
    widest = [0, 0]
    for one in passes.stages:
        if one.multiplied:
            kind = int(ROWS[one.stage.kind].summed and not one.stage.routed)
            floats = up(one.rows * one.multiplied.cols * size // 4, LINE_FLOATS)
            widest[kind] = max(widest[kind], floats)
    return widest[0], widest[1]


def decoded_bytes(schedule: Schedule) -> int:
    """What decoded rows take of a GPU's memory during passes."""
    plan, passes = schedule.plan, schedule.passes
    floats = sum(decoded_floats(plan, passes)) if passes else 0
    return 4 * plan.ranks_per_gpu * plan.blocks * floats


def _row(plan: Plan, made: Stage) -> tuple[str, int]:
    """(name, columns) of what a stage publishes in a pass; a collective, or a sum of late parts,
    what it reads.

    Partial sums are read by other ranks up to `delay` layers later, before the barrier behind the
    next layer's norm.
    """
    match made.kind:
        case StageKind.COLLECTIVE | StageKind.REDUCE:
            return _row(plan, plan.stages[plan.values[made.reads[0].value].stage])
        case StageKind.QKV | StageKind.GATE_UP:
            assert made.matrix is not None
            return made.kind.value, made.matrix.rows // made.matrix.unit
        case StageKind.ATTENTION:
            own = plan.kernel_attention()
            return made.kind.value, own.heads * own.head_dim
        case StageKind.ROUTED_UP:
            assert made.matrix is not None
            assert made.routed is not None
            # rows of entries: whole lines each, as the columns of other values
            width = up(made.matrix.rows // made.matrix.unit, LINE_FLOATS)
            return made.kind.value, made.routed.top_k * width
        case StageKind.O_PROJ | StageKind.DOWN | StageKind.ROUTED_DOWN:
            return (
                f"{made.kind.value}.{made.layer % (1 + (plan.options.delay or 0))}",
                plan.shard.hidden,
            )
        case _:
            return "", 0


def attention_bytes(own: Attention, *, chunk: int, blocks: int, kv_bytes: int) -> int:
    """On the chip: a block's keys, values and queries, FP32; angles; the chunk's keys and values as
    cached; earlier ones; partials.

    Attending in native/monokernel/prompt_attention.cuh asserts that it divides the same. `blocks`
    of a rank; `kv_bytes` of a cached number.
    """
    queries = min(chunk, -(-own.kv_heads * chunk // blocks)) * own.group
    heads = up((2 * chunk + queries) * own.head_dim, LINE_FLOATS)
    turns = up(chunk * own.head_dim, LINE_FLOATS)
    pitch = 2 * own.head_dim * kv_bytes + PITCH_BYTES
    fresh = up(chunk * pitch // 4, LINE_FLOATS)
    tiles = up(TILES * (TILE_BYTES // kv_bytes) * pitch // 4, LINE_FLOATS)
    return 4 * (
        heads
        + turns
        + fresh
        + tiles
        + up(max(MOST_WARPS, own.group) * (own.head_dim + PARTIAL_EXTRA), LINE_FLOATS)
    )


def chip_bytes(plan: Plan) -> int:
    """Shared memory of an NVIDIA block's passes; none without passes."""
    options = plan.options
    if options.prompt_chunk == 1 or plan.spec is None:
        return 0
    return pass_bytes(
        plan.spec,
        plan.kernel_attention(),
        chunk=options.prompt_chunk,
        blocks=plan.blocks,
        dtype=options.weight_dtype,
        kv_bytes=options.kv_dtype.bytes,
    )


def pass_bytes(
    spec: ModelSpec, own: Attention, *, chunk: int, blocks: int, dtype: DType, kv_bytes: int
) -> int:
    """What attention needs, or products, or a choice of experts. `blocks` of a rank; `kv_bytes` of
    a cached number.
    """
    if tensor_heads(own, kv_bytes):
        # PassScan::bytes in cuda_attend.cuh
        kept = own.head_dim <= KEPT_HEAD
        rows = SCAN_TILES * 2 * scan_positions(own.head_dim) + (0 if kept else SCAN_ROWS)
        attention = rows * (own.head_dim * kv_bytes + 16)
    else:
        attention = attention_bytes(own, chunk=chunk, blocks=blocks, kv_bytes=kv_bytes)
    products = ALIGNED_BYTES + ROOM_BYTES + BEGINS_BYTES if dtype is not DType.FP32 else 0
    feed = spec.experts
    routing = 4 * routing_floats(feed, spec.hidden, TEAM_WARPS) if feed else 0
    most = max(products, up(attention, 256), up(routing, 256))
    return most + ROWS_BYTES + routed_chip_bytes(feed, chunk)


def fitting_chunk(
    spec: ModelSpec, own: Attention, *, blocks: int, room: int, dtype: DType, kv_bytes: int
) -> int:
    """The most tokens a pass that fit `room` bytes of a block's shared memory, else 1: blocks with
    less of it than a Hopper's read prompts by ordinary steps.
    """
    chunks = possible_chunks(spec, own, dtype, kv_bytes)
    fitting = (
        c
        for c in chunks
        if pass_bytes(spec, own, chunk=c, blocks=blocks, dtype=dtype, kv_bytes=kv_bytes) <= room
    )
    return max(fitting, default=1)


def possible_chunks(
    spec: ModelSpec, own: Attention, dtype: DType, kv_bytes: int
) -> tuple[int, ...]:
    """Tokens of a pass that an NVIDIA GPU can make: experts are for tensor cores alone."""
    if spec.experts and dtype is DType.FP32:
        return ()
    return CHUNKS if tensor_heads(own, kv_bytes) and dtype is not DType.FP32 else SMALL_CHUNKS


def check_tensor_cores(plan: Plan) -> None:
    """Raises PlanError for passes that an NVIDIA GPU cannot make."""
    options = plan.options
    if options.prompt_chunk == 1:
        return
    assert plan.spec is not None
    chunks = possible_chunks(
        plan.spec, plan.kernel_attention(), options.weight_dtype, options.kv_dtype.bytes
    )
    if not chunks:
        raise PlanError(
            f"prompt_chunk={options.prompt_chunk}: passes multiply experts of 16 bits or fewer; "
            f"use prompt_chunk=1 with {options.weight_dtype.value}"
        )
    if options.prompt_chunk not in chunks:
        allowed = ", ".join(map(str, chunks))
        raise PlanError(
            f"prompt_chunk={options.prompt_chunk}: a pass of this plan takes {allowed} tokens; "
            "use one of them, or 1"
        )
