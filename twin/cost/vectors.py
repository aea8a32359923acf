"""What a block of warps takes to gather the inputs of a stage: rounds of loads, sectors, and
attention's splits.
"""

from __future__ import annotations

from twin.cost.terms import FP32_BYTES, QUAD_BYTES, SECTOR_BYTES, Cost, transfer_ps
from twin.cost.tiles import vector_portions, vector_team
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.plan.matrix import Matrix
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.teams import LATE_AT_ONCE
from twin.units import picoseconds

ROUND_BYTES = QUAD_BYTES * WARP * TEAM_WARPS  # of spans, by all threads
# attention's splits; half of those where a thread holds several portions
PARTS_AT_ONCE = 4
PACK_ELEMENTS = 8  # of one attention head, at most: TeamLayout::PACK in cuda_layout.cuh


def gather_cost(
    device: Device,
    warps: WarpKernel,
    *,
    rounds: int,
    loaded: int,
    blocks: int,
    crowd: float = 0.0,
    weighed: float = 0.0,
) -> Cost:
    """Read and sum exchanged elements; the bytes themselves also pass the die's pipes.

    A block of warps has them in registers, and pays for the rounds of its loads and the bytes of
    sectors that these take, of which L2 brings all `blocks` of a GPU theirs at the same time.
    `crowd`: how often more than once all its blocks load the same words at once. `weighed`:
    attention's splits that a thread weighs and adds, in each of its column slices.
    """
    latencies = rounds * picoseconds(device.exchange.latency_s.value)
    sectors = transfer_ps(loaded * blocks // device.blocks, warps.gather_bytes_per_s.value)
    return Cost(
        (
            ("rounds", latencies),
            ("sectors", sectors),
            ("crowd", picoseconds(crowd * warps.crowd_s.value)),
            ("splits", picoseconds(weighed * warps.split_s.value)),
        )
    )


def span_rounds(elements: int, *, parts: int, at_once: int, polled: bool) -> int:
    """Rounds of loads in which a block of warps gathers `elements` of each of `parts` parts:
    QUAD_BYTES a thread of `at_once` parts and, where it polls, not before those of the round before
    are there.
    """
    return -(-FP32_BYTES * elements // ROUND_BYTES) * -(-parts // at_once) if polled else 1


def vector_rounds(matrix: Matrix | None, *, parts: int, splits: int, together: int = 1) -> int:
    """Rounds in which a block of warps gathers a whole vector, as cuda_activation.cuh: all its
    elements at once, of several parts the first, and then `together` of the others.

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
    cuda_activation.cuh).
    """
    return vector_portions(matrix) if matrix and matrix.pack > PACK_ELEMENTS else 1


def sharers(matrix: Matrix | None) -> int:
    """Threads of a block of warps that hold the same columns."""
    team = vector_team(matrix) if matrix else None
    return team.groups if team else 1


def late_rounds(elements: int) -> int:
    """Rounds in which a block's scheduler warp sums `elements` of other ranks' parts, as
    cuda_main.cu: all parts of a few at once.
    """
    return -(-elements // (LATE_AT_ONCE * WARP))


def vector_chunks(matrix: Matrix) -> int:
    """Packs of neighbouring elements that a thread holds and weighs one by one: one of each column
    slice; two with low-bit weights, where a thread has more neighbours.
    """
    team = vector_team(matrix)
    return team.portions * max(1, team.vector // PACK_ELEMENTS) if team else 1


def vector_bytes(matrix: Matrix, *, aligned: int, element: int = FP32_BYTES) -> int:
    """What a block of warps loads from L2 for a whole vector of `element` bytes each, in sectors: a
    thread's elements lie side by side, so each load of up to `aligned` bytes a thread takes as
    many sectors as if neighbours did not share them (they do, since `Side` in cuda_activation.cuh:
    requests counted, not sectors). Teams that hold the same columns load them again.
    """
    team = vector_team(matrix)
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
