"""What a piece of work costs on a device: pure functions to named terms in picoseconds, and the one that binds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

from twin.hardware.types import BlockUnit, Cache, Device, Launch
from twin.models.spec import DType
from twin.plan.types import Execution, Kv, Options, Plan, Span, Stage
from twin.units import picoseconds

PS = 10**12
KEPT_ITERATIONS = 200


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


def weight_rate(block: BlockUnit, dtype: DType) -> float:
    """Bytes of weights per second that one block consumes from its ring."""
    rates = {DType.FP16: block.fp16_bytes_per_s, DType.BF16: block.bf16_bytes_per_s, DType.FP32: block.fp32_bytes_per_s}
    return rates[dtype].value


def tile_cost(block: BlockUnit, dtype: DType, *, size: int, finished_rows: int) -> Cost:
    """Consume one ring slot. A row's fixed cost is paid with its last column slice."""
    rows = picoseconds(finished_rows * block.row_s.value)
    return Cost((("throughput", transfer_ps(size, weight_rate(block, dtype))), ("rows", rows)))


def gather_cost(block: BlockUnit, *, elements: int) -> Cost:
    """Read and sum exchanged elements; the bytes themselves also pass the die's pipes."""
    return Cost((("elements", picoseconds(elements * block.element_s.value)),))


def stage_cost(block: BlockUnit, *, resets: int, vector: int, published: int = 0) -> Cost:
    """What a block pays once per stage, after its inputs are there. `published`: elements that no matrix row pays for."""
    element = block.element_s.value
    return Cost(
        (
            ("published", picoseconds(published * element)),
            ("resets", picoseconds(resets * element)),
            ("vector", picoseconds(vector * element)),
            ("stage", picoseconds(block.stage_s.value)),
        )
    )


def kv_cost(block: BlockUnit, size: int) -> int:
    """Attention over `size` bytes of cached keys and values, already on chip."""
    return transfer_ps(size, block.kv_bytes_per_s.value)


def sample_cost(block: BlockUnit, logits: int) -> int:
    return picoseconds(logits * block.sample_element_s.value)


def launch_ps(launch: Launch, execution: Execution, stage: Stage) -> int:
    """From the last block of one kernel to the first of the next. A library call in a graph brings its own launch."""
    match execution:
        case Execution.RESIDENT:
            return 0
        case Execution.GRAPH:
            return 0 if stage.kind.value == "collective" else picoseconds(launch.graph_edge_s.value)
        case Execution.STREAM:
            return len(stage.operations) * picoseconds(launch.stream_s.value)


def restart_ps(device: Device) -> int:
    """Added to the first memory request of a kernel. restart_s ends when data flow again, so the latency is in it."""
    return max(0, picoseconds(device.launch.restart_s.value) - picoseconds(device.memory.latency_s.value))


def attended(options: Options, window: int) -> Span:
    """Cached positions that a step at options.context reads."""
    return (max(0, options.context - window) if window else 0), options.context


def item_kv_bytes(plan: Plan, stage: Stage, item: int) -> int:
    """Cached bytes of one (kv head, split). Over all items of a rank they sum up to the plan's."""
    lo, hi = attended(plan.options, stage.window)
    positions = _split_positions(plan.kv, item % plan.kv.splits, lo, hi)
    return positions * 2 * plan.shard.head_dim * plan.kv.dtype.bytes


def chunks(size: int, chunk: int) -> Iterator[int]:
    """`size` cut into requests of at most `chunk` bytes."""
    for start in range(0, size, chunk):
        yield min(chunk, size - start)


def kept_share(footprint: int, cache: Cache, copies: int = 1) -> float:
    """Share of a footprint, read once per step in the same order, that `copies` of a cache still hold a step later.

    "whole": all or nothing. "random": a line survives a step when none of the footprint's misses replaces it, so the
    share h solves h = exp(-(1 - h) * footprint / capacity); up to the capacity it is 1.
    """
    capacity = cache.capacity_bytes.value * copies
    if footprint <= 0:
        return 0.0
    if footprint <= capacity:
        return 1.0
    if cache.retention == "whole":
        return 0.0
    share = 0.0
    for _ in range(KEPT_ITERATIONS):  # from below: 1 is always a solution, and not the one meant
        share = exp(-(1 - share) * footprint / capacity)
    return share


def _split_positions(kv: Kv, split: int, lo: int, hi: int) -> int:
    """Positions lo..hi-1 whose page belongs to `split`."""
    first = range(lo // kv.page, -(-hi // kv.page))
    return sum(min(hi, (page + 1) * kv.page) - max(lo, page * kv.page) for page in first if page % kv.splits == split)
