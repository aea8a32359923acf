"""The plan: frozen data that says, for one decode step, who computes, waits for and publishes what.

Ranks are the units of tensor parallelism. Without lanes a rank is a GPU; with lanes a rank is a lane, and one
GPU may host several. Every rank runs the same stages on the same spans (its weights differ), so spans are
given once, per block of a rank. All exchanged values are FP32.

Within one stage a block, in this order: waits for all its reads, resets, computes, publishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from twin.models.spec import DType, ModelSpec

PARTIAL_EXTRA = 2  # a softmax partial carries its maximum and its sum beside head_dim values
Span = tuple[int, int]  # elements lo..hi-1; lo == hi is empty


class StageKind(Enum):
    EMBED = "embed"  # token -> residual, no exchange
    QKV = "qkv"  # residual += reads; norm; rows of q, k, v
    ATTENTION = "attention"  # append k, v; partial softmax per (kv head, split)
    O_PROJ = "o_proj"  # combine splits; rows of the output projection
    GATE_UP = "gate_up"  # residual += reads; norm; silu(gate) * up
    DOWN = "down"  # rows of the down projection
    COLLECTIVE = "collective"  # library all-gather of the ranks' parts, between kernels only
    LANE_MEAN = "lane_mean"  # lanes only: publish this lane's final stream
    LM_HEAD = "lm_head"  # final norm; rows of the vocabulary
    SAMPLE = "sample"  # next token
    STREAM = "stream"  # probe: consume weights, no exchange
    EXCHANGE = "exchange"  # probe: publish and gather, no weights


class HandOffKind(Enum):
    SENTINEL = "sentinel"  # the data is the flag
    COUNTER = "counter"  # one arrival counter per value
    GRID = "grid"  # every block waits for every block after every stage


class CollectiveKind(Enum):
    PUSH = "push"  # peer stores inside the kernel, polled locally
    LIBRARY = "library"  # a call between kernels
    NONE = "none"  # a single rank


class Execution(Enum):
    RESIDENT = "resident"  # one launch for the whole generation
    GRAPH = "graph"  # one kernel per stage, launched as a graph
    STREAM = "stream"  # one kernel per operation, launched one by one


class Placement(Enum):
    DIE_AWARE = "die-aware"  # neighbouring blocks share a die; each block's weights lie in its die's memory
    FLAT = "flat"  # blocks round-robin over dies; weights interleaved over all stacks


class Sampling(Enum):
    GREEDY = "greedy"  # one (logit, index) candidate per block
    FULL = "full"  # all logits to one block per rank: temperature, top-k, top-p


class Parts(Enum):
    """Which ranks' parts of a pushed value a block reads."""

    OWN = "own"
    OTHERS = "others"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose about the engine."""

    gpus: int = 1  # tensor-parallel degree: 1, 2, 4 or 8
    blocks: int = 2  # resident blocks per GPU
    slot_bytes: int = 16384  # one bulk copy, one ring slot
    ring_slots: int = 8
    window_slots: int = 8  # slots in flight, at most ring_slots
    tile_rows: int = 8  # rows of a tile that share one read of the input vector
    handoff: HandOffKind = HandOffKind.SENTINEL
    collective: CollectiveKind = CollectiveKind.NONE
    execution: Execution = Execution.RESIDENT
    placement: Placement = Placement.DIE_AWARE
    sampling: Sampling = Sampling.GREEDY
    delay: int | None = None  # layers; None: the model's own
    weight_dtype: DType = DType.BF16
    kv_dtype: DType = DType.BF16
    context: int = 128  # cached positions at the step that is timed
    max_context: int = 1024  # KV capacity in positions
    kv_page: int = 16  # positions per page; page p belongs to split p % splits
    attention_splits: int | None = None  # per KV head; None: from max_context
    copies: int = 3  # rotating copies of each exchange buffer
    prompt_chunk: int = 1  # prompt tokens of one pass over the weights; 1: a prompt is read by ordinary steps


@dataclass(frozen=True, slots=True)
class Limits:
    """What the node allows, from its description."""

    blocks: int  # resident blocks per GPU
    dies: int
    on_chip_bytes: int  # per block
    memory_bytes: int  # per GPU
    oversubscribe: bool  # blocks may share a core (CPU)
    teams: bool = False  # warps keep activations in registers (our kernel for NVIDIA); else they lie on the chip


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of one stage on one rank: [rows, cols], row-major; `unit` rows make one published element."""

    rows: int
    cols: int
    unit: int  # 2 for gate_up (gate row, up row interleaved), else 1
    tile_rows: int  # a tile is tile_rows x tile_cols, one ring slot; tails are smaller
    tile_cols: int
    owned: tuple[Span, ...]  # [blocks] rows of each block


@dataclass(frozen=True, slots=True)
class Buffer:
    """Exchange memory of one rank: FP32 [copies][parts][elements]."""

    id: int
    name: str
    elements: int
    copies: int
    parts: int  # ranks if pushed, else 1


