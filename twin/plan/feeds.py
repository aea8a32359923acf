"""The stages of a layer's feed-forward half on one rank: dense, or routed and shared experts.

Experts are dealt to `expert_ranks` groups of ranks, whole; the ranks of a group hold a slice of
each (expert_ranks=1: tensor parallelism). The residual is the same on all ranks, so tokens need not
travel: every rank routes, multiplies what it holds, and the partial sums meet as after a dense
layer.
"""

from __future__ import annotations

from twin.models.feeds import DenseFeed, ExpertFeed, Feed, NoFeed, halves_of
from twin.models.formats import Format
from twin.models.weight import Weight
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.coding import COLUMN_STEP
from twin.plan.matrix import Routed, Span, always_all, routed_share
from twin.plan.options import RouterInput
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import share, spread
from twin.plan.types import Read, Value, summed_words

Weights = dict[str, Weight]
EMBED_STAGE = 0  # the step's token is known behind it


def feed(b: Builder, layer: int, kind: Feed, reads: list[Read]) -> tuple[Value, ...]:
    """The feed-forward half from its norm to its down projection, whose partial sums it returns: of
    experts next to a dense MLP, the dense one's and theirs; none of a layer without such a half.
    """
    if isinstance(kind, NoFeed):
        return ()
    weights = {w.name: w for w in b.spec.layer_weights(layer)}
    if isinstance(kind, DenseFeed):
        return (_dense(b, layer, kind, kind.width, weights, "", reads),)
    if not kind.experts or not kind.top_k:
        return (_dense(b, layer, kind, kind.shared_width, weights, "shared_", reads),)
    return _experts(b, layer, kind, weights, reads)


def _unit(kind: DenseFeed | ExpertFeed) -> int:
    """Rows that make one of the elements that a down projection multiplies."""
    return len(halves_of(kind))


def _made(kind: DenseFeed | ExpertFeed, prefix: str = "") -> tuple[str, str]:
    """The kernels of these rows."""
    if kind.gated:
        return f"{prefix}gate_up_proj", "silu_mul"
    return f"{prefix}up_proj", "activation"


def _dense(
    b: Builder,
    layer: int,
    kind: DenseFeed | ExpertFeed,
    width: int,
    weights: Weights,
    prefix: str,
    reads: list[Read],
) -> Value:
    ffn = share(b.spec.name, b.ranks, "feed-forward columns", width)
    up, down = weights[f"{prefix}up"], weights[f"{prefix}down"]
    act = b.rows(
        StageKind.GATE_UP,
        layer,
        [Piece(ffn, up.cols, stored(b, up), unit=_unit(kind))],
        reads=reads,
        vector=vector(b),
        operations=("add_norm", *_made(kind)),
    )
    b.sum_late_parts(layer)
    pieces = [Piece(down.rows, ffn, stored(b, down))]
    return b.rows(
        StageKind.DOWN, layer, pieces, reads=[b.whole(act)], vector=0, operations=("down_proj",)
    )


def _experts(
    b: Builder, layer: int, kind: ExpertFeed, weights: Weights, reads: list[Read]
) -> tuple[Value, ...]:
    """router; shared up; route; routed up; shared down; routed down.

    Shared experts that are like routed ones are chosen by every token. Others' stages stand where a
    block would otherwise wait: for the logits, and for what the chosen experts' rows make. A dense
    MLP next to the experts has the places of shared ones, but its rows are published: they are
    normed alone.
    """
    own = b.options.router_input is RouterInput.OWN
    logits = _summed_logits(b, layer, weights) if own else _logits(b, layer, weights, reads)
    shared = None
    if kind.shared_width and not _always(b):
        shared = _shared_up(b, layer, kind, weights)
    gate = len(b.stages)
    b.stage(
        StageKind.ROUTE,
        layer,
        reads=[*(reads if own else ()), b.whole(logits)],
        publishes=None,
        vector=b.options.tokens * kind.experts * (1 + kind.top_k) + (vector(b) if own else 0),
        operations=(),
    )
    known = EMBED_STAGE if kind.hashed else gate
    dense = []
    if shared is not None and kind.parallel:
        dense.append(_dense_down(b, layer, weights["shared_down"], shared))
    act = _routed_up(b, layer, kind, weights, known)
    if shared is not None and not kind.parallel:
        _shared_down(b, layer, weights["shared_down"], shared)
    return (*dense, _routed_down(b, layer, kind, weights["down"], act, known))


def _logits(b: Builder, layer: int, weights: Weights, reads: list[Read]) -> Value:
    return b.rows(
        StageKind.ROUTER,
        layer,
        _router(b, weights),
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "router", "top_k"),
        pushed=pushes_common(b),
    )


