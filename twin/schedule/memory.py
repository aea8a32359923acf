"""What a block keeps in its shared memory: the scratch of its stages, and how large a ring fits
next to it. Sizes count floats, except where the name says bytes.
"""

from __future__ import annotations

from twin.frozen import frozen
from twin.models.formats import UNIT_BYTES
from twin.plan.attention import PARTIAL_EXTRA
from twin.plan.catalogue import StageKind
from twin.plan.matrix import MOST_WARPS, Matrix
from twin.plan.options import Residual, Sampling
from twin.plan.step import SUMMARY
from twin.plan.types import Parts, Plan, Stage
from twin.schedule.block import LINE_FLOATS, TEAM_WARPS, up
from twin.schedule.pass_memory import planned_pass_bytes
from twin.schedule.scores import scores_of

BARRIER_BYTES = 8  # an mbarrier; each ring position has two: full and empty
PROGRESS_BYTES = 32  # Progress in block.cuh
# Signals in cuda_core.cuh besides the values of its warps; the sum is checked there
SIGNAL_BYTES = 32 * 16 + 48
WARP_SIGNALS = 16  # bytes of each consumer warp
VECTOR_FLOATS = 16  # constants and parts of the scratch start on a 64-byte line
STATE_EXTRA = 32  # floats that a block keeps between kernels besides its residual
# The full sampler (logits_buffer.cuh, sampling.cuh). Buckets of logits, a sixteenth of the
# temperature wide; words of what lies in one, and of what a block publishes
SAMPLE_BUCKETS, LEVEL_FLOATS, SUMMARY_FLOATS = 256, 4, SUMMARY
LOGITS_FIRST = 4  # words of a block's logits buffer before its logits
SAMPLE_LISTED = 256  # logits that are compared one by one
SAMPLE_HELD = 1280  # of a bucket, in shared memory
# in its scratch: a number of each warp; one block of one rank; which logit is the last one kept
MEETING_FLOATS, SHARE_FLOATS, FOUND_FLOATS = 64, 10, 16
PROBED_FLOATS = (256 + 16) * 4  # what threads found in the buckets that they looked at
CHOICE_WORDS = 2  # of a chosen expert: its number, its weight;
COUNTS = 3  # words behind them: of choices, and of those that each of two loaders has requested
KEYS_ALIGNED = 16  # words, where they begin
KEPT_FIRST = 4  # words before a block's sums of shared experts; the first is their gate
CONTEST = 64  # experts of a group at most, which a block compares with each other: choice.cuh
STATE_THREADS = 1024  # of a block on any platform, at most
# where no kernel fixes what a block keeps: judged by what the dense kernel's stages take
SCRATCH_BYTES = 12 << 10
INPUT_SHARE = 4  # judged


@frozen(kw_only=True)
class OfWarps:
    """What NVIDIA's warps need of the scratch; the defaults are those of blocks without them."""

    # of heads, that attention merges, by their shape; all alike of blocks without warps
    partials: tuple[int, ...] = (MOST_WARPS,)
    exchange: int = 0  # where threads hand over their fours, behind the sums of rows
    combined: int = 0  # where threads that hold the same columns combine attention's splits
    # the residual between the stages that use it, where low-bit weights leave it no registers (Held
    # in cuda_activation.cuh)
    held: int = 0
    # what of an input is too wide for registers (cuda_quantised.cuh, cuda_split.cuh), or an input
    # that tensor cores multiply as integers (cuda_fragments.cuh)
    whole: int = 0
    whole_units: int = 0  # of PACK elements, in `whole`: those that tensor cores multiply


@frozen(kw_only=True)
class Scratch:
    """A block's scratch, FP32, one part behind the other."""

    stages: int = 0  # what the worst stage needs besides its input
    held: int = 0  # as of OfWarps
    whole: int = 0
    choice: int = 0  # a token's experts, from ROUTE on until ROUTED_DOWN is over
    # how much of the shared experts a token wants, and a block's rows of their sums
    kept: int = 0
    channels: int = 0  # a block's rows of a short convolution's b, c and x
    # what a block makes of the residual, for a router, and that residual's last factor
    scored: int = 0
    # of hyper-connections, and how they mix
    residuals: int = 0
    half: int = 0  # of `stages`: partial sums of one batch of rows
    whole_units: int = 0

    @property
    def floats(self) -> int:
        behind = self.choice + self.kept + self.channels + self.scored + self.residuals
        return self.stages + self.held + self.whole + behind


