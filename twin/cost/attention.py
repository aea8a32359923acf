"""What a block takes for an item of attention: heads on their way, cached positions scanned."""

from __future__ import annotations

from collections.abc import Iterator

from twin.cost.terms import QUAD_BYTES, requests, transfer_ps
from twin.hardware.kernel import KernelCosts, WarpKernel
from twin.models.spec import DType
from twin.plan.attention import Attention, Scan
from twin.plan.matrix import Span
from twin.plan.options import Options
from twin.plan.types import Plan, Stage
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.scan import CacheScan, position_threads
from twin.schedule.splits import TENSOR_HEADS, TENSOR_POSITIONS
from twin.units import picoseconds

HEAD, HEAD_OF_UNIT = 64, 128  # elements, of which heads_s and unit_s speak
WIDEST_HEAD = 256  # elements of a head that attention.cuh divides over the threads of a warp
SCAN_STEP = 16  # elements of a head, two products on tensor cores: of keys, and of values
# of which round_s speaks: positions that a thread holds of most heads, threads of a position; and
# heads of a block's first round, of which heads_s does
POSITIONS, POSITION_THREADS, ROUND_HEADS = 4, 8, 6
TENSOR_QUERIES = 8  # more query heads than this on one entry are multiplied by tensor cores
FEWEST_HEADS = 3  # of an item: a query head, its key and its value


