"""YaRN: rotary embeddings for contexts longer than the trained one (arXiv 2309.00071), as
transformers computes them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def magnitude(factor: float, said: float | None, one: float, all_dim: float) -> float:
    """What rotated elements are multiplied by: `said` (attention_factor), or by the factor and
    DeepSeek's `mscale` and `mscale_all_dim` (0: absent).
    """
    if said is not None:
        return said
    if one and all_dim:
        return _grown(factor, one) / _grown(factor, all_dim)
    return _grown(factor, 1.0)


def _grown(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def blended(
    frequencies: NDArray[np.float64],
    theta: float,
    *,
    factor: float,
    context: int,
    turns: tuple[float, float],
    truncate: bool,
) -> NDArray[np.float64]:
    """Frequencies of pairs, in FP64: those that turn `turns[0]` times or more within the original
    context as they are, up to `turns[1]` times divided by `factor`.
    """
    rotated = 2 * len(frequencies)
    low, high = (_pair(rotated, theta, context, count) for count in turns)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high += 0.001 if low == high else 0.0
    divided = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
    made: NDArray[np.float64] = frequencies * (divided / factor + (1.0 - divided))
    return made


def _pair(rotated: int, theta: float, context: int, turns: float) -> float:
    """Which pair turns so often within the context: no whole number."""
    return rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
