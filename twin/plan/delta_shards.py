"""A rank's rows of a gated DeltaNet layer: checkpoints store them by key head, a plan by what they
are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.models.mixers import DeltaNet

Rows = NDArray[np.intp]


def projected_rows(kind: DeltaNet, ranks: int, rank: int) -> Rows:
    """Of `qkvz`, which has [key heads][query, key, values, output gates]: all queries, all keys,
    all values, all gates.
    """
    values = kind.per_key * kind.value_dim
    return _by_part(kind, (kind.key_dim, kind.key_dim, values, values), ranks, rank)


def steering_rows(kind: DeltaNet, ranks: int, rank: int) -> Rows:
    """Of `ba`, which has [key heads][write strengths, decays]."""
    return _by_part(kind, (kind.per_key, kind.per_key), ranks, rank)


def _by_part(kind: DeltaNet, sizes: tuple[int, ...], ranks: int, rank: int) -> Rows:
    heads = kind.key_heads // ranks
    begins = (rank * heads + np.arange(heads)) * sum(sizes)
    ends = np.cumsum(sizes)
    parts = [
        (begins[:, None] + np.arange(end - size, end)).reshape(-1)
        for size, end in zip(sizes, ends, strict=True)
    ]
    return np.concatenate(parts)
