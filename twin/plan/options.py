"""What users may choose about the engine, and what a node allows."""

from __future__ import annotations

from enum import Enum

from twin.frozen import frozen
from twin.models.spec import DType

ENGINE_GPUS = 8  # of one process
STAGGERED_LANES = 4  # lane 4 begins a step with lane 0
MOST_STAGGER_NS = 100_000  # more than any layer takes


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
    # tokens that prompt lookup or a head drafts at most, verified by a pass with the one before; 0:
    # none
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
