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

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from twin.frozen import frozen
from twin.models.feeds import ExpertFeed
from twin.models.formats import Format
from twin.models.spec import RUN, DType, ModelSpec
from twin.plan.catalogue import CARRYING, ENGINE_OPTIONS, ROWS, input_of
from twin.plan.catalogue import StageKind as StageKind

ENGINE_GPUS = 8  # of one process
STAGGERED_LANES = 4  # lane 4 begins a step with lane 0
MOST_STAGGER_NS = 100_000  # more than any layer takes
PARTIAL_EXTRA = 2  # a softmax partial carries its maximum and its sum next to head_dim values
ITEM_WORDS = 4  # what a dense layer's attention item publishes is padded to so many words, 16 bytes
# rows of a matrix between two block barriers, in whole tiles; a tile of more rows is a batch of its
# own
BATCH_ROWS = 64
# where few warps share a row; Stage::tile_inverse of the kernel is exact up to there
MOST_BATCH_ROWS = 256
MOST_WARPS = 16  # of a block: each has partial sums of a tile's rows, and attention partials
WARP_COLUMNS = 128  # fewest of a tile that a warp covers
CONV_UNIT = 3  # rows of a channel of a short convolution: b, c, x
# sums of 64 bits that blocks add up in memory: of one sector, and from sector to sector in words
SUMS_TOGETHER = 4
SUMS_PITCH = 128
MOST_ADDING = 255  # blocks: a sum's lowest 8 bits count them
Span = tuple[int, int]  # elements lo..hi-1; lo == hi is empty


class HandOffKind(Enum):
    """A member's place is the kernel's number. What a wait teaches, twin/proof/happens_before.py
    says.
    """

    # the data is the flag
    SENTINEL = "sentinel", "resets"
    # one arrival counter per value
    COUNTER = "counter"
    # every block waits for every block after every stage
    GRID = "grid", "meets"

    def __new__(cls, name: str, *rules: str) -> HandOffKind:
        one = object.__new__(cls)
        one._value_ = name
        one.resets, one.meets = "resets" in rules, "meets" in rules
        return one

    resets: bool  # blocks look at the words themselves, which are set back before each use
    meets: bool  # a resident kernel's blocks meet behind every stage, and wait for no value


class CollectiveKind(Enum):
    PUSH = "push"  # peer stores inside the kernel, polled locally
    LIBRARY = "library"  # a call between kernels
    NONE = "none"  # a single rank


class Execution(Enum):
    RESIDENT = "resident"  # one launch for all steps
    GRAPH = "graph"  # one kernel per stage, launched as a graph
    LAUNCHES = "stream"  # one kernel per operation, launched one by one


class Placement(Enum):
    # neighbouring blocks share a die; each block's weights lie in its die's memory
    DIE_AWARE = "die-aware"
    # neighbouring blocks share a die; weights interleaved over all stacks
    BY_DIE = "by-die"
    FLAT = "flat"  # blocks round-robin over dies; weights interleaved over all stacks


class Sampling(Enum):
    GREEDY = "greedy"  # one (logit, index) candidate per block
    FULL = "full"  # a summary of the logits of each: temperature, top-k, top-p


class Residual(Enum):
    """Where the residual lies."""

    REPLICATED = "replicated"  # every block keeps all of it and adds redundantly
    # every block keeps some elements; a stage REDUCE adds, and publishes the sum for all
    SLICED = "sliced"


class LateParts(Enum):
    """Who adds up what the other ranks published `delay` layers ago."""

    EACH = "each"  # every block reads every other rank's part
    # every block sums its own elements of the parts once; a stage REDUCE publishes them within the
    # rank
    REDUCED = "reduced"


class RouterInput(Enum):
    """What a block multiplies a router with."""

    WHOLE = "whole"  # its rows of the router, with the whole residual
    # its columns, with the elements that its rows of the output projection make; blocks add up
    # their parts of each logit in memory, and nobody waits for the residual before
    OWN = "own"


