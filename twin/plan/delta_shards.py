"""A rank's rows of a gated DeltaNet layer. Checkpoints store them by key head, or each kind in a
matrix; a plan has them by what they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.models.mixers import DeltaNet

Rows = NDArray[np.intp]


def projected_rows(kind: DeltaNet, ranks: int, rank: int) -> tuple[tuple[str, Rows], ...]:
    """(matrix, its rows) of all queries, all keys, all values, all output gates, in this order:
    `qkvz` has [key heads][query, key, values, output gates].
    """
    values = kind.per_key * kind.value_dim
    if not kind.split:
        parts = (kind.key_dim, kind.key_dim, values, values)
        return (("qkvz", _by_part(kind, parts, ranks, rank)),)
    keys = kind.key_heads * kind.key_dim
    begins = (0, keys, 2 * keys)
    own = [
        begin + _share(count, ranks, rank)
        for begin, count in zip(begins, (keys, keys, kind.key_heads * values), strict=True)
    ]
    return ("qkv", np.concatenate(own)), ("z", _share(kind.key_heads * values, ranks, rank))


def steering_rows(kind: DeltaNet, ranks: int, rank: int) -> tuple[tuple[str, Rows], ...]:
    """(matrix, its rows) of all write strengths, all decays: `ba` has [key heads][both]."""
    if not kind.split:
        return (("ba", _by_part(kind, (kind.per_key, kind.per_key), ranks, rank)),)
    own = _share(kind.value_heads, ranks, rank)
    return ("b", own), ("a", own)


def _share(count: int, ranks: int, rank: int) -> Rows:
    """A rank's neighbouring rows of `count`."""
    return np.arange(rank * (count // ranks), (rank + 1) * (count // ranks))


def _by_part(kind: DeltaNet, sizes: tuple[int, ...], ranks: int, rank: int) -> Rows:
    heads = kind.key_heads // ranks
    begins = (rank * heads + np.arange(heads)) * sum(sizes)
    ends = np.cumsum(sizes)
    parts = [
        (begins[:, None] + np.arange(end - size, end)).reshape(-1)
        for size, end in zip(sizes, ends, strict=True)
    ]
    return np.concatenate(parts)
