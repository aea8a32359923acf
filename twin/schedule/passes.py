"""How blocks read a prompt in passes: which stages, which rows of which matrix, which tokens.

A pass reads the weights of all layers once for up to `prompt_chunk` tokens, to fill caches and
states. The last token of a prompt is an ordinary step, so a pass needs neither the LM head nor what
follows the last layer's keys and values, or its state. Between stages all blocks of all ranks meet
at a full barrier, so its numbers need neither flags nor resets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from twin.frozen import frozen
from twin.models.spec import DType
from twin.plan.attention import Attention
from twin.plan.catalogue import ROWS, InPass, StageKind
from twin.plan.matrix import Matrix, Routed, Span
from twin.plan.types import Plan, Stage
from twin.schedule.chooser import Chooser
from twin.schedule.splits import KEPT_HEAD

# On tensor cores:
STEP_COLUMNS = 64  # of a product's step, 128 bytes of a row
# of a block at a time; as many blocks share their rows as a chunk has tiles, or a few more
TILE_TOKENS = 128
GROUP_TOKENS = 64  # of a warp group
WIDTHS = (32, 64, 128, 192, 256)  # rows that a block takes together
# of a tile of cached keys and values; of heads whose queries lie in shared memory next to the tiles
SCAN_POSITIONS, WIDE_POSITIONS = 64, 32
SCAN_HEAD = 256  # elements of a head, at most: outputs lie in registers
SCAN_ROWS = 128  # of queries that share a block's tiles
PAIR_BYTES = 32  # of a key that a warp loads at once
# of an expert that a block multiplies together, and that it decodes before: so many, in 16 bits, of
# all blocks stay in an H200's second-level cache
ROUTED_ROWS, DECODED_ROWS = 256, 64
ONE_AFTER_THE_OTHER = {
    StageKind.EMBED,
    StageKind.QKV,
    StageKind.ATTENTION,
    StageKind.O_PROJ,
    StageKind.GATE_UP,
    StageKind.DOWN,
    StageKind.LM_HEAD,
}
ROUND_SPLITS = 16  # of a KV head's cache at most, where passes verify drafts
# stages that multiply what another's norm has left
FINDS_NORMED = (StageKind.DELTA_GATES, StageKind.SHARED_UP)
# of all blocks behind a round's stages: each block's best logits are there; the next round is
ROUND_MEETINGS = 2
EIGHT_BIT_ROWS = 128  # the same of codes of eight bits, which are decoded in shared memory


@frozen
class PassStage:
    """One stage of a pass."""

    stage: Stage
    # of its matrix, that one block multiplies at most; of one expert, together; 0 without a matrix
    rows: int
    batches: int = 0  # of rows of one expert; 0 of a stage without experts

    @property
    def multiplied(self) -> Matrix | None:
        """The router's logits are each block's own, of its own tokens."""
        return None if self.stage.kind is StageKind.ROUTER else self.stage.matrix


@frozen(kw_only=True)
class Passes:
    """Of a plan whose kernel reads prompts so."""

    plan: Plan
    chunk: int  # tokens of a pass
    stages: tuple[PassStage, ...]  # attention, if it is the last one, only appends
    # NVIDIA: are rows decoded before they are multiplied, and recurrent states carried on by many
    # tokens at once? Does attention run on tensor cores?
    decodes: bool
    tensor: bool
    # NVIDIA: rows of an expert that a block multiplies together; low-bit weights: blocks whose rows
    # of a down projection it multiplies together
    batch: int
    owners: int
    # of a pass that verifies drafts: all, the LM head too; none in plans without
    rounds: tuple[PassStage, ...] = ()

    @property
    def round_splits(self) -> int:
        """Of each KV head's cache, on tensor cores, in a pass that verifies drafts: blocks look at
        one each. Every so manyth tile of positions belongs to a split, whatever the pass holds, so
        sums have one order.
        """
        heads = self.plan.kernel_attention().kv_heads
        return max(1, min(ROUND_SPLITS, self.plan.blocks // heads))

    @property
    def handed_on(self) -> bool:
        """Do blocks hand a round's numbers on one by one, as steps do, instead of meeting behind
        each stage? On tensor cores, of a rank that has its GPU's whole model, by BF16 tiles of
        eight rows.
        """
        return bool(self.rounds) and self.tensor and _handed_on(self.plan, self.rounds)

    def meetings(self, stage: Stage) -> int:
        """Full barriers of all blocks at a stage of a round that is not handed on: before what it
        reads, between a norm and the products that read all of it, between steps of attention and
        of experts.
        """
        match stage.kind:
            case StageKind.ROUTE:
                return 0
            case StageKind.ATTENTION:
                return 3 if self.tensor else 1
            case StageKind.DELTA:
                return 3
            case StageKind.ROUTED_DOWN:
                return 2
            case StageKind.ROUTED_UP | StageKind.ROUTER:
                return 1
        normed = bool(ROWS[stage.kind].norm) and stage.kind not in FINDS_NORMED
        return 1 + normed + (stage.kind is StageKind.CONV_IN)

    def count(self, tokens: int) -> int:
        """Passes that read all but the last of `tokens` prompt tokens."""
        return -(-(tokens - 1) // self.chunk)

    def weight_bytes(self, tokens: int | None = None) -> int:
        """Weights that one pass of so many tokens (else of a whole chunk) streams, all ranks
        together: of experts those that some token chooses.
        """
        tokens = self.chunk if tokens is None else tokens
        plan, stages = self.plan, [one.stage for one in self.stages]
        return plan.ranks * round(
            sum(
                plan.stored_bytes(s.matrix, s.matrix.rows, s.matrix.cols)
                * (experts_used(s.routed, tokens) if s.routed else 1)
                for s in stages
                if s.matrix
            )
        )


def passes_of(plan: Plan, chooser: Chooser) -> Passes | None:
    """None where prompts are read by ordinary steps."""
    chunk = plan.options.prompt_chunk
    if chunk == 1 or plan.spec is None:
        return None
    last = max((s.index for s in plan.stages if ROWS[s.kind].keeps), default=-1)
    stages = [s for s in plan.stages[: last + 1] if ROWS[s.kind].in_pass is InPass.RUN]
    decodes = chooser.decodes
    batch = batch_rows(plan) if decodes and plan.kernel_routed else 0
    owners = _owners(plan, batch) if plan.coded else 1

    def made(stages: Iterable[Stage]) -> tuple[PassStage, ...]:
        return tuple(_pass_stage(plan, stage, batch, owners) for stage in stages)

    return Passes(
        plan=plan,
        chunk=chunk,
        stages=made(stages),
        decodes=decodes,
        tensor=decodes and tensor_heads(plan.kernel_attention(), plan.options.kv_dtype.bytes),
        batch=batch,
        owners=owners,
        rounds=made(_verified(plan)) if plan.options.lookup else (),
    )


def with_rounds(passes: Passes) -> Passes:
    """The same with the stages of a round, of a plan without drafts: to predict what they take."""
    plan = passes.plan
    made = (_pass_stage(plan, stage, passes.batch, passes.owners) for stage in _verified(plan))
    return replace(passes, rounds=tuple(made))


HANDED_ROWS, HANDED_SLICES = 8, 8  # of a tile; column slices of the residual that threads hold


def _handed_on(plan: Plan, stages: Iterable[PassStage]) -> bool:
    spec, kinds = plan.spec, {one.stage.kind for one in stages}
    assert spec is not None
    norms = spec.variant.norms
    matrices = [one.stage.matrix for one in stages if one.stage.matrix]
    return (
        plan.ranks == 1
        and not plan.coded
        and not spec.draft_head
        and plan.options.weight_dtype is DType.BF16
        and kinds <= ONE_AFTER_THE_OTHER
        and norms.before
        and not norms.after
        and not (spec.whole_qk_norm or spec.variant.layer_scalar or spec.output_gate)
        and {(one.tile_rows, one.tile_cols) for one in matrices}
        == {(HANDED_ROWS, matrices[0].tile_cols)}
        and plan.shard.hidden <= HANDED_SLICES * matrices[0].tile_cols
    )


def _verified(plan: Plan) -> list[Stage]:
    head = next(stage.index for stage in plan.stages if stage.kind is StageKind.LM_HEAD)
    return [s for s in plan.stages[: head + 1] if ROWS[s.kind].in_pass is InPass.RUN]


def batch_rows(plan: Plan) -> int:
    """Of an expert, that an NVIDIA block multiplies together at most."""
    if not plan.coded:
        return ROUTED_ROWS
    return EIGHT_BIT_ROWS if eight_bits(plan) else DECODED_ROWS


def eight_bits(plan: Plan) -> bool:
    """Have all experts' weights so many?"""
    formats = [s.matrix.format for s in plan.stages if s.matrix and s.routed]
    return all(form is not None and form.bits == 8 for form in formats)


