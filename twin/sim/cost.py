"""What a piece of work costs on a device: pure functions to named terms in picoseconds, and the one
that binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import exp

from twin.errors import HardwareError
from twin.hardware.types import BlockCosts, Cache, Device, Launch, Warps
from twin.kernel.coded import tensor_products
from twin.kernel.scan import TENSOR_WARPS, cache_tile, position_threads, scan_heads, tensor_scan
from twin.kernel.teams import LATE_AT_ONCE, WARP, WARPS, Team, rows_at_once, team_of
from twin.models.spec import DType
from twin.plan.splits import TENSOR_HEADS, TENSOR_POSITIONS
from twin.plan.types import Execution, Matrix, Options, Plan, Span, Stage
from twin.units import picoseconds

PS = 10**12
KEPT_ITERATIONS = 200
HEAD, HEAD_OF_UNIT = 64, 128  # elements, of which heads_s and unit_s speak
WIDEST_HEAD = 256  # elements of a head that attention.cuh divides over the threads of a warp
FP32_BYTES = 4
ON_CHIP_BYTES_PER_CYCLE = 128  # 32 banks of four bytes
SECTOR_BYTES = 32  # of L2, and of a link
QUAD_BYTES = 16  # most that a thread reads at once
ROUND_BYTES = QUAD_BYTES * WARP * WARPS[0]  # of spans, by all threads
SCAN_STEP = 16  # elements of a head, two products of a scan on tensor cores: of keys, and of values
# a unit's softmax, in steps: with five the probes of heads of 64 and of 128 elements agree best
SCAN_FIXED = 5
# What part of a cost grows with what, as probes of attention and traced runs say
# (studies/h200-validation, docs/calibration.md).
LATER_HEADS = 1 / 2  # of six heads' time, what a further round of the warps takes
# of the first round's time, beside one part for each of its heads; of six in all
HEADS_ALONE, HEADS_PARTS = 4, 10
# of a round's time, with each position that a thread holds and without any
POSITION_PARTS, FIXED_PARTS = 5, 12
ROUND_PARTS = 32  # with the four positions of most heads
# besides one part for each bit of the threads of a position; of eight threads in all
SUM_PARTS, EIGHT_THREADS_SUM = 5, 9
# of a turn on tensor cores, more with each further set of query heads
FURTHER_SET = 1 / 4
WIDER_HEAD = 1 / 3  # of a head's way to a scan, more with each HEAD elements beyond the first
FURTHER_ROUND = 1 / 4  # of an item's start and end, more with each further round of publishing
# attention's splits; half of those where a thread holds several portions
PARTS_AT_ONCE = 4
PACK_ELEMENTS = 8  # of one attention head, at most: TeamVector::PACK in cuda_vector.cuh
LOOPED_ROWS = 4  # of a tile at once, in a loop over its rows; of four bits in one slice, four times
CHAIN_GROUPS = 4  # of columns that share a scale, which a chain of FP4's products keeps apart


@dataclass(frozen=True, slots=True)
class Cost:
    """Terms that overlap (the longest counts) or follow each other (their sum counts)."""

    terms: tuple[tuple[str, int], ...]
    overlap: bool = False

    @property
    def ps(self) -> int:
        times = [ps for _, ps in self.terms]
        return max(times, default=0) if self.overlap else sum(times)

    @property
    def binding(self) -> str:
        """The longest term; the first of equals."""
        return max(self.terms, key=lambda term: term[1])[0] if self.terms else "nothing"


def transfer_ps(size: int, bytes_per_s: float) -> int:
    """Time of `size` bytes, rounded up: a pipe is never faster than its rate."""
    return -(-size * PS // max(1, int(bytes_per_s)))


def weight_rate(block: BlockCosts, dtype: DType) -> float:
    """Bytes of weights per second that one block consumes from its ring."""
    rates = {
        DType.FP16: block.fp16_bytes_per_s,
        DType.BF16: block.bf16_bytes_per_s,
        DType.FP32: block.fp32_bytes_per_s,
    }
    return rates[dtype].value


def tile_cost(block: BlockCosts, dtype: DType, *, size: int, finished_rows: int) -> Cost:
    """Consume one ring slot. A row's fixed cost is paid with its last column slice."""
    rows = picoseconds(finished_rows * block.row_s.value)
    return Cost((("throughput", transfer_ps(size, weight_rate(block, dtype))), ("rows", rows)))