@frozen(kw_only=True)
class SharedMemory:
    """Of a block: its ring, and what lies next to it."""

    slot_bytes: int
    vectors: int  # bytes of a step next to its ring
    pass_bytes: int = 0  # of a prompt pass, which has no ring
    mbarriers: bool = False  # NVIDIA: of each slot, and what a block's warps signal each other
    # floats of the vector that a stage computes with: a matrix's input, or what a probe gathers
    input_floats: int = 0
    scratch: Scratch = Scratch()

    def bytes(self, slots: int, window: int) -> int:
        """With so many slots, of which up to `window` are under way."""
        ring = max(slots * self.slot_bytes + self.vectors, self.pass_bytes)
        return ring + (_signal_bytes(slots, window) if self.mbarriers else 0)

    def most_slots(self, room: int) -> int:
        """The largest ring that fits, all of it under way, at least one slot: what is left of
        `room` when the barriers of so many slots lie there, which come in powers of two.
        """
        left = room - self.vectors
        if not self.mbarriers:
            return max(1, left // self.slot_bytes)
        slots = max(1, room // self.slot_bytes)
        while slots > 1 and self.bytes(slots, slots) > room:
            slots = min(slots - 1, max(1, (left - _signal_bytes(slots, slots)) // self.slot_bytes))
        return slots


def _signal_bytes(slots: int, window: int) -> int:
    least = slots + 2 * TEAM_WARPS + (window | 1)  # Ring::BARRIERS in cuda_ring.cuh
    barriers = 1 << (least - 1).bit_length()
    signals = up(SIGNAL_BYTES + WARP_SIGNALS * TEAM_WARPS, UNIT_BYTES)
    return 2 * BARRIER_BYTES * barriers + signals + PROGRESS_BYTES


def warps_memory(plan: Plan, matrices: tuple[Matrix | None, ...], needs: OfWarps) -> SharedMemory:
    """All that an NVIDIA block requests: ring and vectors of a step or a prompt pass, mbarriers.
    Models keep their inputs in registers.
    """
    inputs = _input_floats(plan, matrices)
    scratch = _scratch(plan, matrices, needs)
    vectors = up(4 * scratch.floats, UNIT_BYTES)
    return SharedMemory(
        slot_bytes=plan.options.slot_bytes,
        vectors=vectors + (up(4 * inputs, UNIT_BYTES) if plan.spec is None else 0),
        pass_bytes=planned_pass_bytes(plan),
        mbarriers=True,
        input_floats=inputs,
        scratch=scratch,
    )


def threads_memory(plan: Plan, matrices: tuple[Matrix | None, ...]) -> SharedMemory:
    """Of a block whose threads share no rows (AMD, CPU): the ring, the FP32 residual and the
    widest input.
    """
    widest = max((s.matrix.cols for s in plan.stages if s.matrix), default=0)
    return SharedMemory(
        slot_bytes=plan.options.slot_bytes,
        vectors=4 * (plan.shard.hidden + widest),
        input_floats=_input_floats(plan, matrices),
        scratch=_scratch(plan, matrices, OfWarps()),
    )


def simulated_memory(plan: Plan, *, in_registers: bool) -> SharedMemory:
    """Of a plan that the kernel has no code for: FP32 residuals (or a block's slice of them) and
    stage input of all tokens.

    Blocks that keep their input in registers need scratch instead; an input beyond INPUT_SHARE of
    the shared memory comes in pieces.
    """
    residuals = plan.spec.hyper.residuals if plan.spec and plan.spec.hyper else 1
    residual = residuals * plan.shard.hidden
    if plan.options.residual is Residual.SLICED:
        residual = -(-residual // plan.blocks)
    widest = max([plan.shard.hidden, *(m.cols for s in plan.stages for m in s.matrices)])
    inputs = min(4 * plan.tokens * widest, plan.limits.on_chip_bytes // INPUT_SHARE)
    held = SCRATCH_BYTES if in_registers else inputs
    return SharedMemory(
        slot_bytes=plan.options.slot_bytes, vectors=4 * plan.tokens * residual + held
    )


# ---- scratch -------------------------------------------------------------------------------------


def _scratch(plan: Plan, matrices: tuple[Matrix | None, ...], needs: OfWarps) -> Scratch:
    half = up(max([0, *(matrix.sums_floats for matrix in matrices if matrix)]), LINE_FLOATS)
    return Scratch(
        stages=_stages_floats(plan, half, needs),
        held=needs.held,
        whole=needs.whole,
        choice=_choice_floats(plan),
        kept=_kept_floats(plan),
        channels=_channel_floats(plan),
        scored=_scored_floats(plan),
        residuals=_residuals_floats(plan),
        half=half,
        whole_units=needs.whole_units,
    )


def _input_floats(plan: Plan, matrices: tuple[Matrix | None, ...]) -> int:
    wanted = [matrix.cols for matrix in matrices if matrix]
    wanted += [
        2 * sum(plan.values[r.value].elements for r in s.reads)
        for s in plan.stages
        if s.kind is StageKind.EXCHANGE
    ]
    if plan.spec and plan.spec.hyper:  # an input of each of a block's groups of heads
        wanted += [one.heads * one.head_dim for one in plan.attentions]
    kind = plan.kernel_experts
    if kind is not None and kind.parallel:  # two modules' outputs are normed next to each other
        wanted.append(2 * up(plan.shard.hidden, LINE_FLOATS))
    return up(max([plan.shard.hidden, 1, *wanted]), LINE_FLOATS)


def _stages_floats(plan: Plan, half: int, needs: OfWarps) -> int:
    """What a stage needs besides its input: gathered q, k, v; partials of heads; sums of rows; the
    sampler's sums.
    """
    wanted = [1024, 2 * half + needs.exchange]
    widths: dict[object, int] = {}  # of spans: layers that are alike share theirs
    for stage in plan.stages:
        match stage.kind:
            case (
                StageKind.ATTENTION
                | StageKind.INDEX
                | StageKind.HEAD_OUT
                | StageKind.LATENT
                | StageKind.ROUTER
                | StageKind.LM_HEAD
            ) if plan.spec and plan.spec.hyper:
                wanted.append(_compressed_floats(plan, stage))
            case StageKind.ATTENTION:
                wanted.append(
                    _attention_floats(
                        plan, stage, needs.partials[stage.heads % len(needs.partials)], widths
                    )
                )
            case StageKind.O_PROJ:
                wanted.append(needs.combined)
            case StageKind.DELTA:
                wanted.append(_state_floats(stage))
            case StageKind.SAMPLE if plan.options.sampling is Sampling.FULL:
                wanted += _sampler_floats(plan, half)
            case StageKind.EMBED if stage.reads:
                wanted.append(LINE_FLOATS)
            case StageKind.LANE_MEAN if stage.publishes is not None:
                wanted += [hi - lo for lo, hi in plan.values[stage.publishes].owned]
            case StageKind.ROUTE:
                wanted += [_logits_floats(plan, stage), _contest_floats(plan)]
        if stage.late:
            wanted += [hi - lo for read in stage.reads for spans in read.spans for lo, hi in spans]
    return up(max(wanted), LINE_FLOATS)


def _attention_floats(plan: Plan, stage: Stage, partials: int, widths: dict[object, int]) -> int:
    own = plan.attention_of(stage)
    merge = up(max(partials, own.group) * (own.head_dim + PARTIAL_EXTRA), VECTOR_FLOATS)
    heads = (own.group + 2) * own.head_dim  # without reads, one constant head
    for read in stage.reads:
        if read.spans not in widths:
            widths[read.spans] = max(sum(hi - lo for lo, hi in spans) for spans in read.spans)
    gathered = max([heads, *(widths[read.spans] for read in stage.reads)])
    if own.values_are_keys and stage.reads:  # which stand next to them once they are normed
        gathered += gathered // (own.group + 1)
    # behind them the sinks of their queries
    sinks = gathered // heads * own.group if plan.spec is not None and plan.spec.sinks else 0
    return merge + gathered + sinks


def _state_floats(stage: Stage) -> int:
    """A block's items of recurrent states: gathered vectors; an item's convolved channels; two sums
    of each column from every thread, or from one.
    """
    scan = stage.scan
    assert scan is not None
    gathered = sum(
        max((sum(hi - lo for lo, hi in spans) for spans in read.spans), default=0)
        for read in stage.reads
    )
    parts = (gathered, 2 * scan.dim + scan.page, scan.page)
    return sum(up(part, VECTOR_FLOATS) for part in parts) + 2 * max(STATE_THREADS, scan.page)


def _logits_floats(plan: Plan, stage: Stage) -> int:
    """The router's, of all ranks that make some."""
    if made := scores_of(plan):
        return made.sums
    ranks = {Parts.ALL: plan.ranks}
    return sum(plan.values[r.value].elements * ranks.get(r.parts, 1) for r in stage.reads)


def _contest_floats(plan: Plan) -> int:
    """What a block needs to choose among many experts: its logits and a gate's, and keys of two
    words of all experts and of the first ones of each group; behind them the experts' scales.
    """
    kind = plan.kernel_experts
    if kind is None or (kind.experts <= CONTEST and not kind.parallel):
        return 0
    groups = -(-kind.experts // CONTEST)
    keys = up(kind.experts, 2) + up(groups * kind.top_k, 2)
    scales = kind.experts if kind.parallel else 0
    return up(kind.experts + 1, KEYS_ALIGNED) + 2 * keys + scales


def _sampler_floats(plan: Plan, half: int) -> tuple[int, int]:
    """What the full sampler needs: of every block behind its head, and of the block that draws."""
    items, buckets = plan.ranks * plan.blocks, LEVEL_FLOATS * SAMPLE_BUCKETS
    # a probe's logits lie in its logits buffer
    rows = block_logits(plan) if plan.spec else 0
    held = SAMPLE_HELD + -(-SAMPLE_HELD // 2)  # and the share of each
    looked_at = max(PROBED_FLOATS + held, 2 * items)
    return (
        max(2 * half, MEETING_FLOATS + buckets) + rows,
        MEETING_FLOATS + SHARE_FLOATS * items + looked_at,
    )


def block_logits(plan: Plan) -> int:
    """Logits of a block, at most."""
    return up(-(-plan.shard.vocab // plan.blocks), 4)


def logits_buffers_floats(plan: Plan) -> int:
    """What the blocks of a rank make of their logits for the full sampler, in two steps."""
    if plan.options.sampling is not Sampling.FULL:
        return 0
    return 2 * plan.blocks * logits_buffer_floats(plan)


def logits_buffer_floats(plan: Plan) -> int:
    """What one block makes of its logits (logits_buffer.cuh)."""
    return LOGITS_FIRST + LEVEL_FLOATS * SAMPLE_BUCKETS + 2 * block_logits(plan)


def _choice_floats(plan: Plan) -> int:
    if not plan.kernel_routed:
        return 0
    top_k = max(stage.routed.top_k for stage in plan.stages if stage.routed)
    return up(CHOICE_WORDS * top_k + COUNTS, LINE_FLOATS)


def _kept_floats(plan: Plan) -> int:
    kept = [m.owned for s in plan.stages if s.kept and plan.kernel_routed for m in s.matrices]
    rows = max((hi - lo for owned in kept for lo, hi in owned), default=-KEPT_FIRST)
    return up(KEPT_FIRST + rows, LINE_FLOATS)


def _scored_floats(plan: Plan) -> int:
    made = scores_of(plan)
    return up(made.rows + 1, LINE_FLOATS) if made else 0


def _residuals_floats(plan: Plan) -> int:
    """Residuals; two numbers of each, one of each two, and the outputs of a mixing matrix."""
    hyper = plan.spec.hyper if plan.spec and plan.attentions else None
    if hyper is None:
        return 0
    return up(hyper.residuals * plan.shard.hidden + 2 * hyper.mixes, LINE_FLOATS)


def _compressed_floats(plan: Plan, stage: Stage) -> int:
    """Compressed attention: what a block gathers, a new entry, what it makes of heads."""
    gathered = sum(
        max((sum(hi - lo for lo, hi in spans) for spans in read.spans), default=0)
        for read in stage.reads
    )
    scan = stage.scan
    made = scan.dim + scan.group * (scan.dim + 2) if scan else 0
    return gathered + made


def _channel_floats(plan: Plan) -> int:
    owned = [s.matrix.owned for s in plan.convolving_stages if s.matrix]
    return up(max((hi - lo for spans in owned for lo, hi in spans), default=0), LINE_FLOATS)
