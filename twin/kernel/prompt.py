"""Prompt passes: where the tokens of a chunk keep their numbers, and what a block needs for them.

A pass reads the weights of all layers once for up to `prompt_chunk` tokens, to fill the key-value cache. The last token of a
prompt is an ordinary step, so a pass needs neither the LM head nor what follows the last layer's keys and values.
Between stages all blocks of all ranks meet at a full barrier, so its numbers need neither flags nor resets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from twin.errors import PlanError
from twin.models.spec import DType
from twin.plan.catalogue import ROWS
from twin.plan.types import MOST_WARPS, PARTIAL_EXTRA, Attention, Matrix, Plan, Stage, StageKind

LINE_FLOATS = 32  # rows of different values never share a 128-byte line
PIECE_COLUMNS = 8  # a lane reads 16 bytes of a 16-bit activation at once
TOKENS = 16  # that one tensor-core instruction takes
TILE_ROWS = 8  # rows of a weight tile that one tensor-core instruction takes
PITCH_BYTES = 64  # between the keys and values of neighbouring positions on the chip
TILE_BYTES = 64  # of a column of a tile of cached keys: 32 positions of 16 bits
TILES = 4  # on the chip
STEP_COLUMNS = 32  # of a row that four lanes copy together, 16 bytes each
SUM_FLOATS = 1024  # of a warp, that are added over a block's warps together
SLOTS = 4  # steps of a warp on the chip: one in use, the others under way
GROUPS = {16: 8, 32: 8, 64: 4}  # by tokens of a pass: row groups that use a step's activations together; more sums would spill


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rank's memory for one chunk, in floats: rows of `prompt_chunk` tokens. All zero without passes."""

    floats: int = 0
    residual: int = 0  # [tokens][hidden] FP32
    normed: int = 0  # [tokens][hidden], the input of QKV and GATE_UP, as the platform multiplies it
    values: tuple[int, ...] = ()  # by value: QKV and partial sums in FP32, attention and GATE_UP as inputs; -1: not in a pass
    stages: int = 0  # a pass ends before this stage
    chip_floats: int = 0  # of a block


