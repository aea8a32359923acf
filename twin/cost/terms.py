"""What a piece of work costs on a device: pure functions to named terms in picoseconds, and the one
that binds. Of blocks of warps: tiles.py for matrices, vectors.py for their inputs, attend.py for
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp

from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.kernel import KernelCosts
from twin.hardware.types import Cache, Device
from twin.models.spec import DType
from twin.plan.options import Execution
from twin.plan.types import Stage
from twin.units import picoseconds

PS = 10**12
KEPT_ITERATIONS = 200
FP32_BYTES = 4
SECTOR_BYTES = 32  # of L2, and of a link
QUAD_BYTES = 16  # most that a thread reads at once
LONGEST_PS = 2**52  # 75 minutes: most that one transfer or one piece of a block's work may take


@frozen
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


def cost_in_time(what: str, ps: int) -> int:
    """The cost itself. Raises HardwareError for one that is longer than any single one may be."""
    if ps > LONGEST_PS:
        raise HardwareError(
            f"{what} takes {ps / 1e12:.6g} s, more than {LONGEST_PS / 1e12:.6g} s: raise the "
            "rate, or lower the time"
        )
    return ps


def transfer_ps(size: int, bytes_per_s: float) -> int:
    """Time of `size` bytes, rounded up: a pipe is never faster than its rate."""
    return -(-size * PS // max(1, int(bytes_per_s)))


def nearer_ps(device: Device) -> int:
    """By how much less a load of an exchanged word takes where it lies on the block's own I/O die
    than where words lie on all of them.
    """
    if device.llc is None or device.slices is None:
        return 0
    return picoseconds(device.llc.latency_s.value) - picoseconds(device.slices.near_s.value)


def weight_rate(kernel: KernelCosts, dtype: DType) -> float:
    """Bytes of weights per second that one block consumes from its ring."""
    rates = {
        DType.FP16: kernel.fp16_bytes_per_s,
        DType.BF16: kernel.bf16_bytes_per_s,
        DType.FP32: kernel.fp32_bytes_per_s,
    }
    return rates[dtype].value


def stage_cost(published_s: float, resets_s: float, vector_s: float, fixed_s: float) -> Cost:
    """What a block pays once a stage: for elements that no matrix row pays for, for those that it
    sets back, for its input, and for the stage itself.
    """
    seconds = (published_s, resets_s, vector_s, fixed_s)
    names = ("published", "resets", "vector", "stage")
    return Cost(tuple(zip(names, map(picoseconds, seconds), strict=True)))


def launch_ps(device: Device, execution: Execution, stage: Stage, *, model: bool = False) -> int:
    """From the last block of one kernel to the first of the next. A library call in a graph brings
    its own launch.

    `model`: blocks hand the state of a step over from stage to stage, which those of a probe do not
    have.
    """
    library = stage.kind.value == "collective"
    launch, border = device.launch, device.kernel.border_s
    state = picoseconds(border.value) if border and model and not library else 0
    match execution:
        case Execution.RESIDENT:
            return 0
        case Execution.GRAPH:
            return 0 if library else picoseconds(launch.graph_edge_s.value) + state
        case Execution.LAUNCHES:
            return len(stage.operations) * picoseconds(launch.stream_s.value) + state


def requests(size: int, most: int) -> Iterator[int]:
    """`size` cut into requests of at most `most` bytes."""
    for start in range(0, size, most):
        yield min(most, size - start)


def kept_share(footprint: int, cache: Cache, copies: int = 1, *, blocks: int = 1) -> float:
    """Share of a footprint, read once per step in the same order by `blocks` blocks with a core
    each, that `copies` of a cache still hold a step later.

    "none": nothing. "whole": all or nothing. "random": a line survives a step when none of the
    footprint's misses replaces it, so the share h solves h = exp(-(1 - h) * footprint / capacity);
    up to the capacity it is 1.
    """
    capacity = cache.capacity_bytes.value * copies
    if cache.block_bytes is not None:
        capacity = min(capacity, cache.block_bytes.value * blocks)
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
