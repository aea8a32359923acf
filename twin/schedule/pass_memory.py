"""What a block keeps in shared memory while it reads a prompt in passes."""

from __future__ import annotations

from twin.errors import PlanError
from twin.models.feeds import ExpertFeed
from twin.models.mixers import Mamba2, Recurring
from twin.models.spec import DType, ModelSpec
from twin.plan.attention import PARTIAL_EXTRA, Attention
from twin.plan.matrix import MOST_WARPS
from twin.plan.recurrent import state_splits
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS, TEAM_WARPS, up
from twin.schedule.passes import SCAN_ROWS, scan_positions, tensor_heads
from twin.schedule.splits import KEPT_HEAD

TOKENS = 16  # of a pass on a CPU
# between the keys and values of neighbouring positions, without tensor cores
PITCH_BYTES = 64
TILE_BYTES = 64  # of a column of a tile of cached keys: 32 positions of 16 bits
TILES = 4
MOST_STEPS = 24  # of a product
ALIGNED_BYTES = 1024  # of eight rows of a step
ROOM_BYTES = 192 << 10  # of steps: four of 256 weight rows and 128 tokens
BEGINS_BYTES = 8 << 10  # where a thread's rows begin
ROWS_BYTES = 256  # and whose rows they are
SCAN_TILES = 4  # one in use, the others under way
# where passes verify drafts: columns of a warp's load; bytes of a batch's sums of eight tokens, and
# of a stage's inputs
FEW_COLUMNS, FEW_SUMS_BYTES, FEW_TOKENS = 32, 16 << 10, 8
FEW_INPUT_BYTES = 68 << 10
CHUNKS = (16, 32, 64, 128, 256, 512, 1024)  # tokens of a pass
# of a recurrent state on tensor cores: tokens that it is carried on by at once; rows of a product;
# elements of a key, at most: a warp has STATE_ROWS of them; states that share a key, at most
STATE_TOKENS, STATE_ROWS, MOST_KEYS, MOST_PER_KEY = 64, 16, 128, 128
STEERED = 4  # numbers that steer a token's states: a multiple of so many
SMALL_CHUNKS = (16, 32, 64)  # where attention keeps the chunk's keys in shared memory


def routing_floats(feed: ExpertFeed, hidden: int, *, warps: int, always: int) -> int:
    """What a block needs while it chooses experts: a token of each warp, its logits, what the
    choice is by where that is something else; `Routing` in native/monokernel/prompt_experts.cuh.
    `always`: shared experts like routed ones.
    """
    logits = feed.experts * (1 + feed.choice_bias) + feed.shared_gate
    return LINE_FLOATS + warps * (hidden + logits + 2 * (feed.top_k + always))


def _routed_bytes(spec: ModelSpec, chunk: int) -> int:
    """NVIDIA: 16-bit entries sorted by expert, and where each expert's begin; ChunkShared in
    cuda_prompt.cuh.
    """
    feed, always = spec.experts, spec.shared_like_routed
    return up(2 * (chunk * (feed.top_k + always) + feed.experts + always + 1), 16) if feed else 0


