"""The plan: frozen data that says, for one decode step, who computes, waits for and publishes what.

Tensor parallelism divides a model into ranks. Without lanes a rank is a GPU; with lanes a rank is a
lane, and one GPU may host several. Every rank runs the same stages on the same spans (its weights
differ), so spans are given once, per block of a rank. All exchanged values are FP32, but for
attention's partial outputs (`partial_words`).

Within one stage a block, in this order: waits for all its reads, resets, computes, publishes.

A step handles `Plan.tokens` tokens: one, or those of several sequences and their drafts. Plans of
more than one token, and of layers that are not dense, are simulated only (`simulation_only` says
why, by the rows of the catalogue).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any

from twin.frozen import frozen
from twin.models.feeds import ExpertFeed
from twin.models.spec import RUN, ModelSpec
from twin.plan.attention import Attention, Scan
from twin.plan.catalogue import CARRYING, ENGINE_OPTIONS, ROWS, StageKind, input_of
from twin.plan.matrix import Matrix, Routed, Span, expected_experts, rows_bytes
from twin.plan.options import (
    ENGINE_GPUS,
    STAGGERED_LANES,
    Common,
    Exchanged,
    Execution,
    Limits,
    Options,
    Placement,
    Residual,
)

# sums of 64 bits that blocks add up in memory: of one sector, and from sector to sector in words
SUMS_TOGETHER = 4
SUMS_PITCH = 128
MOST_ADDING = 255  # blocks: a sum's lowest 8 bits count them
# stages of the engine that scan caches of their own
SCANNING = (StageKind.DELTA, StageKind.INDEX)


class Parts(Enum):
    """Which ranks' parts of a pushed value a block reads."""

    OWN = "own"
    OTHERS = "others"
    ALL = "all"


@frozen
class Buffer:
    """Exchange memory of one rank: FP32 [copies][parts][elements][words]."""

    id: int
    name: str
    elements: int
    copies: int
    parts: int  # ranks if pushed, else 1
    words: int = 1  # of one element: one a token


