"""Where a cache ends, read off a curve of streams: seconds a byte by footprint.

What the system says of a cache is no help: a virtual machine is given the size of a cache that it
shares with others, a container often nothing. The curve has two levels, what comes from the cache
and what comes from memory, and between them the share that the cache keeps (twin/cost/terms.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from twin.cost.terms import kept_share
from twin.hardware.types import Cache

GRID = 8  # capacities tried for each factor of two
CONTRAST = 1.15  # memory's seconds a byte over the cache's, from which there is a knee
LEAST_POINTS = 3
BEHIND = 1.5  # times the capacity that the largest footprint is at least: memory must be seen


@dataclass(frozen=True, slots=True)
class Knee:
    capacity_bytes: float
    cache_bytes_per_s: float
    memory_bytes_per_s: float


def knee(seconds: Mapping[int, float], cache: Cache) -> Knee | None:
    """The capacity, in all, by which a curve of {footprint: seconds of a step} is explained best,
    with the law by which `cache` keeps a stream; None where the curve has no two levels.
    """
    sizes = sorted(seconds)
    if len(sizes) < LEAST_POINTS:
        return None
    per_byte = np.array([seconds[size] / size for size in sizes])
    least, most = sizes[0] / 2**0.5, sizes[-1] / BEHIND
    steps = max(1, math.ceil(GRID * math.log2(most / least)))
    tried = [least * 2 ** (at / GRID) for at in range(steps)]
    found = [(*_levels(sizes, per_byte, one, cache), one) for one in tried]
    _, fast, slow, capacity = min(found)
    if slow < CONTRAST * fast:
        return None
    return Knee(capacity, 1 / fast, 1 / slow)


def _levels(
    sizes: list[int], per_byte: np.ndarray, capacity: float, cache: Cache
) -> tuple[float, float, float]:
    """(misfit, seconds a byte from the cache, from memory) with a capacity."""
    number = replace(cache.capacity_bytes, value=capacity, low=None, high=None)
    law = replace(cache, capacity_bytes=number, block_bytes=None)
    kept = np.array([kept_share(size, law, blocks=1) for size in sizes])
    shares = np.column_stack([kept, 1 - kept]) / per_byte[:, None]  # relative errors count alike
    levels, *_ = np.linalg.lstsq(shares, np.ones(len(sizes)), rcond=1e-6)
    fast, slow = np.clip(levels, 0.5 * per_byte.min(), 2 * per_byte.max())
    misfit = float(np.sum((shares @ np.array([fast, slow]) - 1) ** 2))
    return misfit, float(fast), float(slow)