class LatentCache(Enum):
    """Which positions of a latent cache a rank keeps, and attends with which heads."""

    REPLICATED = "replicated"  # all, with its own heads
    # its share, with all heads; ranks exchange queries, and what a rank's positions say of the
    # other ranks' heads
    SPLIT = "split"


class Exchanged(Enum):
    """Where the words lie that blocks of one GPU exchange, on a GPU of several I/O dies."""

    ONCE = "once"  # interleaved over all I/O dies
    # a copy on each I/O die, which its blocks read: a block publishes to all of them. What other
    # GPUs push lies once
    PER_IO_DIE = "per-io-die"


class Common(Enum):
    """What every rank needs alike: compressed queries, keys and values, an indexer, a router."""

    REPLICATED = "replicated"  # every rank streams the matrices and computes all of it
    SHARDED = "sharded"  # every rank computes its share and pushes it to the others


class Parts(Enum):
    """Which ranks' parts of a pushed value a block reads."""

    OWN = "own"
    OTHERS = "others"
    ALL = "all"


@frozen(kw_only=True)
class Options:
    """What a user may choose about the engine."""

    gpus: int = 1  # tensor-parallel degree: GPUS of ranges.py
    blocks: int = 2  # resident blocks per GPU
    slot_bytes: int = 16384  # one bulk copy, one ring slot
    ring_slots: int = 8
    window_slots: int = 8  # slots in flight, at most ring_slots
    # slots in flight once the LM head's first rows are used; None: window_slots
    head_window_slots: int | None = None
    tile_rows: int = 8  # rows of a tile that share one read of the input vector
    handoff: HandOffKind = HandOffKind.SENTINEL
    collective: CollectiveKind = CollectiveKind.NONE
    execution: Execution = Execution.RESIDENT
    placement: Placement = Placement.DIE_AWARE
    sampling: Sampling = Sampling.GREEDY
    delay: int | None = None  # layers; None: the model's own
    weight_dtype: DType = DType.BF16
    # of cached keys and values; fp8: E4M3, divided by the checkpoint's scales, or by 1
    kv_dtype: DType = DType.BF16
    context: int = 128  # cached positions at the step that is timed
    max_context: int = 1024  # KV capacity in positions
    kv_page: int = 16  # positions per page
    attention_splits: int | None = None  # per KV head; None: from max_context
    # positions that a split has before further splits take any; 0: all splits take pages in turn;
    # None: as many as suit the device, 0 where splits are chosen
    split_positions: int | None = None
    # the same in layers with a window; None: as in the others. Another number can only be simulated
    window_splits: int | None = None
    # rows of the output projection of a block that scans the cache, which the others await, in all
    # layers but the last; None: as many as the others have
    scanning_block_rows: int | None = None
    copies: int = 3  # rotating copies of each exchange buffer
    # prompt tokens of one pass over the weights; 1: a prompt is read by ordinary steps
    prompt_chunk: int = 1
    batch: int = 1  # sequences decoded together; more than 1 can only be simulated
    # drafted tokens that a step verifies (speculative decoding); more than 0 can only be simulated
    draft: int = 0
    # tokens that prompt lookup drafts at most, verified by a pass with the one before; 0: none
    lookup: int = 0
    # groups of ranks that whole experts are dealt to; 1: every rank holds a slice of every expert
    expert_ranks: int = 1
    # ring slots for what follows routed experts while these are unknown; 0: the stream stops there
    ahead_slots: int = 0
    # None: sliced where the tokens of a step have 8,192 elements or more
    residual: Residual | None = None
    # None: sharded where ranks push, replicated before library collectives
    common: Common | None = None
    # own, the default there: on one NVIDIA GPU, where norms stand before modules and no shared
    # expert is separate
    router_input: RouterInput = RouterInput.WHOLE
    # lanes of one GPU begin a step so many ns after each other; every fifth one with the first
    lane_stagger_ns: int = 0
    # None: reduced where a block of a lane then reads fewer bytes, without a further kernel or
    # barrier
    late_parts: LateParts | None = None
    # split: on several ranks that share what they need alike
    latent_cache: LatentCache = LatentCache.REPLICATED
    # per-io-die can only be simulated, on GPUs of several I/O dies
    exchanged: Exchanged = Exchanged.ONCE

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * (self.draft + 1)

    @property
    def head_window(self) -> int:
        """Slots in flight while the LM head is multiplied, where no hand-off is near."""
        return min(self.head_window_slots or self.window_slots, self.ring_slots)

    @property
    def resident(self) -> bool:
        """Does one kernel stay for all stages, instead of one being started for each?"""
        return self.execution is Execution.RESIDENT

    @property
    def draws(self) -> bool:
        """May a token be another one than that of the largest logit?"""
        return self.sampling is Sampling.FULL

    @property
    def polled(self) -> bool:
        """Do blocks wait by looking at the data themselves?"""
        return self.resident and self.handoff.resets


