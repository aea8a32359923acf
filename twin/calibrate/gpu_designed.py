"""Chains of layers in shapes that fill space: columns, rows, heads, groups, layers, types,
families, positions, splits and hand-offs of a Latin hypercube.

Benchmarks and held-out runs repeat few shapes; a fit to those learns them. SHAPES is a table
because a computer that only measures has no SciPy; `design` makes it, and a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from twin.calibrate.drawn_kinds import log_between, one_of
from twin.calibrate.gpu_layers import CHAIN, WINDOW, Question, chain_plan, chain_spec
from twin.kernel.defaults import is_short, most_slots, tight
from twin.models.spec import DType
from twin.plan.types import HandOffKind, Limits, Options

PREFIX = "shape-"  # records of chains called design- have other windows, and are not fitted again
COUNT, SEED = 40, 20261124
GPU_SECONDS = 120.0  # most that all of them may take on the GPU, compiling aside
LAYER_BYTES = 600e6  # of all layers of a shape, at most: three repeats then take half a second
# the last two over the hidden size
HIDDEN, FEED, ATTENDED = (448.0, 5120.0), (2.0, 5.5), (0.6, 1.5)
LAYERS, GROUPS = (2, 14), 8
POSITIONS = (48.0, 1600.0)  # before the steps that count
PAGE = Options().kv_page
SHORT_WINDOW = 2  # slots in flight where layers are short, as the engine's default
GRAIN = 64  # of hidden sizes; feed-forwards take twice as much
# each as often as it stands here
HEAD_DIMS = (64, 64, 64, 128, 128, 128, 128, 96, 256)
DTYPES = (DType.BF16, DType.FP16)
FAMILIES = ("llama", "qwen2", "qwen3")
SPLITS = (1, 4, 8, 12, 16, 24)  # of attention, as far as blocks and pages reach
HANDOFFS = (*3 * (HandOffKind.SENTINEL,), HandOffKind.COUNTER, HandOffKind.GRID)


class Shape(NamedTuple):
    """Of one chain."""

    layers: int
    hidden: int
    group: int  # query heads of a KV head
    kv_heads: int
    head_dim: int
    ffn: int
    dtype: DType
    family: str  # its norms and biases
    positions: int
    splits: int
    handoff: HandOffKind


SHAPES = (
    Shape(3, 1280, 4, 2, 128, 4992, DType.FP16, "llama", 337, 1, HandOffKind.SENTINEL),
    Shape(6, 1792, 1, 22, 64, 3712, DType.BF16, "qwen2", 726, 4, HandOffKind.SENTINEL),
    Shape(3, 2176, 3, 7, 96, 10624, DType.BF16, "llama", 101, 1, HandOffKind.SENTINEL),
    Shape(2, 4928, 8, 5, 128, 14336, DType.BF16, "qwen2", 167, 10, HandOffKind.SENTINEL),
    Shape(7, 1920, 2, 6, 96, 6016, DType.BF16, "llama", 242, 15, HandOffKind.COUNTER),
    Shape(2, 4224, 4, 5, 128, 16256, DType.BF16, "qwen3", 282, 12, HandOffKind.SENTINEL),
    Shape(12, 960, 3, 4, 64, 2944, DType.FP16, "qwen3", 143, 8, HandOffKind.SENTINEL),
    Shape(12, 832, 6, 1, 128, 1920, DType.BF16, "llama", 1179, 4, HandOffKind.SENTINEL),
    Shape(2, 2880, 1, 30, 64, 15104, DType.FP16, "llama", 118, 7, HandOffKind.SENTINEL),
    Shape(5, 512, 6, 1, 128, 2304, DType.FP16, "qwen3", 392, 8, HandOffKind.COUNTER),
    Shape(8, 1216, 8, 1, 256, 3840, DType.BF16, "llama", 752, 1, HandOffKind.GRID),
    Shape(3, 2240, 7, 3, 64, 5504, DType.FP16, "qwen3", 460, 24, HandOffKind.GRID),
    Shape(5, 1664, 1, 7, 256, 8320, DType.FP16, "qwen2", 1398, 16, HandOffKind.COUNTER),
    Shape(8, 896, 7, 2, 64, 2304, DType.FP16, "llama", 78, 4, HandOffKind.SENTINEL),
    Shape(2, 4480, 6, 7, 128, 18432, DType.FP16, "qwen2", 73, 4, HandOffKind.COUNTER),
    Shape(2, 704, 2, 6, 64, 2048, DType.FP16, "qwen2", 1064, 4, HandOffKind.SENTINEL),
    Shape(2, 2752, 6, 9, 64, 9728, DType.FP16, "qwen2", 129, 8, HandOffKind.GRID),
    Shape(7, 1152, 1, 9, 128, 3840, DType.FP16, "qwen3", 83, 1, HandOffKind.COUNTER),
    Shape(13, 512, 4, 2, 64, 2176, DType.BF16, "qwen2", 91, 1, HandOffKind.GRID),
    Shape(2, 3200, 4, 3, 256, 11904, DType.BF16, "qwen3", 51, 3, HandOffKind.SENTINEL),
    Shape(3, 3008, 3, 11, 128, 7296, DType.FP16, "llama", 871, 16, HandOffKind.SENTINEL),
    Shape(4, 2496, 8, 2, 128, 6528, DType.FP16, "qwen2", 211, 1, HandOffKind.SENTINEL),
    Shape(2, 3712, 3, 22, 64, 9472, DType.BF16, "qwen3", 259, 4, HandOffKind.COUNTER),
    Shape(14, 448, 5, 2, 64, 1536, DType.FP16, "llama", 477, 16, HandOffKind.SENTINEL),
    Shape(7, 1856, 4, 10, 64, 5120, DType.BF16, "llama", 181, 8, HandOffKind.GRID),
    Shape(11, 1472, 7, 2, 128, 3200, DType.BF16, "qwen3", 56, 3, HandOffKind.GRID),
    Shape(4, 704, 1, 9, 96, 1536, DType.BF16, "qwen3", 324, 16, HandOffKind.SENTINEL),
    Shape(2, 1536, 5, 2, 96, 3328, DType.FP16, "qwen2", 60, 3, HandOffKind.COUNTER),
    Shape(9, 1344, 5, 3, 128, 6272, DType.BF16, "qwen3", 570, 24, HandOffKind.SENTINEL),
    Shape(4, 2368, 6, 4, 96, 6656, DType.BF16, "qwen3", 1252, 12, HandOffKind.SENTINEL),
    Shape(11, 1088, 2, 3, 128, 4352, DType.BF16, "qwen3", 225, 12, HandOffKind.GRID),
    Shape(2, 3840, 7, 10, 64, 16384, DType.BF16, "llama", 997, 12, HandOffKind.SENTINEL),
    Shape(2, 4608, 2, 13, 128, 10880, DType.FP16, "qwen2", 652, 8, HandOffKind.COUNTER),
    Shape(5, 576, 3, 1, 128, 2048, DType.BF16, "qwen2", 1549, 24, HandOffKind.GRID),
    Shape(11, 768, 8, 1, 256, 2688, DType.FP16, "qwen2", 409, 4, HandOffKind.SENTINEL),
    Shape(9, 512, 5, 1, 128, 1024, DType.FP16, "qwen3", 109, 6, HandOffKind.SENTINEL),
    Shape(2, 3456, 5, 8, 64, 17920, DType.FP16, "qwen3", 858, 1, HandOffKind.SENTINEL),
    Shape(5, 1024, 2, 6, 128, 4608, DType.BF16, "llama", 68, 4, HandOffKind.SENTINEL),
    Shape(6, 640, 7, 1, 128, 3072, DType.FP16, "llama", 151, 9, HandOffKind.SENTINEL),
    Shape(2, 896, 8, 2, 64, 4864, DType.BF16, "qwen2", 540, 8, HandOffKind.SENTINEL),
)


def designed(limits: Limits) -> Iterator[Question]:
    """A chain of each shape, as the engine's layers; fitted with the other chains. Its ring is the
    engine's default: size and number of slots, and how many are under way; but not of rows that
    warps take in folds, as none did when these chains were probed. With ten slots, as the other
    chains have, the stream pauses earlier, and a fit to that was 3 % too fast for drawn models.
    """
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
        spec = replace(
            spec,
            dtype=shape.dtype,
            family=shape.family,
            qkv_bias=shape.family == "qwen2",
            qk_norm=shape.family == "qwen3",
        )
        plan = chain_plan(
            limits,
            spec,
            positions=shape.positions,
            attention_splits=max(1, min(shape.splits, limits.blocks // shape.kv_heads)),
            handoff=shape.handoff,
            ring_slots=1,
        )
        room = most_slots(plan)
        window = SHORT_WINDOW if is_short(plan, room) else WINDOW
        plan, slots = tight(spec, plan.options, plan, room)
        options = replace(plan.options, ring_slots=slots, window_slots=window)
        yield name, CHAIN, replace(plan, options=options)


def design() -> tuple[Shape, ...]:
    """The shapes, from SciPy's Latin hypercube of least centred discrepancy."""
    from scipy.stats import qmc  # slow to load, and only whoever changes the design needs it

    points = qmc.LatinHypercube(d=11, optimization="random-cd", rng=SEED).random(COUNT)
    return tuple(_shape(*point) for point in points)