def _summed_logits(b: Builder, layer: int, weights: Weights) -> Value:
    """Every block adds its part of each logit, of what it has just made of the residual. Prompt
    passes multiply the router's rows, which blocks own as they would in steps.
    """
    (piece,) = _router(b, weights)
    elements = summed_words(piece.outputs)
    owned = spread(piece.outputs, b.blocks, b.shift)
    b.shift = (b.shift + piece.outputs) % b.blocks
    value = b.value(
        "logits_summed",
        layer,
        len(b.stages),
        elements=elements,
        pushed=False,
        owned=spread(elements, b.blocks),
        summed=True,
    )
    b.stage(
        StageKind.ROUTER,
        layer,
        reads=(),
        publishes=value.id,
        vector=-(-b.shard.hidden // b.blocks),
        operations=("router", "top_k"),
        matrix=piece.matrix(owned),
    )
    return value


def _router(b: Builder, weights: Weights) -> list[Piece]:
    """The router, and the row that gates shared experts: to the kernel one matrix, whose last logit
    is the gate's.
    """
    router, gate = weights["router"], weights.get("shared_expert_gate")
    if gate is None or b.attention is None:
        matrices = [router] if gate is None else [router, gate]
        return [Piece(common_rows(b, w.rows), w.cols, stored(b, w)) for w in matrices]
    return [Piece(common_rows(b, router.rows + gate.rows), router.cols, stored(b, router))]


def _shared_up(b: Builder, layer: int, kind: ExpertFeed, weights: Weights) -> Value:
    up, down = weights["shared_up"], weights["shared_down"]
    if b.attention is None:
        width = share(b.spec.name, b.ranks, "columns of the shared experts", kind.shared_width)
    else:
        width = _slice(b, kind.shared_width, down.format, b.ranks)
    return b.rows(
        StageKind.SHARED_UP,
        layer,
        [Piece(width, up.cols, stored(b, up), unit=_unit(kind))],
        reads=(),
        vector=_normed_again(b),
        operations=_made(kind, "shared_"),
    )


def _shared_down(b: Builder, layer: int, down: Weight, act: Value) -> None:
    """Publishes nothing: the block adds its rows to those of the routed experts, so both divide the
    rows alike.
    """
    owned = b.owned(down.rows, pushed=b.exchanged(layer))
    (matrix,) = b.matrices([Piece(down.rows, act.elements, stored(b, down))], owned)
    b.stage(
        StageKind.SHARED_DOWN,
        layer,
        reads=[b.whole(act)],
        publishes=None,
        vector=0,
        operations=("shared_down_proj",),
        matrix=matrix,
        kept=True,
    )


def _dense_down(b: Builder, layer: int, down: Weight, act: Value) -> Value:
    pieces = [Piece(down.rows, act.elements, stored(b, down))]
    return b.rows(
        StageKind.SHARED_DOWN,
        layer,
        pieces,
        reads=[b.whole(act)],
        vector=0,
        operations=("shared_down_proj",),
    )


def _always(b: Builder) -> int:
    """Shared experts that the kernel multiplies as chosen ones."""
    return b.spec.shared_like_routed if b.attention else 0


def _routed(b: Builder, kind: ExpertFeed) -> Routed:
    held, tokens, always = kind.experts // b.options.expert_ranks, b.options.tokens, _always(b)
    return Routed(
        experts=held + always,
        most=min(held, tokens * kind.top_k) + always,
        total=kind.experts + always,
        top_k=kind.top_k + always,
        always=always,
    )


def _routed_up(b: Builder, layer: int, kind: ExpertFeed, weights: Weights, gate: int) -> Value:
    """The blocks divide the stacked rows of all chosen experts."""
    up, down = weights["up"], weights["down"]
    width = _slice(b, kind.width, down.format, b.ranks // b.options.expert_ranks)
    routed = _routed(b, kind)
    matrix = Piece(width, up.cols, stored(b, up), unit=_unit(kind)).matrix(())
    # a tile of low-bit weights lies in memory with its scales: blocks do not divide its rows
    step = b.coding.rows_at_once(matrix.format, b.options) // matrix.unit if b.coding else 1
    owned = _shares(routed, width, b.blocks, step)
    act = b.value(
        "routed_up", layer, len(b.stages), elements=owned[-1][1], pushed=False, owned=owned
    )
    b.stage(
        StageKind.ROUTED_UP,
        layer,
        reads=(),
        publishes=act.id,
        vector=_normed_again(b),
        operations=("permute", *_made(kind, "grouped_")),
        matrix=matrix,
        routed=routed,
        gate=gate,
    )
    return act


def _routed_down(
    b: Builder, layer: int, kind: ExpertFeed, down: Weight, act: Value, gate: int
) -> Value:
    """A block has the same rows of each expert."""
    width = _slice(b, kind.width, down.format, b.ranks // b.options.expert_ranks)
    return b.rows(
        StageKind.ROUTED_DOWN,
        layer,
        [Piece(down.rows, width, stored(b, down))],
        reads=[b.whole(act)],
        vector=0,
        operations=("grouped_down_proj", "combine"),
        routed=_routed(b, kind),
        gate=gate,
    )


def _normed_again(b: Builder) -> int:
    """Elements that the kernel norms once more: its vectors stay in registers for one stage."""
    return b.shard.hidden if b.attention else 0


def _shares(routed: Routed, width: int, blocks: int, step: int) -> tuple[Span, ...]:
    """What each block publishes of the chosen experts' rows, stacked. Where draws differ in their
    number, elements are numbered by owner, and each has room for its largest share, in whole steps.
    """
    if always_all(routed):
        total = routed.most * width
        return tuple(routed_share(total, blocks, block, step) for block in range(blocks))
    most = step * -(-routed.most * width // (step * blocks))
    return tuple((block * most, (block + 1) * most) for block in range(blocks))


def _slice(b: Builder, width: int, format: Format, ranks: int) -> int:
    """Columns of an expert on one of the ranks that divide it; slices are whole groups of a
    format's scales, so the last may be padded.
    """
    grain = COLUMN_STEP
    if b.coding:
        grain = max(grain, b.coding.share)
    elif ranks > 1:  # scales of a row's elements cannot be cut
        grain = max(grain, format.row_group)
    return -(-width // (ranks * grain)) * grain
