"""What the stages of a model's layers must be and read, derived from the model alone: the residual
from module to module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twin.models.feeds import NoFeed
from twin.models.mixers import NoMixer
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.options import Residual
from twin.plan.types import Value
from twin.proof.feed_flow import fed
from twin.proof.layer_walk import LayerWalk
from twin.proof.mixer_flow import mixed
from twin.proof.walk import Need, Walk


def layers(walk: Walk) -> list[Need]:
    """Takes the stages of all layers; what the head reads."""
    residual: list[Need] = []
    mixes: list[Value] = []
    feeds: list[Value] = []
    for index in range(walk.spec.layers):
        taken, layer = LayerWalk(walk, index), walk.spec.layer(index)
        if not isinstance(layer.mixer, NoMixer):
            mixes.append(mixed(taken, layer.mixer, _entered(taken, "attn_hyper", residual)))
            residual = _landed(taken, mixes)
        if not isinstance(layer.feed, NoFeed):
            *others, last = fed(taken, layer.feed, _entered(taken, "ffn_hyper", residual))
            feeds.append(last)
            residual = _landed(taken, feeds, others)
    return _entered(LayerWalk(walk, -1), "head_hyper", residual)


def _landed(layer: LayerWalk, modules: list[Value], others: Sequence[Value] = ()) -> list[Need]:
    """The newest module's partial sums, added by every block, or by the block that owns the
    element and then read by all; and before them those of `others`, which stand next to it.
    """
    if layer.options.residual is not Residual.SLICED:
        first = [need for value in others for need in layer.walk.residual([value])]
        return first + layer.walk.residual(modules)
    hyper = layer.walk.spec.hyper
    residuals = hyper.residuals if hyper else 1
    stage = layer.walk.peek(StageKind.REDUCE, layer.index)
    summed = layer.plan.values[stage.publishes] if stage.publishes is not None else None
    mine = (
        tuple(
            ((lo // residuals, -(-hi // residuals)),) if lo < hi else () for lo, hi in summed.owned
        )
        if summed
        else ()
    )
    needs = [
        replace(layer.walk.all(value, residual=True), spans=mine)
        for value in (*others, modules[-1])
    ]
    return [
        layer.all(
            layer.walk.take(
                StageKind.REDUCE, layer.index, needs, elements=residuals * layer.walk.spec.hidden
            )
        )
    ]


def _entered(layer: LayerWalk, name: str, residual: list[Need]) -> list[Need]:
    """What a module's first stage reads."""
    hyper = layer.walk.spec.hyper
    if hyper is None:
        return residual
    rows = layer.weights[name].rows * hyper.residuals
    if layer.plan.attentions and layer.options.weight_dtype is not DType.FP32:
        rows *= 2  # the engine multiplies 16 bits, and what these leave of 32
    return [
        layer.all(
            layer.rows(
                StageKind.HYPER,
                residual,
                [(layer.common(rows), name)],
                cols=layer.walk.spec.hidden,
                common=True,
            )
        )
    ]
