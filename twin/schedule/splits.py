"""The kernel's attention on one rank: its heads, into how many splits it divides the cached
positions of a key head, their pages.
"""

from __future__ import annotations

from twin.models.spec import DType, ModelSpec
from twin.plan.attention import Attention
from twin.plan.options import Limits, Options
from twin.plan.ranges import pages_of
from twin.plan.settle import on_kernel, windows_of
from twin.plan.spans import kv_share, share
from twin.schedule.chooser import Chooser

# On the tensor cores a few positions more cost nothing, and whoever gathers partial outputs looks
# at four splits at once: Llama-3.2-1B with 704 positions and 3, 4, 6 or 8 splits 647, 635, 650 and
# 639 us, Qwen3-8B with 1,536 and 4, 8 or 12 splits 3,730, 3,711 and 3,741.
POSITIONS_ON_TENSOR_CORES, SPLITS_AT_ONCE = 192, 4
# on an H200 with up to 1,024 positions: 8 splits 742 us, 4 splits 755, 2 splits 797
# (studies/h200-history)
POSITIONS_PER_SPLIT = 128
TENSOR_POSITIONS, TENSOR_HEADS = 16, 4  # of a product on tensor cores: positions, query heads
WIDE_HEADS = 2 * TENSOR_HEADS  # of a warp where another product adds what rounding loses
TENSOR_HALF = 8  # positions whose keys are swizzled in turn
# bytes that a cached key is a multiple of, of one in 8 bits half as many: so lie its units of 16
# bytes in other banks than those of the seven positions behind it; most elements: wider heads would
# leave no registers
TENSOR_ROW, TENSOR_HEAD = 128, 256
KEPT_HEAD = 128  # most elements of a head whose queries stay in registers


def attention_of(
    chooser: Chooser,
    limits: Limits,
    spec: ModelSpec,
    options: Options,
    *,
    ranks: int,
    blocks: int,
) -> tuple[Attention, ...]:
    """Of a model on ranks of `blocks` blocks, one for each of its shapes of heads; empty where its
    layers need caches that the kernel does not know. Raises PlanError.
    """
    if not on_kernel(spec, options, limits):
        return ()
    slides = any(window < options.max_context for window in windows_of(spec))
    return tuple(
        attention(
            chooser,
            options,
            heads=share(spec.name, ranks, "attention heads", shape.heads),
            kv_heads=kv_share(spec.name, ranks, shape.kv_heads),
            head_dim=shape.head_dim,
            values_are_keys=shape.values_are_keys,
            blocks=blocks,
            kv_replicas=max(1, ranks // shape.kv_heads),
            most=chooser.most_splits(slides=slides),
        )
        for shape in spec.head_shapes
    )


def attention(
    chooser: Chooser,
    options: Options,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    values_are_keys: bool = False,
    blocks: int,
    kv_replicas: int = 1,
    most: int | None = None,
) -> Attention:
    """Splits of each KV head and the page capacity of each split. `most`: of splits that no option
    sets.
    """
    pages, group = pages_of(options), heads // kv_heads
    wanted = -(-options.max_context // POSITIONS_PER_SPLIT)
    # of wide heads, too, as many as are combined at once: with two of up to 48 positions each the
    # full attention of Gemma-4-26B-A4B took 31 us
    each = POSITIONS_PER_SPLIT if head_dim > TENSOR_HEAD else 0
    if chooser.tensor_scan(options, group=group, head_dim=head_dim):
        each = POSITIONS_ON_TENSOR_CORES
    if each:
        wanted = min(pages, -(-options.max_context // (SPLITS_AT_ONCE * each)) * SPLITS_AT_ONCE)
    splits = options.attention_splits or max(1, min(blocks // kv_heads, wanted, most or wanted))
    window_splits = options.window_splits or splits
    capacities = tuple(-(-pages // count) * options.kv_page for count in (splits, window_splits))
    first = options.split_positions
    if first is None:
        chosen = options.attention_splits or options.window_splits
        first = 0 if chosen else chooser.first_positions(options, group=group, head_dim=head_dim)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        values_are_keys=values_are_keys,
        kv_replicas=kv_replicas,
        splits=splits,
        item_positions=capacities[0],
        window_splits=window_splits,
        window_positions=capacities[1],
        together=SPLITS_AT_ONCE,
        # no more splits than take pages together need no order
        first_pages=min(first, *capacities) // options.kv_page
        if max(splits, window_splits) > SPLITS_AT_ONCE
        else 0,
    )


def slot_positions(options: Options, head_dim: int) -> int:
    """Cached positions of a ring slot; whole products of tensor cores, where these take such heads
    and it holds one. Of fewer than two, with halves.
    """
    most = max(1, options.slot_bytes // max(1, 2 * head_dim * options.kv_dtype.bytes))
    if most < TENSOR_POSITIONS or not whole_rows(options, head_dim):
        return most
    return most - most % (TENSOR_POSITIONS if most >= 2 * TENSOR_POSITIONS else TENSOR_HALF)


def whole_rows(options: Options, head_dim: int) -> bool:
    """Heads that tensor cores take, whose cached keys are whole rows."""
    unit = TENSOR_ROW // 2 if options.kv_dtype is DType.FP8 else TENSOR_ROW
    return head_dim * options.kv_dtype.bytes % unit == 0 and head_dim <= TENSOR_HEAD
