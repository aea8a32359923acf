"""How elements, items and heads are divided over ranks and their blocks."""

from __future__ import annotations

from functools import lru_cache

from twin.errors import PlanError
from twin.plan.matrix import Span

# Words that other GPUs write at once: as wide as a store of a warp's threads, or as a sector of
# memory; those of two blocks in one sector take longer to arrive (studies/h200-history/tried.md).
STEPS = (16, 8, 4)


@lru_cache(maxsize=1024)
def spread(count: int, blocks: int, shift: int = 0, step: int = 1) -> tuple[Span, ...]:
    """Contiguous spans in block order, each of whole steps; the longer ones, as many as steps are
    left over, start at block `shift`.

    Stages rotate `shift` so that over a step every block streams the same bytes within one row.
    Equal shares are one object, which whoever compares spans later sees at once.
    """
    base, longer = divmod(count // step, blocks)
    spans, lo = [], 0
    for block in range(blocks):
        hi = lo + step * (base + ((block - shift) % blocks < longer))
        spans.append((lo, hi))
        lo = hi
    return tuple(spans)


@lru_cache(maxsize=1024)
def step_of(count: int, blocks: int) -> int:
    """The widest of STEPS in which blocks divide `count` elements with something for each of them
    and no more for any than the most of an even share; 1 where there is none.
    """
    most = -(-count // blocks)
    for step in STEPS:
        each = -(-count // (step * blocks))
        if count % step == 0 and count >= step * blocks and each * step <= most:
            return step
    return 1


@lru_cache(maxsize=1024)
def spread_unevenly(
    count: int, items: tuple[Span, ...], rows: int, shift: int = 0
) -> tuple[Span, ...]:
    """Contiguous spans in block order: `rows` for each block that has items, an equal share of the
    others for each one that has none, of which the longer ones start at the `shift`th of these.
    """
    free = sum(lo == hi for lo, hi in items)
    rest = spread(count - rows * (len(items) - free), free, shift % free)
    sizes = iter(hi - lo for lo, hi in rest)
    spans, lo = [], 0
    for first, last in items:
        hi = lo + (rows if first < last else next(sizes))
        spans.append((lo, hi))
        lo = hi
    return tuple(spans)


@lru_cache(maxsize=1024)
def scatter(count: int, blocks: int) -> tuple[Span, ...]:
    """Spans of few items spread evenly over many blocks: item i goes near block i * blocks /
    count.
    """
    return tuple(
        (block * count // blocks, (block + 1) * count // blocks) for block in range(blocks)
    )


def share(name: str, ranks: int, what: str, count: int) -> int:
    """What one rank has of `count` equal things of the model `name`. Raises PlanError."""
    if count % ranks:
        raise PlanError(
            f"{name}: {count} {what} do not divide over {ranks} ranks: choose a tensor-parallel "
            "degree that does"
        )
    return count // ranks


def kv_share(name: str, ranks: int, kv_heads: int) -> int:
    """KV heads of one rank, replicated when there are more ranks than KV heads. Raises
    PlanError.
    """
    if kv_heads % ranks and ranks % kv_heads:
        raise PlanError(
            f"{name}: {kv_heads} KV heads neither divide over {ranks} ranks nor replicate evenly"
        )
    return max(1, kv_heads // ranks)
