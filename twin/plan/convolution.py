"""Gated short convolutions.

A layer has two stages before its feed-forward half. CONV_IN multiplies; whoever has a channel's
rows of b, c and x has its history, too, and publishes c * conv(b * x): no hand-off lies between.
O_PROJ multiplies that.
"""

from __future__ import annotations

from twin.models.mixers import ShortConvolution
from twin.plan.attending import Weights, output_projection
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.matrix import CONV_UNIT
from twin.plan.residuals import stored, vector
from twin.plan.spans import share
from twin.plan.types import Read, Value


def convolution(
    b: Builder, layer: int, kind: ShortConvolution, weights: Weights, reads: list[Read]
) -> Value:
    """On a rank: neighbouring channels, of each the rows of b, c and x."""
    channels, matrix = share(b.spec.name, b.ranks, "channels", kind.channels), weights["conv_in"]
    made = b.rows(
        StageKind.CONV_IN,
        layer,
        [Piece(channels, matrix.cols, stored(b, matrix), unit=CONV_UNIT)],
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "conv_in_proj", "conv"),
    )
    return output_projection(b, layer, weights["o"], [b.whole(made)], channels)
