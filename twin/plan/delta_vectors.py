"""What a rank's stages DELTA and CONV_IN need besides projections: taps of convolutions; decays,
scales.
"""

from __future__ import annotations

import numpy as np

from twin.models.linear import DECAY, NORM, SKIP, STEP, TAPS, TAPS_BIAS
from twin.models.mixers import Mamba2, Recurring
from twin.plan.catalogue import StageKind
from twin.plan.delta_shards import channels_of_rank
from twin.plan.shards import Vector, Weights, channels_of
from twin.plan.types import Plan, Stage


def delta_vectors(plan: Plan, stage: Stage, rank: int, weights: Weights) -> dict[str, Vector]:
    """Of a stage DELTA, by field: `taps` [conv][queries, keys, values of the rank], behind them
    what is added where the convolution has biases; `decays` [2][value heads], the factors of time
    steps in a decay's exponent, and what is added to these steps, of Mamba-2 [3] with the factors
    of x; `gated_norm` [value_dim], of Mamba-2 [value heads of the rank * value_dim]. Empty of any
    other stage.

    Of a stage CONV_IN: `taps` [conv][channels of the rank].
    """
    if stage.kind is StageKind.CONV_IN and weights.spec.convolution:
        all_taps = weights[f"layers.{stage.layer}.{TAPS}"].astype(np.float32)
        taps = all_taps[channels_of(weights.spec.convolution, plan, rank)]
        return {"taps": np.ascontiguousarray(taps.T).reshape(-1)}
    kind = weights.spec.recurrence
    if stage.kind is not StageKind.DELTA or kind is None:
        return {}
    layer = f"layers.{stage.layer}"
    channels = channels_of_rank(kind, plan.ranks, rank)
    taps = weights[f"{layer}.{TAPS}"].astype(np.float32)[channels].T
    if _biased(kind):
        added = weights[f"{layer}.{TAPS_BIAS}"].astype(np.float32)[channels]
        taps = np.concatenate([taps, added[None]])
    heads = kind.value_heads // plan.ranks
    own = slice(rank * heads, (rank + 1) * heads)
    decay, step = (weights[f"{layer}.{name}"][own].astype(np.float32) for name in (DECAY, STEP))
    decays, norm = [-np.exp(decay), step], weights[f"{layer}.{NORM}"].astype(np.float32)
    if isinstance(kind, Mamba2):
        decays.append(weights[f"{layer}.{SKIP}"][own].astype(np.float32))
        norm = norm[rank * heads * kind.value_dim : (rank + 1) * heads * kind.value_dim]
    return {
        "taps": np.ascontiguousarray(taps).reshape(-1),
        "decays": np.concatenate(decays),
        "gated_norm": norm,
    }


def _biased(kind: Recurring) -> bool:
    return isinstance(kind, Mamba2) and kind.conv_bias


def delta_sizes(plan: Plan, stage: Stage) -> dict[str, int]:
    """Elements of these vectors."""
    convolved = plan.spec.convolution if plan.spec and plan.attention else None
    if stage.kind is StageKind.CONV_IN and convolved is not None:
        return {"taps": convolved.conv * convolved.channels // plan.ranks}
    kind = plan.spec.recurrence if plan.spec and plan.attention else None
    if stage.kind is not StageKind.DELTA or kind is None:
        return {}
    heads, mamba = kind.value_heads // plan.ranks, isinstance(kind, Mamba2)
    return {
        "taps": (kind.conv + _biased(kind)) * kind.channels // plan.ranks,
        "decays": (3 if mamba else 2) * heads,
        "gated_norm": kind.value_dim * (heads if mamba else 1),
    }
