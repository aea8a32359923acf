"""Prompt passes: where the tokens of a chunk keep their numbers, and what a block needs for them.

A pass reads the weights of all layers once for up to `prompt_chunk` tokens, to fill the key-value
cache. The last token of a prompt is an ordinary step, so a pass needs neither the LM head nor what
follows the last layer's keys and values. Between stages all blocks of all ranks meet at a full
barrier, so its numbers need neither flags nor resets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from twin.errors import PlanError
from twin.kernel.coded import stored_bytes
from twin.kernel.experts import has_experts
from twin.kernel.fields import up
from twin.models.feeds import ExpertFeed
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import ROWS
from twin.plan.partition import TEAM_WARPS
from twin.plan.splits import KEPT_HEAD
from twin.plan.types import MOST_WARPS, PARTIAL_EXTRA, Attention, Plan, Routed, Stage, StageKind

LINE_FLOATS = 32  # rows of different values never share a 128-byte line
TOKENS = 16  # of a pass on a CPU
# between the keys and values of neighbouring positions on the chip, without tensor cores
PITCH_BYTES = 64
TILE_BYTES = 64  # of a column of a tile of cached keys: 32 positions of 16 bits
TILES = 4  # on the chip
# On tensor cores:
STEP_COLUMNS = 64  # of a product's step, 128 bytes of a row
# of a block at a time; as many blocks share their rows as a chunk has tiles, or a few more
TILE_TOKENS = 128
GROUP_TOKENS = 64  # of a warp group
WIDTHS = (32, 64, 128, 192, 256)  # rows that a block takes together
MOST_STEPS = 24  # of a product on the chip
ALIGNED_BYTES = 1024  # of eight rows of a step
ROOM_BYTES = 192 << 10  # of steps: four of 256 weight rows and 128 tokens
BEGINS_BYTES = 8 << 10  # where a thread's rows begin
ROWS_BYTES = 256  # and whose rows they are
# of a tile of cached keys and values; of heads whose queries lie on the chip beside the tiles
SCAN_POSITIONS, WIDE_POSITIONS = 64, 32
SCAN_TILES = 4  # on the chip: one in use, the others under way
SCAN_HEAD = 256  # elements of a head, at most: outputs lie in registers
SCAN_ROWS = 128  # of queries that share a block's tiles
# of an expert that a block multiplies together, and that it decodes before: so many, in 16 bits, of
# all blocks stay in an H200's second-level cache
ROUTED_ROWS, DECODED_ROWS = 256, 64
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
    # NVIDIA: rows of an expert that a block multiplies together; few-bit weights: blocks whose rows
    # of a down projection it multiplies together
    lot: int = 0
    owners: int = 1


def passes(plan: Plan, tokens: int) -> int:
    """Passes that read all but the last of `tokens` prompt tokens."""
    chunk = plan.options.prompt_chunk
    return -(-(tokens - 1) // chunk) if chunk > 1 else 0


def pass_stages(plan: Plan) -> Iterator[Stage]:
    """The stages of a pass; the last one only appends keys and values."""
    last = max((s.index for s in plan.stages if s.kind is StageKind.ATTENTION), default=-1)
    yield from (s for s in plan.stages[: last + 1] if ROWS[s.kind].in_pass)


def pass_weight_bytes(plan: Plan, tokens: int | None = None) -> int:
    """Weights that one pass of so many tokens (else of a whole chunk) streams, all ranks together:
    of experts those that some token chooses.
    """
    count = plan.options.prompt_chunk if tokens is None else tokens
    return plan.ranks * round(
        sum(
            stored_bytes(plan, s.matrix, s.matrix.rows, s.matrix.cols)
            * (experts_used(s.routed, count) if s.routed else 1)
            for s in pass_stages(plan)
            if s.matrix
        )
    )


def experts_used(routed: Routed, tokens: int) -> float:
    """Experts of a layer that some of the tokens choose, where all are as likely."""
    return routed.total * (1 - (1 - routed.top_k / routed.total) ** tokens)


@lru_cache(maxsize=64)
def prompt_of(plan: Plan) -> Prompt:
    """Sizes and offsets of a plan."""
    chunk = plan.options.prompt_chunk
    if chunk == 1 or plan.spec is None:
        return Prompt(values=(-1,) * len(plan.values))
    columns = {"residual": plan.shard.hidden, "normed": plan.shard.hidden}
    if tensor_pass(plan):
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
        at += chunk * up(width, LINE_FLOATS)
    router = at
    at += router_floats(plan)
    decoded, (normed, summed) = at, decoded_floats(plan)
    at += plan.blocks * (normed + summed)
    end = max(s.index for s in pass_stages(plan)) + 1
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
        _lot(plan),
        _owners(plan),
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
    return plan.spec.experts if plan.spec and has_experts(plan) else None


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
    rows = max((s.matrix.rows for s in _of_kind(plan, StageKind.ROUTER) if s.matrix), default=0)
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


def _of_kind(plan: Plan, kind: StageKind) -> list[Stage]:
    return [stage for stage in plan.stages if stage.kind is kind and has_experts(plan)]


def _lot(plan: Plan) -> int:
    if not plan.limits.teams or not has_experts(plan):
        return 0
    return DECODED_ROWS if plan.coded else ROUTED_ROWS


def _owners(plan: Plan) -> int:
    if not plan.coded:
        return 1
    shares = [largest_share(stage) for stage in _of_kind(plan, StageKind.ROUTED_DOWN)]
    return max(1, min(_lot(plan) // max([1, *shares]), plan.blocks))


def lot_of(plan: Plan, stage: Stage) -> tuple[int, int]:
    """(rows of an expert that a block multiplies together, at most; lots of an expert);
    `lot` in native/monokernel/lots.cuh.
    """
    assert stage.matrix is not None
    if plan.coded and stage.kind is StageKind.ROUTED_DOWN:
        owners = _owners(plan)
        return owners * largest_share(stage), -(-plan.blocks // owners)
    high = stage.matrix.tile_rows
    rows = max(1, _lot(plan) // high) * high
    return min(rows, stage.matrix.rows), -(-stage.matrix.rows // rows)


# ---- decoded rows --------------------------------------------------------------------------------


def decoded_floats(plan: Plan) -> tuple[int, int]:
    """Floats in which one block keeps a stage's decoded rows: of stages that multiply the normed
    residual, and of those whose output is added to it. Both are zero where nothing is decoded
    before it is multiplied: on a CPU, and of a plan whose weights are not coded.

    A block's lot of an expert lies where rows of the first kind do: no neighbour reads it.
    """
    if not plan.coded or not plan.limits.teams or plan.options.prompt_chunk == 1:
        return 0, 0
    size = plan.options.weight_dtype.bytes
    widest = [0, 0]
    for stage in pass_stages(plan):
        if stage.matrix and stage.kind is not StageKind.ROUTER:
            rows = lot_of(plan, stage)[0] if stage.routed else largest_share(stage)
            kind = int(ROWS[stage.kind].summed and not stage.routed)
            widest[kind] = max(widest[kind], up(rows * stage.matrix.cols * size // 4, LINE_FLOATS))
    return widest[0], widest[1]


def decoded_bytes(plan: Plan) -> int:
    """What decoded rows take of a GPU's memory during passes."""
    return 4 * plan.ranks_per_gpu * plan.blocks * sum(decoded_floats(plan))