def heads_ps(warps: WarpKernel, head_dim: int, heads: int, *, in_step: bool = False) -> int:
    """A block's queries, keys and values on their way from QKV to a scan: each head by one warp.
    A third of it grows with the elements of a head, and a part with the heads that the warps wait
    for at once, of which the last comes the later the more they are. Half of it once more for each
    further round of the warps: heads of a second round have long been there.

    `in_step`: the blocks end QKV so close together that the number of heads does not matter.
    So do those of narrow residuals: traced chains of seven and eight query heads came out 0.7 us
    too slow on an H200, 0.5 on an H100, of one and two 0.0 to 0.4 and -0.2 to 0.2
    (2026-11-27T094746-probes, T100358).
    """
    heads = min(heads, FEWEST_HEADS) if in_step else heads
    rounds, first = -(-heads // TEAM_WARPS), min(heads, TEAM_WARPS)
    laws = warps.attention
    wide = 1 + (head_dim / HEAD - 1) * laws.wider_head_ratio.value
    late = (laws.first_parts.value + first) / (laws.first_parts.value + ROUND_HEADS)
    later = (rounds - 1) * laws.later_heads_ratio.value
    return picoseconds(warps.heads_s.value * wide * (late + later))


def kv_ps(kernel: KernelCosts, size: int, dtype: DType) -> int:
    """Attention over `size` bytes of cached keys and values that have arrived."""
    return transfer_ps(multiplied_bytes(size, dtype), kernel.kv_bytes_per_s.value)


def multiplied_bytes(size: int, dtype: DType) -> int:
    """Cached bytes as a block's throughput counts them, which was measured with 16 bits: numbers of
    8 bits take as long as others once they have arrived.
    """
    return size * DType.BF16.bytes // dtype.bytes if dtype is DType.FP8 else size


def entries_at_once(dim: int, queries: int, dtype: DType) -> int:
    """Cached entries that a block scans side by side, as attention.cuh: its warps over (sets of)
    query heads, threads over positions.
    """
    return (
        TEAM_WARPS
        // min(queries, TEAM_WARPS)
        * (WARP // position_threads(dim))
        * positions_of_a_thread(dim, dtype)
    )


def positions_of_a_thread(dim: int, dtype: DType) -> int:
    """Up to 16 bytes of each of four positions, or more of a single one."""
    return POSITIONS if -(-dim // position_threads(dim)) * dtype.bytes <= QUAD_BYTES else 1


def cache_tiles(
    warps: WarpKernel, plan: Plan, own: Attention, scan: CacheScan, size: int
) -> Iterator[tuple[int, int]]:
    """(bytes, time) of the ring slots in which an item's `size` cached bytes reach a block, as
    attention.cuh scans them.

    A tile is awaited and left by all warps, as a slice of weights is. So say the probes of
    attention. A part of an item's start and end grows with the rounds in which the block's threads
    publish its outputs, or, where a probe has no queries, put down ones of its own.
    Warps that meet in shared memory await each other as they do for a tile.
    """
    position = own.position_bytes(plan.options.kv_dtype)
    tile = scan.positions * position
    met = picoseconds(warps.slice_s.value * scan.meetings)
    at_once = 1 if plan.spec is None else scan.merged
    rounds = -(-own.group * own.head_dim // (TEAM_WARPS * WARP * at_once))
    wait, fixed = (
        picoseconds(warps.slice_s.value),
        picoseconds(
            warps.item_s.value * (1 + warps.attention.further_round_ratio.value * (rounds - 1))
        ),
    )
    turns = (
        _tensor_turns(warps, plan, own, scan, size, tile)
        if scan.tensor
        else _rounds(warps, plan, own, scan, size, tile)
    )
    for number, (request, turn) in enumerate(zip(requests(size, tile), turns, strict=True)):
        yield request, wait + turn + (0 if number else fixed + met)


def _rounds(
    warps: WarpKernel, plan: Plan, own: Attention, scan: CacheScan, size: int, tile: int
) -> Iterator[int]:
    """Of a tile after the other.

    Each query head of a warp takes its time in a round, of which three eighths do not depend on the
    positions that a thread holds (heads of 96, of which it holds one instead of four, need 0.53 of
    it), and a tenth more where twice the threads share a position, whose dot product is summed over
    them.
    """
    heads, position = scan.heads, tile // scan.positions
    at_once = entries_at_once(own.head_dim, -(-own.group // heads), plan.options.kv_dtype)
    held = positions_of_a_thread(own.head_dim, plan.options.kv_dtype)
    laws, parts = warps.attention, warps.attention.sum_parts.value
    # a step for each doubling of the threads
    sums = (position_threads(own.head_dim).bit_length() + parts) / (
        POSITION_THREADS.bit_length() + parts
    )
    each, none = laws.position_parts.value, laws.round_parts.value
    a_round = picoseconds(
        warps.round_s.value * heads * sums * (each * held + none) / (each * POSITIONS + none)
    )
    for request in requests(size, tile):
        yield -(-request // (position * at_once)) * a_round


def _tensor_turns(
    warps: WarpKernel, plan: Plan, own: Attention, scan: CacheScan, size: int, tile: int
) -> Iterator[int]:
    """Of a tile after the other, on tensor cores.

    Warps take units of positions in turn, across tiles: those of one turn are looked at side by
    side, and the last bears its time. Turns are counted from the item's end, so that its last tile,
    which nothing hides, bears one.
    """
    longer = 1.0 if plan.spec is None else warps.attention.in_layers_ratio.value
    a_turn = picoseconds(longer * unit_s(warps, own, scan))
    unit = tile // scan.positions * TENSOR_POSITIONS

    def turns(left: int) -> int:
        full, rest = divmod(left, tile)
        return -(-(full * -(-tile // unit) + -(-rest // unit)) // scan.warps)

    for start in range(0, size, tile):
        yield (turns(size - start) - turns(max(0, size - start - tile))) * a_turn


def unit_s(warps: WarpKernel, own: Attention, scan: CacheScan) -> float:
    """In which a warp compares a unit of cached positions with a set of query heads, and sums
    values. Sets have warps of their own, which share the tensor cores and the chip's memory. A warp
    that takes eight heads makes the products of two sets, whether it has all eight or not: groups
    of 9 to 16 heads are counted as four sets. InternLM-3-8B, with 16, comes out 3 % too slow at 96
    positions, as other models of its size, and 6 % at 3,964.
    """
    heads = scan.heads
    sets = -(-own.group // heads) * -(-heads // TENSOR_HEADS)
    further = warps.attention.further_set_ratio.value
    return turn_s(warps, own.head_dim) * (1 + further * (sets - 1))


def turn_s(warps: WarpKernel, elements: int) -> float:
    """The same of so many elements of a head, of one set alone."""
    steps, softmax = elements // SCAN_STEP, warps.attention.softmax_steps.value
    alone = (steps + softmax) / (HEAD_OF_UNIT // SCAN_STEP + softmax)
    return warps.unit_s.value * alone


def attended(options: Options, window: int) -> Span:
    """Cached positions that a step at options.context reads."""
    return (max(0, options.context - window) if window else 0), options.context


def item_kv_bytes(plan: Plan, stage: Stage, item: int) -> int:
    """Cached bytes of one (kv head, split). Over all items of a rank they sum up to the plan's."""
    lo, hi = attended(plan.options, stage.window)
    own, page = plan.attention_of(stage), plan.options.kv_page
    split = item % own.splits_of(stage.window)

    def below(position: int) -> int:
        full, rest = divmod(position, page)
        whole = own.pages_below(full, split, stage.window)
        here = own.pages_below(full + 1, split, stage.window) > whole
        return whole * page + (rest if here else 0)

    return own.position_bytes(plan.options.kv_dtype) * (below(hi) - below(lo))


def by_tensor_cores(scan: Scan, queries: int) -> bool:
    """Do tensor cores multiply a stage's own entries, or threads?"""
    return queries > TENSOR_QUERIES or scan.dim > WIDEST_HEAD
