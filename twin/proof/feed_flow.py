"""What the stages of a layer's feed-forward (dense or experts) must be and read, derived from the
model alone.
"""

from __future__ import annotations

from itertools import pairwise

from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.formats import WHOLE_ROW
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Routed, Span
from twin.plan.options import RouterInput
from twin.plan.types import Stage, Value
from twin.proof.layer_walk import LayerWalk
from twin.proof.stored import DECODED
from twin.proof.walk import Need


def fed(layer: LayerWalk, kind: DenseFeed | ExpertFeed, reads: list[Need]) -> tuple[Value, ...]:
    """The partial sums that it adds to the residual: of experts next to a dense MLP, that one's
    too.
    """
    if isinstance(kind, ExpertFeed) and kind.experts and kind.top_k:
        return _experts(layer, kind, reads)
    width, prefix = (
        (kind.width, "") if isinstance(kind, DenseFeed) else (kind.shared_width, "shared_")
    )
    ffn = layer.share(width)
    act = layer.rows(StageKind.GATE_UP, reads, [(ffn, f"{prefix}up")], unit=1 + kind.gated)
    made = [(layer.walk.spec.hidden, f"{prefix}down")]
    return (layer.rows(StageKind.DOWN, [layer.all(act)], made, cols=ffn),)


def _experts(layer: LayerWalk, kind: ExpertFeed, reads: list[Need]) -> tuple[Value, ...]:
    walk, hidden = layer.walk, layer.walk.spec.hidden
    gates, rows = int(kind.shared_gate), 1 + kind.gated  # rows of an element
    if layer.plan.attention is not None:  # the engine's router has the gate's row behind its own
        scored = [(layer.common(kind.experts + gates), "router")]
    else:
        scored = [
            (layer.common(kind.experts), "router"),
            *([(layer.common(1), "shared_expert_gate")] if gates else []),
        ]
    own = layer.options.router_input is RouterInput.OWN
    if own:
        logits = _summed_logits(layer, kind.experts + gates)
    else:
        logits = layer.rows(StageKind.ROUTER, reads, scored, common=True)
    act, always = None, _always(layer, kind)
    if kind.shared_width and not always:
        shared = _shared_share(layer, kind.shared_width)
        act = layer.rows(StageKind.SHARED_UP, [], [(shared, "shared_up")], unit=rows)
    route = walk.peek(StageKind.ROUTE, layer.index)
    seen = [*(reads if own else []), layer.all(logits)]
    walk.take(StageKind.ROUTE, layer.index, seen, elements=None)
    known = 0 if kind.hashed else route.index
    dense = []
    if act is not None and kind.parallel:
        made = [(hidden, "shared_down")]
        dense += [layer.rows(StageKind.SHARED_DOWN, [layer.all(act)], made, cols=act.elements)]
    up = walk.peek(StageKind.ROUTED_UP, layer.index)
    pack = up.matrix.pack if up.matrix else 0
    width = _slice(layer, kind.width, pack, "down", layer.ranks // layer.options.expert_ranks)
    _chosen(layer, up, kind, known)
    wanted = _shares_of_chosen(layer, kind, width, up.matrix)
    value = walk.take(
        StageKind.ROUTED_UP,
        layer.index,
        [],
        elements=wanted[-1][1],
        matrix=[(rows * width, hidden, rows)],
    )
    if value.owned != wanted:
        walk.say(
            up,
            "blocks do not publish their shares of the chosen experts' rows in block order, "
            f"{wanted[0]} the first",
        )
    kept = None
    if act is not None and not kind.parallel:
        kept = walk.peek(StageKind.SHARED_DOWN, layer.index)
        if not kept.kept:
            walk.say(kept, "throws the shared experts' sums away")
        walk.take(
            StageKind.SHARED_DOWN,
            layer.index,
            [layer.all(act)],
            elements=None,
            matrix=[(hidden, act.elements, 1)],
        )
    down = walk.peek(StageKind.ROUTED_DOWN, layer.index)
    _chosen(layer, down, kind, known)
    if kept is not None and [m.owned for m in kept.matrices] != [m.owned for m in down.matrices]:
        walk.say(down, "blocks do not own the rows whose sums they kept")
    made = [(hidden, "down")]
    return (*dense, layer.rows(StageKind.ROUTED_DOWN, [layer.all(value)], made, cols=width))


def _summed_logits(layer: LayerWalk, logits: int) -> Value:
    """Every block adds to each what its own rows of the residual make. The stage before must be the
    one that makes them, of all blocks together the whole residual, and nothing may be normed
    between.
    """
    walk, hidden = layer.walk, layer.walk.spec.hidden
    stage = walk.peek(StageKind.ROUTER, layer.index)
    made, norms = layer.plan.stages[stage.index - 1], walk.spec.variant.norms
    if made.kind is not StageKind.O_PROJ or [m.rows for m in made.matrices] != [hidden]:
        walk.say(stage, f"adds up logits behind {made.name}, which makes no rows of the residual")
    if norms.after or not norms.before or layer.plan.ranks > 1:
        walk.say(stage, "adds up logits of rows that are not yet the residual's")
    # in sectors of four numbers of 64 bits, 128 words from each to the next
    value = walk.take(
        StageKind.ROUTER,
        layer.index,
        [],
        elements=128 * -(-logits // 4),
        matrix=[(logits, hidden, 1)],
    )
    if not value.summed:
        walk.say(stage, f"{value.name} is read as a sum of all blocks, but each writes its own")
    return value


def _shares_of_chosen(
    layer: LayerWalk, kind: ExpertFeed, width: int, matrix: Matrix | None
) -> tuple[Span, ...]:
    """One token on a rank with all experts always multiplies top_k of them: the stacked rows
    themselves, divided evenly and in order, in whole tiles of a plan with low-bit weights.
    Otherwise a block's elements follow each other whatever the draw, with room for the largest
    share of such tiles.
    """
    blocks, options = layer.plan.blocks, layer.options
    held = kind.experts // options.expert_ranks
    rows = (min(held, options.tokens * kind.top_k) + _always(layer, kind)) * width
    coded = matrix is not None and matrix.pack
    whole = matrix.tile_rows // (1 + kind.gated) if matrix is not None and coded else 1
    if options.tokens == 1 and options.expert_ranks == 1:
        ends = [rows // whole * at // blocks * whole for at in range(blocks + 1)]
        return tuple(pairwise(ends))
    most = -(-rows // (whole * blocks)) * whole
    return tuple((at * most, (at + 1) * most) for at in range(blocks))


def _chosen(layer: LayerWalk, stage: Stage, kind: ExpertFeed, known: int) -> None:
    """A routed stage's weights may be fetched behind the stage at which the routing is known,
    not before.
    """
    held, always = kind.experts // layer.options.expert_ranks, _always(layer, kind)
    most = min(held, layer.options.tokens * kind.top_k)
    routed = Routed(
        held + always, most + always, kind.experts + always, kind.top_k + always, always
    )
    if stage.routed != routed:
        layer.walk.say(stage, f"its experts are {stage.routed}, the model has {routed}")
    if stage.gate is None or stage.gate < known:
        layer.walk.say(
            stage, f"fetches experts behind stage {stage.gate}; they are known behind {known}"
        )


def _always(layer: LayerWalk, kind: ExpertFeed) -> int:
    """Shared experts that every token chooses: an engine's, of a routed one's width and formats in
    all layers, whose blocks of scales do not cross from one to the next.
    """
    if layer.plan.attention is None or not kind.shared_width or kind.shared_width % kind.width:
        return 0
    if kind.parallel:  # they see another input, and are normed alone
        return 0
    count, spec = kind.shared_width // kind.width, layer.walk.spec
    for at in range(spec.layers) if spec.formats.layers else (layer.index,):
        if not isinstance(spec.layer(at).feed, ExpertFeed):
            continue
        forms = {weight.name: weight.format for weight in spec.layer_weights(at)}
        for name in ("gate", "up", "down")[not kind.gated :]:
            form = forms[name]
            cut = [side for side in form.block if side not in (0, WHOLE_ROW) and kind.width % side]
            if form != forms[f"shared_{name}"] or (count > 1 and cut):
                return 0
    return count


def _shared_share(layer: LayerWalk, width: int) -> int:
    """Columns of the shared experts on a rank; those that the twin alone runs divide evenly."""
    if layer.plan.attention is None:
        return layer.share(width)
    matrix = layer.walk.peek(StageKind.SHARED_UP, layer.index).matrix
    return _slice(layer, width, matrix.pack if matrix else 0, "shared_down", layer.ranks)


def _slice(layer: LayerWalk, width: int, pack: int, name: str, ranks: int) -> int:
    """Columns of an expert on one of the ranks that divide it: whole groups of scales; in
    low-bit plans whole loads of `pack` columns, and on several ranks whole blocks of each format.
    """
    form = layer.weights[name].format
    high, wide = form.block
    grain = max(8, wide) if ranks > 1 and high == 1 and wide != WHOLE_ROW else 8
    if pack:
        blocks = [DECODED[form.name][1] or pack for form in layer.walk.spec.coded]
        grain = max([pack, *blocks]) if ranks > 1 else pack
    return grain * -(-width // (grain * ranks))