def largest_share(stage: Stage) -> int:
    """Rows of the matrix that one block multiplies at most; 0 without a matrix."""
    return max(hi - lo for lo, hi in stage.matrix.owned) if stage.matrix else 0


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


def tensor_pass(plan: Plan) -> bool:
    """Does attention of a pass run on an NVIDIA block's tensor cores?"""
    if not plan.limits.teams or plan.options.prompt_chunk == 1 or plan.spec is None:
        return False
    return tensor_heads(plan.kernel_attention(), plan.options.kv_dtype.bytes)


def tensor_heads(own: Attention, kv_bytes: int) -> bool:
    """Do the tensor cores take such heads and such a cache?"""
    return (
        kv_bytes == 2
        and own.head_dim % 16 == 0
        and 0 < own.head_dim <= SCAN_HEAD
        and 0 < own.group <= SCAN_ROWS
    )


def scan_positions(head_dim: int) -> int:
    """Cached positions that a block's warps look at together on tensor cores."""
    return SCAN_POSITIONS if head_dim <= KEPT_HEAD else WIDE_POSITIONS


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


def sharing(tokens: int, chunk: int, blocks: int) -> tuple[int, int, int]:
    """(blocks that share their rows, tiles of tokens that each of them takes one after the other,
    tokens of a tile), where that takes longest; Chunk::open in cuda_prompt.cuh.
    """
    tile = min(chunk, TILE_TOKENS)
    together = GROUP_TOKENS if tokens <= tile and tile > GROUP_TOKENS else tile
    tiles = -(-tokens // together)
    most = max(chunk // tile, -(-tile // GROUP_TOKENS))
    groups = _groups(members_of(tiles, most, blocks), blocks)
    group = max(groups, key=lambda group: _duration(tiles, group))
    return group, -(-tiles // group), together


def members_of(tiles: int, most: int, blocks: int) -> int:
    """How many neighbouring blocks share their rows, up to `most`; Chunk::sharing in
    cuda_prompt.cuh.

    As many as a chunk has tiles, or a few more, some of them idle, where the last blocks, fewer
    than the others, would hold up all: of 132 blocks seven leave six, one of which would take two
    of seven tiles, and five leave two, one of which would take three of five.
    """

    def slowest(members: int) -> tuple[int, int]:
        return max(_duration(tiles, group) for group in _groups(members, blocks))

    return min(range(tiles, max(tiles, most) + 1), key=lambda members: (slowest(members), members))


def _groups(members: int, blocks: int) -> set[int]:
    """Sizes of groups that share their rows: all but the last have `members` blocks."""
    return ({members} if blocks >= members else set()) | ({blocks % members} - {0})


def _duration(tiles: int, group: int) -> tuple[int, int]:
    """(shares of rows that a block of a group multiplies, times tiles; tiles that it takes one
    after the other).
    """
    turns = -(-tiles // group)
    return turns * group, turns


def batch_of(rows: int, together: int, most: int = WIDTHS[-1]) -> tuple[int, int]:
    """(rows that a block takes together, steps between two of its barriers); Chunk::width_of in
    cuda_prompt.cuh.
    """
    wide = min(
        (width for width in WIDTHS if width <= most),
        key=lambda width: (-(-rows // width) * (width + together), WIDTHS.index(width)),
    )
    return wide, 2 if wide <= GROUP_TOKENS else 1


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