def _shape(
    size: float,
    feed: float,
    attended: float,
    group: float,
    wide: float,
    deep: float,
    dtype: float,
    family: float,
    long: float,
    split: float,
    handoff: float,
) -> Shape:
    hidden = GRAIN * round(log_between(*HIDDEN, size) / GRAIN)
    head_dim = one_of(HEAD_DIMS, wide)
    of_group = 1 + int(group * GROUPS)
    kv_heads = max(1, round(hidden * log_between(*ATTENDED, attended) / (head_dim * of_group)))
    ffn = 2 * GRAIN * round(hidden * log_between(*FEED, feed) / (2 * GRAIN))
    weights = hidden * (head_dim * kv_heads * (2 * of_group + 2) + 3 * ffn)
    most = max(LAYERS[0], int(LAYER_BYTES / (2 * weights)))
    layers = min(most, LAYERS[0] + int(deep * (LAYERS[1] - LAYERS[0] + 1)))
    positions = round(log_between(*POSITIONS, long))
    pages = positions // PAGE
    return Shape(
        layers,
        hidden,
        of_group,
        kv_heads,
        head_dim,
        ffn,
        one_of(DTYPES, dtype),
        one_of(FAMILIES, family),
        positions,
        max(1, min(one_of(SPLITS, split), pages)),
        one_of(HANDOFFS, handoff),
    )