def passes(plan: Plan, tokens: int) -> int:
    """Passes that read all but the last of `tokens` prompt tokens."""
    chunk = plan.options.prompt_chunk
    return -(-(tokens - 1) // chunk) if chunk > 1 else 0


def pass_stages(plan: Plan) -> Iterator[Stage]:
    """The stages of a pass; the last one only appends keys and values."""
    last = max((s.index for s in plan.stages if s.kind is StageKind.ATTENTION), default=-1)
    yield from (s for s in plan.stages[: last + 1] if ROWS[s.kind].in_pass)


def pass_weight_bytes(plan: Plan) -> int:
    """Weights that one pass streams, all ranks together."""
    size = plan.options.weight_dtype.bytes
    return plan.ranks * sum(s.matrix.rows * s.matrix.cols * size for s in pass_stages(plan) if s.matrix)


@lru_cache(maxsize=64)
def prompt_of(plan: Plan) -> Prompt:
    """Sizes and offsets of a plan."""
    options, chunk = plan.options, plan.options.prompt_chunk
    if chunk == 1 or plan.spec is None:
        return Prompt(values=(-1,) * len(plan.values))
    columns = {"residual": plan.shard.hidden, "normed": plan.shard.hidden}
    names = [_row(plan, plan.stages[value.stage]) for value in plan.values]
    columns |= {name: width for name, width in names if name}
    at, offsets = 0, {"": -1}
    for name, width in columns.items():
        offsets[name] = at
        at += chunk * _up(width, LINE_FLOATS)
    end = max(s.index for s in pass_stages(plan)) + 1
    attention = attention_bytes(plan.kernel_attention(), chunk=chunk, blocks=plan.blocks, kv_bytes=options.kv_dtype.bytes)
    chip = max(attention // 4, MOST_WARPS * (chunk + 1) * max(s.matrix.tile_rows for s in plan.stages if s.matrix))
    return Prompt(at, offsets["residual"], offsets["normed"], tuple(offsets[name] for name, _ in names), end, _up(chip, LINE_FLOATS))


def _row(plan: Plan, made: Stage) -> tuple[str, int]:
    """(name, columns) of what a stage publishes in a pass; a collective, or a sum of late parts, what it reads.

    Partial sums are read by other ranks up to `delay` layers later, before the barrier behind the next layer's norm.
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
        case StageKind.O_PROJ | StageKind.DOWN:
            return f"{made.kind.value}.{made.layer % (1 + (plan.options.delay or 0))}", plan.shard.hidden
        case _:
            return "", 0


def attention_bytes(own: Attention, *, chunk: int, blocks: int, kv_bytes: int) -> int:
    """On the chip: a block's keys, values and queries, FP32; angles; the chunk's keys and values as cached; earlier ones; partials.

    Attending in native/monokernel/prompt.cuh asserts that it divides the same. `blocks` of a rank; `kv_bytes` of a cached number.
    """
    queries = min(chunk, -(-own.kv_heads * chunk // blocks)) * own.group
    heads = _up((2 * chunk + queries) * own.head_dim, LINE_FLOATS)
    turns = _up(chunk * own.head_dim, LINE_FLOATS)
    pitch = 2 * own.head_dim * kv_bytes + PITCH_BYTES
    fresh = _up(chunk * pitch // 4, LINE_FLOATS)
    tiles = _up(TILES * (TILE_BYTES // kv_bytes) * pitch // 4, LINE_FLOATS)
    return 4 * (heads + turns + fresh + tiles + _up(max(MOST_WARPS, own.group) * (own.head_dim + PARTIAL_EXTRA), LINE_FLOATS))


def chip_bytes(plan: Plan, *, warps: int) -> int:
    """Shared memory of an NVIDIA block's passes; none without passes."""
    options = plan.options
    if options.prompt_chunk == 1 or plan.spec is None:
        return 0
    attention = attention_bytes(plan.kernel_attention(), chunk=options.prompt_chunk, blocks=plan.blocks, kv_bytes=options.kv_dtype.bytes)
    return pass_bytes(attention, chunk=options.prompt_chunk, warps=warps, dtype=options.weight_dtype)


def pass_bytes(attention: int, *, chunk: int, warps: int, dtype: DType) -> int:
    """What attention needs, or products."""
    return max(product_bytes(chunk, warps) if dtype is not DType.FP32 else 0, _up(attention, 256))


def product_bytes(chunk: int, warps: int) -> int:
    """[warps][SLOTS] of a step's activations and weights, 16-bit; and [warps][SUM_FLOATS] sums."""
    return warps * (SLOTS * 2 * STEP_COLUMNS * (chunk + GROUPS.get(chunk, 0) * TILE_ROWS) + 4 * SUM_FLOATS)


def fitting_chunk(own: Attention, *, blocks: int, warps: int, room: int, dtype: DType, kv_bytes: int) -> int:
    """The most tokens a pass that fit `room` bytes of a block's shared memory, else the fewest.

    512 tokens took 55, 34 and 26 ms in passes of 16, 32 and 64 (Laneformer-2B on one H200), 36, 22 and 14 (Llama-3.2-1B).
    """
    needs = {chunk: attention_bytes(own, chunk=chunk, blocks=blocks, kv_bytes=kv_bytes) for chunk in GROUPS}
    return max((c for c, need in needs.items() if pass_bytes(need, chunk=c, warps=warps, dtype=dtype) <= room), default=TOKENS)


def warp_steps(matrix: Matrix, warps: int) -> int:
    """Steps of the warp with the largest share of the columns; a slice ends with a step."""
    slices, last = divmod(matrix.cols, matrix.tile_cols)
    steps = slices * -(-matrix.tile_cols // STEP_COLUMNS) + -(-last // STEP_COLUMNS)
    return -(-steps // warps)


def check_tensor_cores(plan: Plan) -> None:
    """Raises PlanError for passes that an NVIDIA GPU cannot make."""
    options = plan.options
    if options.prompt_chunk not in (1, *GROUPS):
        chunks = ", ".join(map(str, GROUPS))
        raise PlanError(f"prompt_chunk={options.prompt_chunk}: the tensor cores take {TOKENS} tokens at a time; use {chunks} or 1")
    if options.prompt_chunk > 1 and options.tile_rows > TILE_ROWS:
        raise PlanError(f"tile_rows={options.tile_rows}: a prompt pass multiplies {TILE_ROWS} rows at a time; use that, or prompt_chunk=1")


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
