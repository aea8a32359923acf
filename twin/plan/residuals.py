"""How a module's output joins the residual, and how hyper-connections make one input of several
residuals.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.models.formats import PLAIN, Format, decoded
from twin.models.weight import Weight
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.compressed_shards import mixing_parts
from twin.plan.options import Common, Residual
from twin.plan.spans import spread
from twin.plan.types import Parts, Read, Value


def stored(b: Builder, weight: Weight) -> Format | None:
    """The format of a matrix; None where it has the plan's weight type, which the options choose.

    The model then stores everything in one type, or the engine runs it and the matrix has no
    scales.
    """
    if not b.spec.stored:
        return None
    if b.attention is None:
        return weight.format
    return None if weight.format.name in PLAIN else decoded(weight.format)


def common_rows(b: Builder, rows: int) -> int:
    """Rows that one rank computes of a matrix whose outputs all ranks need."""
    return -(-rows // b.ranks) if pushes_common(b) else rows


def pushes_common(b: Builder) -> bool:
    return b.options.common is Common.SHARDED and b.ranks > 1


def width(b: Builder) -> int:
    """Elements of the residuals of one token."""
    return b.shard.hidden * (b.spec.hyper.residuals if b.spec.hyper else 1)


def vector(b: Builder, reads: Sequence[Read] = ()) -> int:
    """Elements that a block touches to make a module's input: the residual is summed and normed;
    several are collapsed first.

    Where the residual is sliced, its sums come ready, and a norm's factor (one number a token) is
    applied to what is published.
    """
    collapsed = width(b) if b.spec.hyper else 0
    return (
        0 if b.options.residual is Residual.SLICED else summed(b, reads)
    ) + b.options.tokens * collapsed


def summed(b: Builder, reads: Sequence[Read] = ()) -> int:
    """The same of one residual, which some families add to what they have normed first, of two
    modules' outputs (`reads`) each and then their sum.
    """
    normed = b.spec.variant.norms.after * (1 + 2 * (len(reads) > 1))
    return b.options.tokens * (2 + normed) * b.shard.hidden


def landed(b: Builder, layer: int, *values: Value) -> list[Read]:
    """The reads by which the next stage has the residual with a module's partial sums added, or
    those of two that stand next to each other.
    """
    if b.options.residual is not Residual.SLICED:
        return [read for value in values for read in b.residual(layer, value)]
    hidden, residuals = b.shard.hidden, width(b) // b.shard.hidden
    owned = spread(hidden, b.blocks)
    spans = tuple((span,) if span[0] < span[1] else () for span in owned)
    mine = [
        Read(value.id, Parts.ALL if value.pushed else Parts.OWN, spans, residual=True)
        for value in values
    ]
    name = f"reduce.{b.stages[values[-1].stage].kind.value}"
    whole = tuple((residuals * lo, residuals * hi) for lo, hi in owned)
    summed = b.value(
        name, layer, len(b.stages), elements=residuals * hidden, pushed=False, owned=whole
    )
    own = 2 * b.options.tokens * width(b) // b.blocks
    b.stage(StageKind.REDUCE, layer, reads=mine, publishes=summed.id, vector=own, operations=())
    return [b.whole(summed)]


def enter(b: Builder, name: str, layer: int, residual: list[Read]) -> list[Read]:
    """What a module's first stage reads: the residual itself, or with hyper-connections how its
    residuals collapse.

    The mixing matrix [mixes, residuals * hidden] is cut into one piece a residual, so that more
    blocks share it; readers add the pieces.
    """
    hyper = b.spec.hyper
    if hyper is None:
        return residual
    weights = (
        (*b.spec.layer_weights(layer), *b.spec.end_weights())
        if layer >= 0
        else b.spec.end_weights()
    )
    weight = next(w for w in weights if w.name == name)
    parts = mixing_parts(b.options) if b.attention else 1
    piece = Piece(
        common_rows(b, parts * weight.rows * hyper.residuals),
        weight.cols // hyper.residuals,
        stored(b, weight),
    )
    touched = 0 if b.options.residual is Residual.SLICED else 2 * b.options.tokens * width(b)
    mixed = b.rows(
        StageKind.HYPER,
        layer,
        [piece],
        reads=residual,
        vector=touched,
        operations=("hyper_mix",),
        name=name,
        pushed=pushes_common(b),
    )
    return [b.whole(mixed)]