def tensor_states(kind: Recurring, *, ranks: int, columns: int) -> bool:
    """Do the tensor cores take such recurrent states, of which an item has so many columns?"""
    return (
        kind.key_dim % STATE_ROWS == 0
        and kind.key_dim <= MOST_KEYS
        and kind.per_key <= MOST_PER_KEY
        and columns % 8 == 0
        # rows of a token are loaded four at a time
        and kind.steering * (kind.value_heads // ranks) % STEERED == 0
    )


def state_columns(kind: Recurring, *, ranks: int, blocks: int) -> int:
    """Of a state, that an item has; `blocks` of a rank."""
    return kind.value_dim // state_splits(kind, kind.value_heads // ranks, blocks)


def _states_bytes(kind: Recurring | None, *, ranks: int, blocks: int) -> int:
    """NVIDIA: what a block has of STATE_TOKENS tokens while it solves for what their keys write, or
    carries its states on; `Solving` and `Carrying` in cuda_delta.cuh.
    """
    if kind is None:
        return 0
    columns, keys = state_columns(kind, ranks=ranks, blocks=blocks), kind.key_dim
    tokens, square = STATE_TOKENS, STATE_TOKENS * (STATE_TOKENS + 4)
    solving = 2 * tokens * (kind.per_key + keys + 4)
    if not isinstance(kind, Mamba2):
        solved = up(kind.value_dim + keys, 32) + 8
        solving += square + tokens * (solved + STATE_ROWS + 4)
    carrying = 2 * tokens * (1 + keys + 4) + tokens * (keys + 8) + square
    carrying += (keys + 3 * tokens) * (columns + 8)
    return 4 * max(solving, carrying)


def attention_bytes(own: Attention, *, chunk: int, blocks: int, kv_bytes: int) -> int:
    """A block's keys, values and queries, FP32; angles; the chunk's keys and values as cached;
    earlier ones; partials.

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


def planned_pass_bytes(plan: Plan) -> int:
    """Shared memory of an NVIDIA block's passes; none without passes."""
    options = plan.options
    if options.prompt_chunk == 1 or plan.spec is None:
        return 0
    return pass_bytes(
        plan.spec,
        plan.kernel_attention(),
        chunk=options.prompt_chunk,
        ranks=plan.ranks,
        blocks=plan.blocks,
        dtype=options.weight_dtype,
        kv_bytes=options.kv_dtype.bytes,
    )


def pass_bytes(
    spec: ModelSpec,
    own: Attention,
    *,
    chunk: int,
    ranks: int,
    blocks: int,
    dtype: DType,
    kv_bytes: int,
) -> int:
    """What attention needs, or products, a choice of experts, recurrent states. `blocks` of a rank;
    `kv_bytes` of a cached number.
    """
    if tensor_heads(own, kv_bytes):
        # PassScan::bytes in cuda_attend.cuh
        kept = own.head_dim <= KEPT_HEAD
        rows = SCAN_TILES * 2 * scan_positions(own.head_dim)
        queries = 0 if kept else SCAN_ROWS * (2 * own.head_dim + 16)  # of 16 bits
        attention = rows * (own.head_dim * kv_bytes + 16) + queries
    else:
        attention = attention_bytes(own, chunk=chunk, blocks=blocks, kv_bytes=kv_bytes)
    products = ALIGNED_BYTES + ROOM_BYTES + BEGINS_BYTES if dtype is not DType.FP32 else 0
    feed = spec.experts
    always = spec.shared_like_routed
    routing = 4 * routing_floats(feed, spec.hidden, warps=TEAM_WARPS, always=always) if feed else 0
    states = _states_bytes(spec.recurrence, ranks=ranks, blocks=blocks)
    most = max(products, up(attention, 256), up(routing, 256), up(states, 256))
    return most + ROWS_BYTES + _routed_bytes(spec, chunk)


def fitting_chunk(
    spec: ModelSpec,
    own: Attention,
    *,
    ranks: int,
    blocks: int,
    room: int,
    dtype: DType,
    kv_bytes: int,
) -> int:
    """The most tokens a pass that fit `room` bytes of a block's shared memory, else 1: blocks with
    less of it than a Hopper's read prompts by ordinary steps.
    """
    chunks = possible_chunks(spec, own, dtype, kv_bytes)
    sizes = {
        chunk: pass_bytes(
            spec,
            own,
            chunk=chunk,
            ranks=ranks,
            blocks=blocks,
            dtype=dtype,
            kv_bytes=kv_bytes,
        )
        for chunk in chunks
    }
    kind = spec.recurrence
    if kind:
        columns = state_columns(kind, ranks=ranks, blocks=blocks)
        if not tensor_states(kind, ranks=ranks, columns=columns):
            return 1
    return max((chunk for chunk, size in sizes.items() if size <= room), default=1)


def possible_chunks(
    spec: ModelSpec, own: Attention, dtype: DType, kv_bytes: int
) -> tuple[int, ...]:
    """Tokens of a pass that an NVIDIA GPU can make: experts and recurrent states are for tensor
    cores alone.
    """
    if (spec.experts or spec.recurrence) and dtype is DType.FP32:
        return ()
    chunks = CHUNKS if tensor_heads(own, kv_bytes) and dtype is not DType.FP32 else SMALL_CHUNKS
    return tuple(chunk for chunk in chunks if not spec.recurrence or chunk >= STATE_TOKENS)


def _check_rounds(plan: Plan) -> None:
    """Raises PlanError for drafts that an NVIDIA GPU does not verify."""
    options, reason = plan.options, None
    matrices = [m for stage in plan.stages for m in stage.matrices]
    if plan.coded:
        reason = "weights of fewer than 16 bits"
    elif options.weight_dtype is DType.FP32:
        reason = "weights of 32 bits"
    elif plan.kernel_routed:
        reason = "experts"
    elif not tensor_heads(plan.kernel_attention(), options.kv_dtype.bytes):
        reason = "heads that tensor cores do not take"
    elif plan.kernel_attention().group * (options.lookup + 1) > SCAN_ROWS:
        reason = f"more than {SCAN_ROWS // (options.lookup + 1)} query heads of a key"
    elif any(m.cols % FEW_COLUMNS or m.tile_cols % FEW_COLUMNS for m in matrices):
        reason = f"matrices of other than multiples of {FEW_COLUMNS} columns"
    elif any(m.slices * m.tile_rows * 4 * FEW_TOKENS > FEW_SUMS_BYTES for m in matrices):
        reason = "matrices so wide that their sums leave the ring no room"
    if reason:
        raise PlanError(
            f"lookup={options.lookup}: NVIDIA GPUs verify no drafts of {reason}; use lookup=0"
        )


def check_tensor_cores(plan: Plan) -> None:
    """Raises PlanError for passes that an NVIDIA GPU cannot make."""
    options = plan.options
    if options.prompt_chunk == 1:
        return
    assert plan.spec is not None
    if options.lookup:
        _check_rounds(plan)
    chunks = possible_chunks(
        plan.spec, plan.kernel_attention(), options.weight_dtype, options.kv_dtype.bytes
    )
    if not chunks:
        raise PlanError(
            f"prompt_chunk={options.prompt_chunk}: passes multiply experts of 16 bits or fewer, "
            "and carry on recurrent states next to such weights; use prompt_chunk=1 with "
            f"{options.weight_dtype.value}"
        )
    for stage in plan.delta_stages:
        kind, scan = plan.spec.recurrence, stage.scan
        if kind and scan and not tensor_states(kind, ranks=plan.ranks, columns=scan.page):
            raise PlanError(
                f"prompt_chunk={options.prompt_chunk}: passes carry on a multiple of "
                f"{STEERED // kind.steering} recurrent states, {MOST_PER_KEY} a key at most, of "
                f"keys of a multiple of {STATE_ROWS} elements up to {MOST_KEYS}, and a multiple of "
                f"8 columns of each; {stage.name} has {scan.heads} states, {kind.per_key} a key, "
                f"of {kind.key_dim} elements and {scan.page} columns: use prompt_chunk=1"
            )
    if options.prompt_chunk not in chunks:
        allowed = ", ".join(map(str, chunks))
        raise PlanError(
            f"prompt_chunk={options.prompt_chunk}: a pass of this plan takes {allowed} tokens; "
            "use one of them, or 1"
        )
