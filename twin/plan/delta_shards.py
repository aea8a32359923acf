"""A rank's rows of a layer with recurrent states. Checkpoints store them by key head, or each kind
in a matrix, or all in one; a plan has them by what they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.models.mixers import DeltaNet, Mamba2, Recurring

Rows = NDArray[np.intp]


def projected_rows(kind: Recurring, ranks: int, rank: int) -> tuple[tuple[str, Rows], ...]:
    """(matrix, its rows) of all queries, all keys, all values, all output gates, in this order:
    `qkvz` has [key heads][query, key, values, output gates]. Mamba-2's `state_in` has all output
    gates, all x, B, C and time steps; these come last here, too.
    """
    if isinstance(kind, Mamba2):
        return (("state_in", _of_states(kind, ranks, rank)),)
    values = kind.per_key * kind.value_dim
    if not kind.split:
        parts = (kind.key_dim, kind.key_dim, values, values)
        return (("qkvz", _by_part(kind, parts, ranks, rank)),)
    own = channels_of_rank(kind, ranks, rank)
    return ("qkv", own), ("z", _share(kind.key_heads * values, ranks, rank))


def steering_rows(kind: DeltaNet, ranks: int, rank: int) -> tuple[tuple[str, Rows], ...]:
    """(matrix, its rows) of all write strengths, all decays: `ba` has [key heads][both]."""
    if not kind.split:
        return (("ba", _by_part(kind, (kind.per_key, kind.per_key), ranks, rank)),)
    own = _share(kind.value_heads, ranks, rank)
    return ("b", own), ("a", own)


def channels_of_rank(kind: Recurring, ranks: int, rank: int) -> Rows:
    """Convolved channels of a rank: queries, keys and values, of a checkpoint's. Mamba-2's are x,
    B, C there.
    """
    keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
    begins = (values + keys, values, 0) if isinstance(kind, Mamba2) else (0, keys, 2 * keys)
    return np.concatenate(
        [
            begin + _share(count, ranks, rank)
            for begin, count in zip(begins, (keys, keys, values), strict=True)
        ]
    )


def _of_states(kind: Mamba2, ranks: int, rank: int) -> Rows:
    values = kind.value_heads * kind.value_dim
    steps = values + kind.channels + _share(kind.value_heads, ranks, rank)
    convolved = values + channels_of_rank(kind, ranks, rank)
    return np.concatenate([convolved, _share(values, ranks, rank), steps])


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