@frozen
class Limits:
    """What the node allows, from its description."""

    blocks: int  # resident blocks per GPU
    dies: int
    on_chip_bytes: int  # per block
    memory_bytes: int  # per GPU
    oversubscribe: bool  # blocks may share a core (CPU)
    # warps keep activations in registers (our kernel for NVIDIA); else they lie in shared memory
    teams: bool = False


@frozen
class Matrix:
    """Weights of one stage on one rank: [rows, cols], row-major; `unit` rows make one published
    element.

    Of routed experts, one expert's. Where the blocks divide the chosen experts' rows among
    themselves, nobody owns rows (`owned` is empty).
    """

    rows: int
    cols: int
    unit: int  # 2 for gate_up with gates (gate row, up row interleaved), 3 of CONV_IN, else 1
    tile_rows: int  # a tile is tile_rows x tile_cols, one ring slot; tails are smaller
    tile_cols: int
    owned: tuple[Span, ...]  # [blocks] rows of each block
    format: Format | None = None  # as stored; None: the plan's weight type
    # elements of a row that a GPU's thread holds at once; 0: what suits the weight type
    pack: int = 0
    # equal matrices side by side that are one to whoever multiplies them; no slice has columns of
    # two
    joined: int = 1
    # a GPU's warp takes rows of a tile by itself, in column folds: all of a row is in one tile
    folded: bool = False

    @property
    def slices(self) -> int:
        """Column slices, each a tile wide; the last one of each matrix may be narrower."""
        return self.joined * -(-self.cols // (self.joined * self.tile_cols))

    @property
    def share_step(self) -> int:
        """Elements that blocks do not divide where they share the chosen experts' rows: a tile of
        low-bit weights lies in memory with its scales.
        """
        return self.tile_rows // self.unit if self.pack else 1

    @property
    def batch_rows(self) -> int:
        """Most rows that a block multiplies between two barriers: the fewer share a row, the more
        rows' partial sums have room.

        Not in folds: with 256 rows at once Gemma-3-1B took an H200 667 us instead of 653, its first
        ones being published later.
        """
        more = 1 if self.folded else max(1, MOST_WARPS // self.sharers)
        rows = min(BATCH_ROWS * more, MOST_BATCH_ROWS)
        return max(self.tile_rows, rows // self.tile_rows * self.tile_rows)

    @property
    def sharers(self) -> int:
        """Most partial sums of one row that a block makes: of its column slices, or of a GPU
        block's warps, which may be more.
        """
        if self.folded:
            return 1
        if self.tile_cols < self.cols:
            return max(MOST_WARPS, self.slices)
        # a team of warps is a power of two
        return min(MOST_WARPS, 1 << (-(-self.cols // WARP_COLUMNS) - 1).bit_length())

    @property
    def sums_floats(self) -> int:
        """Partial sums of one batch of rows in shared memory, FP32 [sharers][batch_rows]:
        `multiply` in gemv.cuh strides by the whole batch, also where a block has fewer rows, so
        only the last part ends early.
        """
        most = _widest(self.owned) if self.owned else self.rows
        return (self.sharers - 1) * self.batch_rows + min(self.batch_rows, most)


@frozen
class Routed:
    """A stage whose weights are those of the experts that a step's tokens choose."""

    experts: int  # held by a rank, whole or sliced
    most: int  # of them used in one step
    total: int  # of the layer
    top_k: int  # per token
    always: int = 0  # of these the last, which every token visits: shared ones


@frozen(kw_only=True)
class Scan:
    """Cached entries that a stage reads, as items [sequence][cached head][split]; item // splits is
    (sequence, head).

    Entry e of a head belongs to split e // page % splits. A recurrent state is a cache of constant
    size whose entries are all written.
    """

    sequences: int
    heads: int  # cached heads of a rank
    group: int  # query heads of a rank that attend one cached head
    entries: int  # read at options.context
    entry_bytes: int
    dim: int  # elements of an entry that one query head multiplies
    splits: int
    page: int  # entries
    held_bytes: int  # memory of a rank for all its sequences, at options.max_context
    extra_bytes: int = 0  # read besides the entries, of each item
    # of each item: its state; the entries that attention adds are spread over the items
    written_bytes: int = 0
    # which entries follows from the stage's reads: they cannot be requested before
    chosen: bool = False

    @property
    def items(self) -> int:
        return self.sequences * self.heads * self.splits

    def item_bytes(self, item: int) -> int:
        """Bytes that one item reads."""
        split = item % self.splits
        pages = -(-self.entries // self.page)
        whole = len(range(split, pages, self.splits)) * self.page
        short = (
            pages * self.page - self.entries if pages and (pages - 1) % self.splits == split else 0
        )
        return (whole - short) * self.entry_bytes + self.extra_bytes


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


# stages of the engine that scan caches of their own
SCANNING = (StageKind.DELTA, StageKind.INDEX)


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


class Turn(NamedTuple):
    """Splits of a KV head that take pages in turn."""

    first: int
    splits: int
    page: int  # from which on


@frozen(kw_only=True)
class Attention:
    """The attention that the kernel has code for, alike in all layers of a kind but for windows: a
    rank's heads and its paged cache.

    A page of a KV head, `Options.kv_page` positions, belongs to one split, so a block reads only
    what it wrote. The first `together` splits take pages in turn until each has `first_pages`, then
    the next ones do; when all have, all take pages in turn. So few splits hold a short context. The
    engine takes plans whose layers with a window have as many splits as the others.
    """

    heads: int
    kv_heads: int
    head_dim: int
    # the values are the keys before norm and rotation; a schedule's id has it in the rows of QKV
    values_are_keys: bool = False
    kv_replicas: int  # ranks that share one KV head
    splits: int  # of each KV head
    item_positions: int  # capacity of one (kv head, split), a whole number of pages
    window_splits: int  # the same two of layers with a window
    window_positions: int
    together: int  # splits, the last ones may be fewer
    first_pages: int  # of a split; 0: all splits take pages in turn from the first on

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def head_rows(self) -> int:
        """Rows of q, k and v that make its heads."""
        return (self.heads + (1 if self.values_are_keys else 2) * self.kv_heads) * self.head_dim

    @property
    def items(self) -> int:
        """Pairs (kv head, split)."""
        return self.kv_heads * self.splits

    def splits_of(self, window: int) -> int:
        """Of each KV head in a layer with this window, 0 for none."""
        return self.window_splits if window else self.splits

    def items_of(self, window: int) -> int:
        """Pairs (kv head, split) of such a layer."""
        return self.kv_heads * self.splits_of(window)

    def positions_of(self, window: int) -> int:
        """Capacity of one of them."""
        return self.window_positions if window else self.item_positions

    def turn(self, page: int, window: int = 0) -> Turn:
        """The splits of such a layer that take the page and its neighbours."""
        splits = self.splits_of(window)
        if page >= splits * self.first_pages:
            return Turn(0, splits, 0)
        first = page // (self.together * self.first_pages) * self.together
        return Turn(first, min(self.together, splits - first), first * self.first_pages)

    def pages_below(self, page: int, split: int, window: int = 0) -> int:
        """Pages below `page` that a split holds."""
        turn = self.turn(page, window)
        if split < turn.first:
            return self.first_pages
        if split >= turn.first + turn.splits:
            return 0
        return max(0, -(-(page - turn.page - split + turn.first) // turn.splits))

    def splits_below(self, page: int, window: int = 0) -> int:
        """Splits, the first ones, that hold pages below `page`."""
        turn = self.turn(page, window)
        return turn.first + min(turn.splits, page - turn.page)

    def position_bytes(self, dtype: DType) -> int:
        """A cached position of one KV head, key and value."""
        return 2 * self.head_dim * dtype.bytes


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


def partial_words(heads: int, dim: int, dtype: DType) -> int:
    """32-bit words of the partial outputs of `heads` heads of `dim` elements, and of their maxima
    and sums: outputs of a cache of 16 bits or less go two to a word (Outputs in attention.cuh).
    """
    outputs = heads * dim
    return -(-outputs // word_outputs(dtype)) + heads * PARTIAL_EXTRA


def summed_words(sums: int) -> int:
    """FP32 words of memory in which blocks add up so many numbers of 64 bits: a sector of four of
    them lies SUMS_PITCH words behind the one before.

    All blocks add to each: in adjacent sectors 128 sums took an H200 3.5 us instead of 2.1, and
    6.0 instead of 4.2 next to a stream (studies/h200-history/tried.md).
    """
    return -(-sums // SUMS_TOGETHER) * SUMS_PITCH


def word_outputs(dtype: DType) -> int:
    """Of a partial output by a cache of this type, in a word."""
    return 1 if dtype is DType.FP32 else 2


def tiles(matrix: Matrix, block: int) -> Iterator[tuple[Span, Span]]:
    """(rows, cols) of each ring slot of a block, in the order of the stream: row groups, then
    column slices.
    """
    return tiles_of(matrix, *matrix.owned[block])


def tiles_of(matrix: Matrix, lo: int, hi: int) -> Iterator[tuple[Span, Span]]:
    """The same for rows lo..hi-1."""
    each = matrix.cols // matrix.joined
    for row in range(lo, hi, matrix.tile_rows):
        for first in range(0, matrix.cols, each):
            for col in range(first, first + each, matrix.tile_cols):
                yield (
                    (row, min(row + matrix.tile_rows, hi)),
                    (col, min(col + matrix.tile_cols, first + each)),
                )


@lru_cache(maxsize=1024)
def _widest(spans: tuple[Span, ...]) -> int:
    return max(hi - lo for lo, hi in spans)


@lru_cache(maxsize=4096)
def rows_bytes(format: Format, tile_rows: int, tile_cols: int, rows: int, cols: int) -> int:
    """Stored bytes of [rows, cols] when every tile brings its own scales."""
    # (row groups, rows of each); the last one may be shorter
    high = ((rows // tile_rows, tile_rows), (1, rows % tile_rows))
    wide = ((cols // tile_cols, tile_cols), (1, cols % tile_cols))
    return sum(
        groups * slices * format.bytes(h, w) for groups, h in high for slices, w in wide if h and w
    )


def expected_experts(routed: Routed, tokens: int) -> float:
    """Different experts of a layer that `tokens` tokens choose, on average over uniform routing."""
    return routed.total * (1.0 - (1.0 - routed.top_k / routed.total) ** tokens)


def always_all(routed: Routed) -> bool:
    """Do all draws choose equally many of the experts that a rank holds? Those of one token, where
    it holds all.
    """
    return routed.most == routed.top_k and routed.experts == routed.total


def routed_share(total: int, blocks: int, block: int, step: int = 1) -> Span:
    """A block's part of the rows of all chosen experts, stacked: the blocks of a rank divide them
    in order, and evenly but for whole steps.
    """
    steps = total // step
    return step * (block * steps // blocks), step * ((block + 1) * steps // blocks)