def _owners(plan: Plan, batch: int) -> int:
    downs = [s for s in plan.stages if s.kind is StageKind.ROUTED_DOWN and plan.kernel_routed]
    if batch != EIGHT_BIT_ROWS:
        return max(1, min(batch // max([1, *map(_share, downs)]), plan.blocks))
    held = {s.matrix.owned for s in downs if s.matrix}
    fitting = range(plan.blocks, 1, -1)
    return next((n for n in fitting if all(_most_rows(one, n) <= batch for one in held)), 1)


def _most_rows(owned: tuple[Span, ...], owners: int) -> int:
    """Of so many neighbouring blocks, from an even one on: `skew` in cuda_prompt.cuh."""
    groups = (owned[at : at + owners] for at in range(0, len(owned), owners))
    return max(group[-1][1] - group[0][0] // 2 * 2 for group in groups)


def _pass_stage(plan: Plan, stage: Stage, batch: int, owners: int) -> PassStage:
    if not stage.routed or not stage.matrix:
        return PassStage(stage, _share(stage))
    if plan.coded and stage.kind is StageKind.ROUTED_DOWN:
        return PassStage(stage, min(owners * _share(stage), batch), -(-plan.blocks // owners))
    # `batch` in native/monokernel/row_batches.cuh
    high = stage.matrix.tile_rows
    rows = max(1, batch // high) * high
    return PassStage(stage, min(rows, stage.matrix.rows), -(-stage.matrix.rows // rows))


def _share(stage: Stage) -> int:
    """Rows of the matrix that one block multiplies at most; 0 without a matrix."""
    return max(hi - lo for lo, hi in stage.matrix.owned) if stage.matrix else 0


def experts_used(routed: Routed, tokens: int) -> float:
    """Experts of a layer that some of the tokens visit, where all are as likely to be chosen."""
    total, chosen = routed.total - routed.always, routed.top_k - routed.always
    return routed.always + total * (1 - (1 - chosen / total) ** tokens)


def tensor_heads(own: Attention, kv_bytes: int) -> bool:
    """Do the tensor cores take such heads and such a cache?"""
    return (
        kv_bytes <= 2
        and own.head_dim % (PAIR_BYTES // kv_bytes) == 0
        and 0 < own.head_dim <= SCAN_HEAD
        and 0 < own.group <= SCAN_ROWS
    )


def scan_positions(head_dim: int) -> int:
    """Cached positions that a block's warps look at together on tensor cores."""
    return SCAN_POSITIONS if head_dim <= KEPT_HEAD else WIDE_POSITIONS


def sharing(tokens: int, chunk: int, blocks: int) -> tuple[int, int, int]:
    """(blocks that share their rows, tiles of tokens that each of them takes one after the other,
    tokens of a tile), where that takes longest; Chunk::open in cuda_prompt.cuh.
    """
    tile = min(chunk, TILE_TOKENS)
    together = GROUP_TOKENS if tokens <= tile and tile > GROUP_TOKENS else tile
    tiles = -(-tokens // together)
    most = max(chunk // tile, -(-tile // GROUP_TOKENS))
    groups = _groups(members_of(tiles, most, blocks), blocks)
    group = max(groups, key=lambda group: _duration(tiles, group))
    return group, -(-tiles // group), together


def members_of(tiles: int, most: int, blocks: int) -> int:
    """How many neighbouring blocks share their rows, up to `most`; Chunk::sharing in
    cuda_prompt.cuh.

    As many as a chunk has tiles, or a few more, some of them idle, where the last blocks, fewer
    than the others, would hold up all: of 132 blocks seven leave six, one of which would take two
    of seven tiles, and five leave two, one of which would take three of five.
    """

    def slowest(members: int) -> tuple[int, int]:
        return max(_duration(tiles, group) for group in _groups(members, blocks))

    return min(range(tiles, max(tiles, most) + 1), key=lambda members: (slowest(members), members))


def _groups(members: int, blocks: int) -> set[int]:
    """Sizes of groups that share their rows: all but the last have `members` blocks."""
    return ({members} if blocks >= members else set()) | ({blocks % members} - {0})


def _duration(tiles: int, group: int) -> tuple[int, int]:
    """(shares of rows that a block of a group multiplies, times tiles; tiles that it takes one
    after the other).
    """
    turns = -(-tiles // group)
    return turns * group, turns


def batch_of(rows: int, together: int, most: int = WIDTHS[-1]) -> tuple[int, int]:
    """(rows that a block takes together, steps between two of its barriers); Chunk::width_of in
    cuda_prompt.cuh.
    """
    wide = min(
        (width for width in WIDTHS if width <= most),
        key=lambda width: (-(-rows // width) * (width + together), WIDTHS.index(width)),
    )
    return wide, 2 if wide <= GROUP_TOKENS else 1
