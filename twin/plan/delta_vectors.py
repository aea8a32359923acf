"""What a rank's stages DELTA and CONV_IN need besides projections: taps of convolutions; decays,
scales.
"""

from __future__ import annotations

import numpy as np

from twin.models.linear import DECAY, NORM, STEP, TAPS
from twin.plan.shards import Vector, Weights, channels_of
from twin.plan.types import Plan, Stage, StageKind


def delta_vectors(plan: Plan, stage: Stage, rank: int, weights: Weights) -> dict[str, Vector]:
    """Of a stage DELTA, by field: `taps` [conv][queries, keys, values of the rank]; `decays`
    [2][value heads], the factors of time steps in a decay's exponent, and what is added to these
    steps; `gated_norm` [value_dim]. Empty of any other stage.

    Of a stage CONV_IN: `taps` [conv][channels of the rank].
    """
    if stage.kind is StageKind.CONV_IN and weights.spec.convolution:
        all_taps = weights[f"layers.{stage.layer}.{TAPS}"].astype(np.float32)
        taps = all_taps[channels_of(weights.spec.convolution, plan, rank)]
        return {"taps": np.ascontiguousarray(taps.T).reshape(-1)}
    kind = weights.spec.delta
    if stage.kind is not StageKind.DELTA or kind is None:
        return {}
    layer = f"layers.{stage.layer}"
    keys, values = (
        kind.key_heads * kind.key_dim // plan.ranks,
        kind.value_heads * kind.value_dim // plan.ranks,
    )
    whole = kind.key_heads * kind.key_dim
    channels = [
        np.arange(first + rank * count, first + (rank + 1) * count)
        for first, count in ((0, keys), (whole, keys), (2 * whole, values))
    ]
    taps = weights[f"{layer}.{TAPS}"].astype(np.float32)[np.concatenate(channels)]
    heads = kind.value_heads // plan.ranks
    own = slice(rank * heads, (rank + 1) * heads)
    decay, step = (weights[f"{layer}.{name}"][own].astype(np.float32) for name in (DECAY, STEP))
    return {
        "taps": np.ascontiguousarray(taps.T).reshape(-1),
        "decays": np.concatenate([-np.exp(decay), step]),
        "gated_norm": weights[f"{layer}.{NORM}"].astype(np.float32),
    }


def delta_sizes(plan: Plan, stage: Stage) -> dict[str, int]:
    """Elements of these vectors."""
    convolved = plan.spec.convolution if plan.spec and plan.attention else None
    if stage.kind is StageKind.CONV_IN and convolved is not None:
        return {"taps": convolved.conv * convolved.channels // plan.ranks}
    kind = plan.spec.delta if plan.spec and plan.attention else None
    if stage.kind is not StageKind.DELTA or kind is None:
        return {}
    return {
        "taps": kind.conv * kind.channels // plan.ranks,
        "decays": 2 * kind.value_heads // plan.ranks,
        "gated_norm": kind.value_dim,
    }
