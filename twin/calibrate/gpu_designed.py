"""Chains of layers in shapes that fill space: columns, rows, heads, groups and layers of a Latin
hypercube.

Benchmarks and held-out runs repeat few shapes; a fit to those learns them. SHAPES is a table
because a computer that only measures has no SciPy; `design` makes it, and a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from twin.calibrate.drawn_kinds import log_between
from twin.calibrate.gpu_layers import SPLITS, Question, chain_plan, chain_spec
from twin.plan.types import Limits

PREFIX = "design-"
COUNT, SEED = 20, 20261123
GPU_SECONDS = 90.0  # most that all of them may take on the GPU, compiling aside
LAYER_BYTES = 600e6  # of all layers of a shape, at most: three repeats then take half a second
# the last two over the hidden size
HIDDEN, FEED, ATTENDED = (448.0, 5120.0), (2.0, 5.5), (0.6, 1.5)
LAYERS, GROUPS, HEAD_DIMS = (2, 14), 8, (64, 128)
GRAIN = 64  # of hidden sizes; feed-forwards take twice as much


class Shape(NamedTuple):
    """Of one chain."""

    layers: int
    hidden: int
    group: int  # query heads of a KV head
    kv_heads: int
    head_dim: int
    ffn: int


SHAPES = (
    Shape(2, 3456, 2, 12, 128, 7808),
    Shape(3, 2560, 8, 2, 128, 11392),
    Shape(7, 1472, 3, 8, 64, 7808),
    Shape(7, 1792, 6, 3, 128, 5632),
    Shape(9, 576, 1, 5, 128, 2176),
    Shape(11, 832, 7, 3, 64, 2304),
    Shape(4, 1344, 5, 3, 128, 3328),
    Shape(2, 1024, 2, 10, 64, 4864),
    Shape(2, 512, 6, 1, 128, 1152),
    Shape(7, 1536, 5, 1, 128, 5376),
    Shape(7, 768, 7, 1, 128, 3840),
    Shape(5, 1088, 3, 4, 64, 2560),
    Shape(2, 3136, 8, 5, 64, 9088),
    Shape(3, 2432, 1, 30, 64, 7808),
    Shape(8, 2048, 4, 8, 64, 4224),
    Shape(13, 640, 5, 1, 64, 2688),
    Shape(2, 3904, 7, 10, 64, 15232),
    Shape(9, 640, 2, 2, 128, 1792),
    Shape(2, 4416, 4, 6, 128, 20096),
    Shape(2, 5056, 3, 39, 64, 17024),
)


def designed(limits: Limits) -> Iterator[Question]:
    """A chain of each shape, as the engine's layers; fitted with the other chains."""
    for number, shape in enumerate(SHAPES, start=1):
        name = f"{PREFIX}{number:02d}"
        spec = chain_spec(
            name,
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.group * shape.kv_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn,
        )
        splits = max(1, min(SPLITS, limits.blocks // shape.kv_heads))
        yield name, "chain", chain_plan(limits, spec, attention_splits=splits)


def design() -> tuple[Shape, ...]:
    """The shapes, from SciPy's Latin hypercube of least centred discrepancy."""
    from scipy.stats import qmc  # slow to load, and only whoever changes the design needs it

    points = qmc.LatinHypercube(d=6, optimization="random-cd", rng=SEED).random(COUNT)
    return tuple(_shape(*point) for point in points)


def _shape(
    size: float, feed: float, attended: float, group: float, wide: float, deep: float
) -> Shape:
    hidden = GRAIN * round(log_between(*HIDDEN, size) / GRAIN)
    head_dim = HEAD_DIMS[int(wide * len(HEAD_DIMS))]
    of_group = 1 + int(group * GROUPS)
    kv_heads = max(1, round(hidden * log_between(*ATTENDED, attended) / (head_dim * of_group)))
    ffn = 2 * GRAIN * round(hidden * log_between(*FEED, feed) / (2 * GRAIN))
    weights = hidden * (head_dim * kv_heads * (2 * of_group + 2) + 3 * ffn)
    most = max(LAYERS[0], int(LAYER_BYTES / (2 * weights)))
    layers = min(most, LAYERS[0] + int(deep * (LAYERS[1] - LAYERS[0] + 1)))
    return Shape(layers, hidden, of_group, kv_heads, head_dim, ffn)