@dataclass(frozen=True, slots=True)
class TeamWork:
    """What a tile costs a block of warps."""

    weights: float  # that are multiplied, those of idle threads and of repeated rows included
    ends_ps: int  # waits and loads before, sums over threads behind


# asked for by every read of every block, for a few shapes
_shape_team = lru_cache(maxsize=1024)(team_of)


def _team(matrix: Matrix, dtype: DType = DType.BF16) -> Team | None:
    return _shape_team(
        matrix.cols,
        matrix.tile_cols,
        WARPS[0],
        weight_bytes=dtype.bytes,
        pack=matrix.pack,
        beside=matrix.beside,
    )


def team_work(
    warps: Warps | None,
    matrix: Matrix,
    *,
    rows: int,
    cols: int,
    groups: int,
    dtype: DType,
    joined: bool = True,
    step_s: float = 0.0,
) -> TeamWork:
    """A tile's share of the round in which the block's teams take it, each its own tiles at the
    same time.

    A round is `groups` row groups side by side, each with all its column slices. It takes as long
    whether all teams have a tile or one, and whether all threads of a team hold columns or some: a
    warp waits for each slice that it sees, loads ROWS_AT_ONCE rows of it and multiplies them, slice
    after slice, and then sums its threads once. `joined`: the first two slices take one wait. In
    the code of probes the compiler makes their products together, behind the wait for the second,
    unless a slice's weights may have been taken ahead. Layers whose hidden vector has three slices
    show it too: with a wait for each the twin gives their QKV 0.5 us too much
    (2026-11-24T031558-probes). `step_s`: of a loop over a tile's few-bit rows, for each time that
    it is gone through.
    """
    if warps is None:
        return TeamWork(rows * cols, 0)
    team = _team(matrix, dtype)
    if team is None:
        raise HardwareError(
            f"tiles of {matrix.tile_cols} columns are wider than {WARPS[0]} warps take at once: "
            "use a smaller slot_bytes"
        )
    at_once = rows_at_once(matrix, dtype)
    pieces, tiles = -(-rows // at_once), groups * team.slices
    held = team.teams * _held_columns(team, matrix) * at_once
    waits = pieces * (team.portions - (joined and team.portions > 1)) * warps.slice_s.value / tiles
    ends = pieces * warps.reduction_s.value / tiles
    if step_s:
        waits += -(-rows // rolled_rows(matrix)) * team.portions * step_s / tiles
    return TeamWork(pieces * held / tiles, picoseconds(waits + ends))


def rolled_rows(matrix: Matrix) -> int:
    """Rows of a tile that a loop takes at once beside experts: `Rolled` in cuda_core.cuh."""
    assert matrix.format is not None
    few = matrix.format.bits == 8 or vector_portions(matrix) > 1
    return LOOPED_ROWS if few else 4 * LOOPED_ROWS


def _held_columns(team: Team, matrix: Matrix) -> int:
    """Columns that a team's threads multiply, of all slices that it sees. Of tensor cores' chains
    (Fragments in cuda_fragments.cuh) each warp takes every so manyth, and none beyond the slice: so
    a last slice that no other team's stands beside costs what it has.
    """
    if not tensor_products(matrix):
        return team.portions * team.size * WARP * team.vector
    assert matrix.format is not None
    chains = CHAIN_GROUPS * matrix.format.block[1] * team.size

    def held(wide: int) -> int:
        return -(-wide // chains) * chains

    each = team.cols // team.beside
    full = held(min(team.tile, each))
    lone = team.beside == 1 and team.portions > 1 and team.slices % team.teams == 1
    last = held(each - (team.slices - 1) * team.tile) if lone else full
    return (team.portions - 1) * full + last


def teams_at_once(matrix: Matrix, dtype: DType) -> int:
    """Row groups whose tiles a block of warps takes side by side."""
    team = _team(matrix, dtype)
    return team.groups if team else 1


def tiles_of_a_round(matrix: Matrix, dtype: DType) -> int:
    """Of all the row groups that a block's teams take side by side."""
    team = _team(matrix, dtype)
    return team.groups * team.slices if team else 1


def team_loads_ps(device: Device, dtype: DType, matrix: Matrix) -> int:
    """A tile's share of the wait for its slice, and a team's loads of ROWS_AT_ONCE rows of it from
    the chip's memory, all threads.
    """
    team = _team(matrix, dtype)
    if team is None or device.warps is None:
        return 0
    bits = matrix.format.bits if matrix.format else 8 * dtype.bytes
    size = team.size * WARP * team.vector * rows_at_once(matrix, dtype) * bits // 8
    waits = team.portions * device.warps.slice_s.value / (team.groups * team.slices)
    return picoseconds(waits + size / (ON_CHIP_BYTES_PER_CYCLE * device.block.clock_hz.value))


def gather_cost(
    device: Device,
    *,
    elements: int,
    rounds: int,
    loaded: int,
    blocks: int,
    crowd: float = 0.0,
    weighed: float = 0.0,
) -> Cost:
    """Read and sum exchanged elements; the bytes themselves also pass the die's pipes.

    A block of warps has them in registers, and pays for the rounds of its loads and the bytes of
    sectors that these take, of which L2 brings all `blocks` of a GPU theirs at the same time.
    `crowd`: how often more than once all its blocks ask for the same words at once. `weighed`:
    attention's splits that a thread weighs and adds, in each of its column slices.
    """
    if device.warps is None:
        return Cost((("elements", picoseconds(elements * device.block.element_s.value)),))
    latencies = rounds * picoseconds(device.exchange.latency_s.value)
    sectors = transfer_ps(loaded * blocks // device.blocks, device.warps.gather_bytes_per_s.value)
    return Cost(
        (
            ("rounds", latencies),
            ("sectors", sectors),
            ("crowd", picoseconds(crowd * device.warps.crowd_s.value)),
            ("splits", picoseconds(weighed * device.warps.split_s.value)),
        )
    )


def span_rounds(elements: int, *, parts: int, at_once: int, polled: bool) -> int:
    """Rounds of loads in which a block of warps gathers `elements` of each of `parts` parts:
    QUAD_BYTES a thread of `at_once` parts and, where it polls, not before those of the round before
    are there.
    """
    return -(-FP32_BYTES * elements // ROUND_BYTES) * -(-parts // at_once) if polled else 1


def vector_rounds(matrix: Matrix | None, *, parts: int, splits: int, together: int = 1) -> int:
    """Rounds in which a block of warps gathers a whole vector, as cuda_vector.cuh: all its elements
    at once, of several parts the first, and then `together` of the others.

    Of attention's partial outputs (`splits` > 0) too, a few splits at once (combine.cuh).
    """
    if splits:
        return portion_rounds(matrix) * -(-splits // splits_together(matrix))
    return 1 + -(-max(0, parts - 1) // together)


def parts_at_once(matrix: Matrix | None) -> int:
    """Attention's splits whose loads are under way together, as combine.cuh."""
    return PARTS_AT_ONCE if not matrix or vector_chunks(matrix) == 1 else PARTS_AT_ONCE // 2


def splits_together(matrix: Matrix | None) -> int:
    """Of attention's splits that a block's threads look at together; of threads that hold the same
    columns each at its share, and at one at least.
    """
    return max(parts_at_once(matrix), sharers(matrix))


def portion_rounds(matrix: Matrix | None) -> int:
    """Of a thread's column slices whose parts of splits are loaded one after the other (`packs` in
    cuda_vector.cuh).
    """
    return vector_portions(matrix) if matrix and matrix.pack > PACK_ELEMENTS else 1


def sharers(matrix: Matrix | None) -> int:
    """Threads of a block of warps that hold the same columns."""
    team = _team(matrix) if matrix else None
    return team.groups if team else 1


def late_rounds(elements: int) -> int:
    """Rounds in which a block's keeper sums `elements` of other ranks' parts, as cuda_main.cu: all
    parts of a few at once.
    """
    return -(-elements // (LATE_AT_ONCE * WARP))


def vector_portions(matrix: Matrix) -> int:
    """Column slices of which a thread holds elements."""
    team = _team(matrix)
    return team.portions if team else 1


def vector_chunks(matrix: Matrix) -> int:
    """Packs of neighbouring elements that a thread holds and weighs one by one: one of each column
    slice; two beside few-bit weights, where a thread has more neighbours.
    """
    team = _team(matrix)
    return team.portions * max(1, team.vector // PACK_ELEMENTS) if team else 1


def vector_bytes(matrix: Matrix, *, aligned: int, element: int = FP32_BYTES) -> int:
    """What a block of warps asks of L2 for a whole vector of `element` bytes each, in sectors: a
    thread's elements lie side by side, so each load of up to `aligned` bytes a thread asks for as
    many sectors as if neighbours did not share them (they do, since `Side` in cuda_vector.cuh:
    requests counted, not sectors). Teams that hold the same columns ask for them again.
    """
    team = _team(matrix)
    if team is None:
        return element * matrix.cols
    thread = element * team.vector
    return element * matrix.cols * team.groups * (thread // min(thread, aligned))


def partial_alignment(width: int) -> int:
    """Bytes of one load of attention's partial outputs, `width` elements an item, as in
    combine.cuh; where items begin with a sector, all of it: threads that load together then take it
    once, and else each of them takes two.
    """
    return next(
        (size for size in (SECTOR_BYTES, 16, 8) if FP32_BYTES * width % size == 0), FP32_BYTES
    )


def stage_cost(
    device: Device,
    *,
    resets: int,
    vector: int,
    published: int = 0,
    normed: int = 0,
    behind: int = 0,
    groups: int = 0,
) -> Cost:
    """What a block pays once per stage, after its inputs are there. `published`: elements that no
    matrix row pays for.

    `normed`: vectors that a block of warps norms or combines in its registers, instead of touching
    `vector` elements; `behind`: of them those behind weights that were taken ahead. `groups`:
    vectors behind whole row groups of a down projection.
    """
    element = device.block.element_s.value
    touched = vector * element
    if device.warps and normed:
        touched = normed * device.warps.vector_s.value + behind * device.warps.ahead_s.value
    if device.warps and groups:
        touched += groups * device.warps.group_s.value
    return Cost(
        (
            ("published", picoseconds(published * element)),
            ("resets", picoseconds(resets * element)),
            ("vector", picoseconds(touched)),
            ("stage", picoseconds(device.block.stage_s.value)),
        )
    )


def heads_ps(warps: Warps, head_dim: int, heads: int) -> int:
    """A block's queries, keys and values on their way from QKV to a scan: each head by one warp.
    A third of it grows with the elements of a head, and a part with the heads that the warps wait
    for at once, of which the last comes the later the more they are. Half of it once more for each
    further round of the warps: heads of a second round have long been there.
    """
    rounds, first = -(-heads // WARPS[0]), min(heads, WARPS[0])
    wide = 1 + (head_dim / HEAD - 1) * WIDER_HEAD
    late = (HEADS_ALONE + first) / HEADS_PARTS
    return picoseconds(warps.heads_s.value * wide * (late + (rounds - 1) * LATER_HEADS))


def kv_cost(block: BlockCosts, size: int) -> int:
    """Attention over `size` bytes of cached keys and values, already on chip."""
    return transfer_ps(size, block.kv_bytes_per_s.value)


def entries_at_once(dim: int, queries: int, dtype: DType) -> int:
    """Cached entries that a block scans side by side, as attention.cuh: its warps over (sets of)
    query heads, threads over positions.
    """
    return (
        WARPS[0]
        // min(queries, WARPS[0])
        * (WARP // position_threads(dim))
        * positions_of_a_thread(dim, dtype)
    )


def positions_of_a_thread(dim: int, dtype: DType) -> int:
    """Up to 16 bytes of each of four positions, or more of a single one."""
    return 4 if -(-dim // position_threads(dim)) * dtype.bytes <= QUAD_BYTES else 1


def cache_tiles(warps: Warps, plan: Plan, size: int) -> Iterator[tuple[int, int]]:
    """(bytes, time) of the ring slots in which an item's `size` cached bytes reach a block, as
    attention.cuh scans them.

    A tile is awaited and left by all warps, as a slice of weights is. So say the probes of
    attention. A part of an item's start and end grows with the rounds in which the block's threads
    publish its outputs, two at a time, or, where a probe has no queries, put down ones of its own.
    """
    own = plan.kernel_attention()
    position = own.position_bytes(plan.options.kv_dtype)
    tile = cache_tile(plan) * position
    rounds = -(-own.group * own.head_dim // (WARPS[0] * WARP * (1 if plan.spec is None else 2)))
    wait, fixed = (
        picoseconds(warps.slice_s.value),
        picoseconds(warps.item_s.value * (1 + FURTHER_ROUND * (rounds - 1))),
    )
    turns = (
        _tensor_turns(warps, plan, size, tile, position)
        if tensor_scan(plan)
        else _rounds(warps, plan, size, tile, position)
    )
    for number, (request, turn) in enumerate(zip(requests(size, tile), turns, strict=True)):
        yield request, wait + turn + (0 if number else fixed)


def _rounds(warps: Warps, plan: Plan, size: int, tile: int, position: int) -> Iterator[int]:
    """Of a tile after the other.

    Each query head of a warp takes its time in a round, of which three eighths do not depend on the
    positions that a thread holds (heads of 96, of which it holds one instead of four, need 0.53 of
    it), and a tenth more where twice the threads share a position, whose dot product is summed over
    them.
    """
    own, heads = plan.kernel_attention(), scan_heads(plan)
    at_once = entries_at_once(own.head_dim, -(-own.group // heads), plan.options.kv_dtype)
    held = positions_of_a_thread(own.head_dim, plan.options.kv_dtype)
    # a step for each doubling of the threads
    sums = (position_threads(own.head_dim).bit_length() + SUM_PARTS) / EIGHT_THREADS_SUM
    a_round = picoseconds(
        warps.round_s.value * heads * sums * (POSITION_PARTS * held + FIXED_PARTS) / ROUND_PARTS
    )
    for request in requests(size, tile):
        yield -(-request // (position * at_once)) * a_round


def _tensor_turns(warps: Warps, plan: Plan, size: int, tile: int, position: int) -> Iterator[int]:
    """Of a tile after the other, on tensor cores.

    Warps take units of positions in turn, across tiles: those of one turn are looked at side by
    side, and the last bears its time. Turns are counted from the item's end, so that its last tile,
    which nothing hides, bears one.
    """
    a_turn, whole = picoseconds(unit_s(warps, plan)), position * TENSOR_POSITIONS * TENSOR_WARPS
    for start in range(0, size, tile):
        yield (-(-(size - start) // whole) - -(-max(0, size - start - tile) // whole)) * a_turn


def unit_s(warps: Warps, plan: Plan) -> float:
    """In which a warp compares a unit of cached positions with a set of query heads, and sums
    values. Sets have warps of their own, which share the tensor cores and the chip's memory.
    """
    own = plan.kernel_attention()
    steps = own.head_dim // SCAN_STEP
    sets = -(-own.group // TENSOR_HEADS)
    alone = (steps + SCAN_FIXED) / (HEAD_OF_UNIT // SCAN_STEP + SCAN_FIXED)
    return warps.unit_s.value * alone * (1 + FURTHER_SET * (sets - 1))


def sample_cost(block: BlockCosts, logits: int) -> int:
    return picoseconds(logits * block.sample_element_s.value)


def launch_ps(launch: Launch, execution: Execution, stage: Stage, *, model: bool = False) -> int:
    """From the last block of one kernel to the first of the next. A library call in a graph brings
    its own launch.

    `model`: blocks hand the state of a step over from stage to stage, which those of a probe do not
    have.
    """
    library = stage.kind.value == "collective"
    state = picoseconds(launch.state_s.value) if launch.state_s and model and not library else 0
    match execution:
        case Execution.RESIDENT:
            return 0
        case Execution.GRAPH:
            return 0 if library else picoseconds(launch.graph_edge_s.value) + state
        case Execution.LAUNCHES:
            return len(stage.operations) * picoseconds(launch.stream_s.value) + state


def attended(options: Options, window: int) -> Span:
    """Cached positions that a step at options.context reads."""
    return (max(0, options.context - window) if window else 0), options.context


def item_kv_bytes(plan: Plan, stage: Stage, item: int) -> int:
    """Cached bytes of one (kv head, split). Over all items of a rank they sum up to the plan's."""
    lo, hi = attended(plan.options, stage.window)
    own, page = plan.kernel_attention(), plan.options.kv_page
    split = item % own.splits_of(stage.window)

    def below(position: int) -> int:
        full, rest = divmod(position, page)
        whole = own.pages_below(full, split, stage.window)
        here = own.pages_below(full + 1, split, stage.window) > whole
        return whole * page + (rest if here else 0)

    return own.position_bytes(plan.options.kv_dtype) * (below(hi) - below(lo))


def requests(size: int, most: int) -> Iterator[int]:
    """`size` cut into requests of at most `most` bytes."""
    for start in range(0, size, most):
        yield min(most, size - start)


def kept_share(footprint: int, cache: Cache, copies: int = 1) -> float:
    """Share of a footprint, read once per step in the same order, that `copies` of a cache still
    hold a step later.

    "none": nothing. "whole": all or nothing. "random": a line survives a step when none of the
    footprint's misses replaces it, so the share h solves h = exp(-(1 - h) * footprint / capacity);
    up to the capacity it is 1.
    """
    capacity = cache.capacity_bytes.value * copies
    if footprint <= 0 or cache.retention == "none":
        return 0.0
    if footprint <= capacity:
        return 1.0
    if cache.retention == "whole":
        return 0.0
    share = 0.0
    for _ in range(KEPT_ITERATIONS):  # from below: 1 is always a solution, and not the one meant
        share = exp(-(1 - share) * footprint / capacity)
    return share