@frozen
class Value:
    """One publication per step: elements of one copy of a buffer, each written by exactly one block
    of each rank.

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
    words: int = 1  # FP32 words of an element, all written by the same block
    # every block adds to every element; `owned` says who resets it
    summed: bool = False


@frozen
class Read:
    """What a stage waits for. `spans[block]` lists the elements that this block polls and uses."""

    value: int
    parts: Parts
    spans: tuple[tuple[Span, ...], ...]  # [blocks][...]
    scale: float = 1.0  # residual reads are multiplied by it
    previous_step: bool = False
    residual: bool = False  # added to the residual, parts in rank order
    # [blocks] sequences whose words of each element are used; None: all
    sequences: tuple[int, ...] | None = None


@frozen
class Reset:
    """Each block sets the elements it owns (of every part, in its own rank's memory) back to the
    sentinel.
    """

    value: int
    previous_step: bool = False


@frozen
class Stage:
    index: int
    kind: StageKind
    layer: int  # -1 outside the layers
    reads: tuple[Read, ...]
    resets: tuple[Reset, ...]
    publishes: int | None  # value id
    matrix: Matrix | None
    # activation elements each block touches besides its reads (norm, residual, combine)
    vector_elements: int
    operations: tuple[str, ...]  # the kernels that an engine without fusion would launch for it
    # attention: [blocks] items (kv head, split) = item // splits, item % splits
    items: tuple[Span, ...] = ()
    window: int = 0  # attention: attended positions including the newest, 0 for all
    # further matrices of the same input, whose elements follow those of `matrix`
    more: tuple[Matrix, ...] = ()
    # cached entries, where they are not the keys and values of `Plan.attention`
    scan: Scan | None = None
    routed: Routed | None = None
    # the stage whose end in a block lets it fetch this stage's weights; None: known ahead
    gate: int | None = None
    # the rows' sums stay in the block, for the next stage that owns the same rows
    kept: bool = False
    heads: int = 0  # which of `Plan.attentions` has the heads that it makes, attends or multiplies

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.matrix, *self.more) if self.matrix else ()

    @property
    def has_code(self) -> bool:
        """Does the kernel have code for the stage and decode its weights? It multiplies the plan's
        own weight type, and attends keys and values that all layers cache alike, or updates
        recurrent states.
        """
        own = all(matrix.format is None or matrix.format.coded for matrix in self.matrices)
        scans = self.scan is None or self.kind in SCANNING
        return ROWS[self.kind].engine and own and scans

    @property
    def late(self) -> bool:
        """A sum of late parts: a later stage's reads wait for it, nothing else in the block
        does.
        """
        return self.kind is StageKind.REDUCE and not any(read.residual for read in self.reads)

    @property
    def name(self) -> str:
        return self.kind.value if self.layer < 0 else f"{self.kind.value}[{self.layer}]"


@frozen
class Shard:
    """The residual and the vocabulary on one rank. Zero in a probe that does not use them."""

    hidden: int
    vocab: int  # rows of the LM head on a rank; the last rank may own fewer valid rows


@dataclass(frozen=True)
class Plan:
    """One decode step. What follows from its stages is computed once, when somebody needs it."""

    name: str
    spec: ModelSpec | None  # None: a probe
    options: Options
    limits: Limits = field(repr=False)  # of the node, which shows them
    ranks: int
    ranks_per_gpu: int
    blocks: int  # per rank
    shard: Shard
    # one for each shape of heads; empty: no stage runs it, and caches that only the twin knows are
    # their stages' scans
    attentions: tuple[Attention, ...]
    # A notebook that shows a plan shows none of these: half a million characters.
    buffers: tuple[Buffer, ...] = field(repr=False)
    values: tuple[Value, ...] = field(repr=False)
    stages: tuple[Stage, ...] = field(repr=False)
    # [blocks of a GPU] rank-on-GPU * blocks + block -> die
    die_of_block: tuple[int, ...] = field(repr=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all stages and spans: schedules and layouts are looked up by plan, and hashing them
        each time took most of a proof's time.
        """
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        """Without the hash: another process hashes texts differently."""
        return Plan, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def attention(self) -> Attention | None:
        """That of the first layers; all others' where heads have one shape."""
        return self.attentions[0] if self.attentions else None

    def gpu_of_rank(self, rank: int) -> int:
        return rank // self.ranks_per_gpu

    def start_ns(self, rank: int) -> int:
        """How long a rank waits once a step's token is known. Lanes of one GPU that run side by
        side wait for their hand-offs at the same times, and nothing is streamed then; lanes that
        take turns leave the stream to each other.
        """
        return rank % self.ranks_per_gpu % STAGGERED_LANES * self.options.lane_stagger_ns

    @property
    def numbered_by_die(self) -> bool:
        """Do a GPU's blocks agree on their numbers when they start, so that neighbours share a die?
        Weights lie where the GPU has them, also where the plan wants them near.
        """
        return self.options.placement is not Placement.FLAT and self.limits.dies > 1

    @cached_property
    def head_rows(self) -> int:
        """Rows of a block's LM head that a ring may hold before the first are used, in whole tiles:
        `head_window` counts for those behind them. 0: for none.
        """
        matrix = next((s.matrix for s in self.stages if s.kind is StageKind.LM_HEAD), None)
        if matrix is None or self.options.head_window == self.options.window_slots:
            return 0
        return -(-self.options.ring_slots // matrix.slices) * matrix.tile_rows

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.options.tokens

    @cached_property
    def routed(self) -> bool:
        """Have some layers chosen experts?"""
        return any(stage.routed for stage in self.stages)

    @property
    def kernel_routed(self) -> bool:
        """Has the kernel chosen experts to run?"""
        return self.attention is not None and self.routed

    @cached_property
    def kernel_experts(self) -> ExpertFeed | None:
        """The experts of a model that the kernel runs."""
        return self.spec.experts if self.spec and self.kernel_routed else None

    @cached_property
    def visited(self) -> Routed | None:
        """Of a token by the kernel: chosen experts, and shared ones like them."""
        stages = self.stages if self.kernel_routed else ()
        return next((s.routed for s in stages if s.kind is StageKind.ROUTED_DOWN), None)

    @cached_property
    def delta_stages(self) -> list[Stage]:
        """Those whose recurrent states the kernel keeps."""
        return [s for s in self.stages if s.kind is StageKind.DELTA] if self.attention else []

    @cached_property
    def convolving_stages(self) -> list[Stage]:
        """Those whose channels' histories the kernel keeps."""
        return [s for s in self.stages if s.kind is StageKind.CONV_IN] if self.attention else []

    @property
    def kernel_recurs(self) -> bool:
        """Has the kernel states to keep that are no caches?"""
        return bool(self.delta_stages or self.convolving_stages)

    @property
    def kernel_state_bytes(self) -> int:
        """Of a rank. A block owns its items, and its channels, from step to step: nobody else reads
        or writes them. At a sequence's first position it takes them for zero, whatever they hold.
        """
        held = sum(stage.scan.held_bytes for stage in self.delta_stages if stage.scan)
        return held + sum(self.history_bytes(stage) for stage in self.convolving_stages)

    def history_bytes(self, stage: Stage) -> int:
        """What the blocks of a rank carry on from step to step of a stage's channels."""
        kind = self.spec.convolution if self.spec else None
        if stage.kind is not StageKind.CONV_IN or kind is None:
            return 0
        return self.options.batch * kind.history_bytes // self.ranks

    @cached_property
    def kinds(self) -> set[StageKind]:
        return {stage.kind for stage in self.stages}

    @cached_property
    def steps_differ(self) -> bool:
        """Does a step's work depend on the routing? One token on slices of all experts always does
        the same.
        """
        return self.routed and (self.tokens > 1 or self.options.expert_ranks > 1)

    @cached_property
    def awaited_exchanges(self) -> int:
        """Pushes of a step that somebody waits for at once."""
        return 0 if self.options.delay else sum(value.pushed for value in self.values)

    def input_of(self, stage: Stage) -> str | None:
        """Which of the kernel's inputs a stage's matrix multiplies."""
        states = stage.index in self._of_states
        found = input_of(stage.kind, routed=self.routed, heads=stage.heads, states=states)
        return found.value if found else None

    @cached_property
    def _of_states(self) -> frozenset[int]:
        """Output projections of what no heads made, if that is wider or narrower than heads'."""
        cols: dict[bool, dict[int, int]] = {True: {}, False: {}}
        for before, stage in pairwise(self.stages):
            if stage.kind is StageKind.O_PROJ and stage.matrix:
                cols[before.kind in CARRYING][stage.index] = stage.matrix.cols
        known = set(cols[False].values())
        separate = known and not known & set(cols[True].values())
        return frozenset(cols[True] if separate else ())

    @cached_property
    def coded(self) -> bool:
        """Does the kernel decode a matrix's weights, besides those of the plan's weight type?"""
        return any(
            m.format is not None and m.format.coded for stage in self.stages for m in stage.matrices
        )

    def kernel_attention(self) -> Attention:
        """`attention` of a plan with a stage that runs it."""
        assert self.attention is not None, f"{self.name} has no attention of the kernel's"
        return self.attention

    def attention_of(self, stage: Stage) -> Attention:
        """That whose heads a stage makes, attends or multiplies."""
        assert self.attentions, f"{self.name} has no attention of the kernel's"
        return self.attentions[stage.heads]

    def attended(self, stage: Stage) -> Stage | None:
        """The attention whose heads' outputs an output projection multiplies; None: others make
        them.
        """
        maker = self.stages[self.values[stage.reads[0].value].stage] if stage.reads else stage
        return maker if maker.kind is StageKind.ATTENTION else None

    def weight_bytes(self) -> int:
        """Weights that one step streams, all ranks together; of routed experts what uniform routing
        uses on average.
        """
        return round(self.ranks * sum(self._streamed_bytes(stage) for stage in self.stages))

    def moved_bytes(self, stage: Stage) -> int:
        """What a stage of all ranks streams, reads and writes in a step; of routed experts the
        average of uniform routing.
        """
        return round(self.ranks * (self._streamed_bytes(stage) + self._cached_bytes(stage)))

    def _streamed_bytes(self, stage: Stage) -> float:
        share = (
            expected_experts(stage.routed, self.tokens) / self.options.expert_ranks
            if stage.routed
            else 1.0
        )
        return share * self.stage_bytes(stage)

    def stage_bytes(self, stage: Stage) -> int:
        """Bytes of a stage's matrices on one rank as its blocks stream them; of one expert where it
        is routed.
        """
        return sum(self._matrix_bytes(matrix) for matrix in stage.matrices)

    def stored_bytes(self, matrix: Matrix, rows: int, cols: int) -> int:
        """Bytes of a tile of so many rows and columns."""
        if matrix.format is None:
            return rows * cols * self.options.weight_dtype.bytes
        return matrix.format.bytes(rows, cols)

    def _matrix_bytes(self, matrix: Matrix) -> int:
        if matrix.format is None:
            return matrix.rows * matrix.cols * self.options.weight_dtype.bytes
        spans = matrix.owned or ((0, matrix.rows),)
        return sum(
            rows_bytes(matrix.format, matrix.tile_rows, matrix.tile_cols, hi - lo, matrix.cols)
            for lo, hi in spans
        )

    def kv_bytes(self) -> int:
        """Caches and states that one step reads and writes at options.context, all ranks
        together.
        """
        return self.ranks * sum(self._cached_bytes(stage) for stage in self.stages)

    def _cached_bytes(self, stage: Stage) -> int:
        """Of one rank."""
        if history := self.history_bytes(stage):  # and its newest position is written
            kind = self.spec.convolution if self.spec else None
            return history + history // (kind.conv - 1) if kind else 0
        scan = stage.scan
        if scan is not None:
            return (
                sum(scan.item_bytes(item) for item in range(scan.items))
                + scan.items * scan.written_bytes
            )
        if stage.kind is not StageKind.ATTENTION:
            return 0
        positions = (
            min(self.options.context, stage.window) if stage.window else self.options.context
        )
        own = self.attention_of(stage)
        return own.position_bytes(self.options.kv_dtype) * own.kv_heads * positions

    def bytes_per_step(self) -> int:
        return self.weight_bytes() + self.kv_bytes()

    def mean_bytes(self, *, context: int, tokens: int) -> int:
        """Of a timed step: all weights, and the caches before it, in the mean of steps `context`,
        `context` + 1 ...
        """
        at = (replace(self.options, context=context + step) for step in range(tokens))
        cached = sum(replace(self, options=options).kv_bytes() for options in at)
        return self.weight_bytes() + round(cached / tokens)

    def memory_bytes(self) -> int:
        """Device memory of one GPU: all weights (of all experts it holds), embedding table,
        exchange buffers, caches.
        """
        per_rank = sum(self._held_bytes(stage) for stage in self.stages)
        per_rank += sum(4 * b.elements * b.copies * b.parts * b.words for b in self.buffers)
        return self._table_bytes() + self.ranks_per_gpu * per_rank

    def _table_bytes(self) -> int:
        """The embedding table, which every GPU holds whole."""
        return (
            self.spec.vocab * self.spec.hidden * self.options.weight_dtype.bytes if self.spec else 0
        )

    def _held_bytes(self, stage: Stage) -> int:
        """What a rank keeps in memory for a stage: weights and caches."""
        weights = self.stage_bytes(stage) * (stage.routed.experts if stage.routed else 1)
        scan = stage.scan
        if scan is not None:
            return weights + scan.held_bytes
        if stage.kind is not StageKind.ATTENTION:
            return weights + self.history_bytes(stage)
        own, window = self.attention_of(stage), stage.window
        position = own.position_bytes(self.options.kv_dtype)
        return weights + own.items_of(window) * own.positions_of(window) * position

    def simulation_only(self) -> str | None:
        """Why the engine cannot run this plan; None: it can."""
        if reason := self.without_code():
            return reason
        if self.options.gpus > ENGINE_GPUS:
            return (
                f"gpus={self.options.gpus} can be planned and simulated only; the engine runs at "
                f"most {ENGINE_GPUS}"
            )
        if self.options.exchanged is not Exchanged.ONCE:
            return (
                f"exchanged={self.options.exchanged.value} can be planned and simulated only; the "
                "engine runs exchanged=once"
            )
        attending = (s for s in self.stages if s.window and s.kind is StageKind.ATTENTION)
        for own in map(self.attention_of, attending if self.attentions else ()):
            if own.window_splits != own.splits:
                return (
                    f"window_splits={own.window_splits} with attention_splits={own.splits} can "
                    f"be planned and simulated only; the engine runs window_splits={own.splits}"
                )
        return None

    def without_code(self) -> str | None:
        """What the kernel has nothing like, by the options and the catalogue's rows of the plan's
        stages; None: its costs and budgets are known.
        """
        return self._without_code

    @cached_property
    def _without_code(self) -> str | None:
        for name, limit in ENGINE_OPTIONS.items():
            value = getattr(self.options, name)
            if value > limit:
                return (
                    f"{name}={value} can be planned and simulated only; the engine runs "
                    f"{name}={limit}"
                )
        if self.options.residual is Residual.SLICED:
            return (
                "residual=sliced can be planned and simulated only; the engine runs "
                "residual=replicated"
            )
        if self.spec and self.spec.whole_qk_norm and self.ranks > 1:
            return (
                f"{self.spec.name} on {self.ranks} ranks, which divide heads that are normed "
                "together, can be planned and simulated only; the engine runs it on one GPU"
            )
        hyper = self.spec is not None and self.spec.hyper is not None and self.attentions
        if hyper and self.ranks > 1 and self.options.common is Common.SHARDED:
            return (
                "common=sharded with compressed attention can be planned and simulated only; the "
                "engine runs common=replicated"
            )
        # whose kernel has code for attention over caches of its own
        cached = StageKind.ATTENTION if hyper else None
        lacking = (stage for stage in self.stages if not stage.has_code)
        stage = next((stage for stage in lacking if stage.kind is not cached), None)
        if stage is None and (self.spec is None or self.attentions):
            return None
        model = self.spec.runnable_reason() if self.spec else None
        if self.spec and self.spec.hyper and not model:
            return (
                f"{self.spec.name} (compressed attention, hyper-connections) can be planned and "
                "simulated only on GPUs; the engine runs it on CPUs"
            )
        stage = stage or self.stages[0]
        return (
            model
            or f"{stage.name} can be planned and simulated only; the engine runs dense models in "
            f"{', '.join(RUN)}"
        )

    def launches(self) -> int:
        """Kernels launched per step."""
        match self.options.execution:
            case Execution.RESIDENT:
                return 0
            case Execution.GRAPH:
                return len(self.stages)
            case Execution.LAUNCHES:
                return sum(len(s.operations) for s in self.stages)


def summed_words(sums: int) -> int:
    """FP32 words of memory in which blocks add up so many numbers of 64 bits: a sector of four of
    them lies SUMS_PITCH words behind the one before.

    All blocks add to each: in adjacent sectors 128 sums took an H200 3.5 us instead of 2.1, and
    6.0 instead of 4.2 next to a stream (studies/h200-history/tried.md).
    """
    return -(-sums // SUMS_TOGETHER) * SUMS_PITCH