@dataclass(frozen=True, slots=True)
class Value:
    """One publication per step: elements of one copy of a buffer, each written by exactly one block of each rank.

    A pushed value is written by every rank into its own part on every rank.
    """

    id: int
    name: str
    stage: int  # producer
    buffer: int
    copy: int
    elements: int
    pushed: bool
    owned: tuple[Span, ...]  # [blocks] elements that each block publishes


@dataclass(frozen=True, slots=True)
class Read:
    """What a stage waits for. `spans[block]` lists the elements that this block polls and uses."""

    value: int
    parts: Parts
    spans: tuple[tuple[Span, ...], ...]  # [blocks][...]
    scale: float = 1.0  # residual reads are multiplied by it
    previous_step: bool = False
    residual: bool = False  # added to the residual stream, parts in rank order


@dataclass(frozen=True, slots=True)
class Reset:
    """Each block sets the elements it owns (of every part, in its own rank's memory) back to the sentinel."""

    value: int
    previous_step: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    index: int
    kind: StageKind
    layer: int  # -1 outside the layers
    reads: tuple[Read, ...]
    resets: tuple[Reset, ...]
    publishes: int | None  # value id
    matrix: Matrix | None
    vector_elements: int  # activation elements each block touches besides its reads (norm, residual, combine)
    operations: tuple[str, ...]  # the kernels that an engine without fusion would launch for it
    items: tuple[Span, ...] = ()  # attention: [blocks] items (kv head, split) = item // splits, item % splits
    window: int = 0  # attention: attended positions including the newest, 0 for all

    @property
    def name(self) -> str:
        return self.kind.value if self.layer < 0 else f"{self.kind.value}[{self.layer}]"


@dataclass(frozen=True, slots=True)
class Shard:
    """The model's sizes on one rank. All zero in a probe that does not use them."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # rows of the LM head on a rank; the last rank may own fewer valid rows
    kv_replicas: int  # ranks that share one KV head


@dataclass(frozen=True, slots=True)
class Kv:
    """Paged cache: page p of a KV head belongs to split p % splits, so a block reads only what it wrote."""

    splits: int
    page: int
    item_positions: int  # capacity of one (kv head, split), a whole number of pages
    dtype: DType


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    spec: ModelSpec | None  # None: a probe
    options: Options
    limits: Limits
    ranks: int
    ranks_per_gpu: int
    blocks: int  # per rank
    shard: Shard
    kv: Kv
    buffers: tuple[Buffer, ...]
    values: tuple[Value, ...]
    stages: tuple[Stage, ...]
    die_of_block: tuple[int, ...]  # [blocks of a GPU] rank-on-GPU * blocks + block -> die

    def gpu_of_rank(self, rank: int) -> int:
        return rank // self.ranks_per_gpu

    def weight_bytes(self) -> int:
        """Weights that one step streams, all ranks together."""
        size = self.options.weight_dtype.bytes
        return self.ranks * sum(s.matrix.rows * s.matrix.cols * size for s in self.stages if s.matrix)

    def kv_bytes(self) -> int:
        """Cached keys and values that one step reads at options.context, all ranks together."""
        per_position = 2 * self.shard.head_dim * self.kv.dtype.bytes * self.shard.kv_heads
        return self.ranks * sum(
            per_position * (min(self.options.context, s.window) if s.window else self.options.context)
            for s in self.stages
            if s.kind is StageKind.ATTENTION
        )

    def bytes_per_step(self) -> int:
        return self.weight_bytes() + self.kv_bytes()

    def memory_bytes(self) -> int:
        """Device memory of one GPU: streams, embedding table, exchange buffers, KV cache."""
        spec_table = self.spec.vocab * self.spec.hidden * self.options.weight_dtype.bytes if self.spec else 0
        layers = sum(s.kind is StageKind.ATTENTION for s in self.stages)
        positions = self.shard.kv_heads * self.kv.splits * self.kv.item_positions
        kv = 2 * layers * positions * self.shard.head_dim * self.kv.dtype.bytes
        exchange = sum(4 * b.elements * b.copies * b.parts for b in self.buffers)
        return self.weight_bytes() // (self.ranks // self.ranks_per_gpu) + spec_table + self.ranks_per_gpu * (kv + exchange)

    def launches(self) -> int:
        """Kernels launched per step."""
        match self.options.execution:
            case Execution.RESIDENT:
                return 0
            case Execution.GRAPH:
                return len(self.stages)
            case Execution.STREAM:
                return sum(len(s.operations) for s in self.stages)


def tiles(matrix: Matrix, block: int) -> Iterator[tuple[Span, Span]]:
    """(rows, cols) of each ring slot of a block, in the order of the stream: row groups, then column slices."""
    lo, hi = matrix.owned[block]
    for row in range(lo, hi, matrix.tile_rows):
        for col in range(0, matrix.cols, matrix.tile_cols):
            yield (row, min(row + matrix.tile_rows, hi)), (col, min(col + matrix.tile_cols, matrix.cols))
