"""The least and the most of each option that is a number: the one owner, for plans and studies
alike.

Beyond the least no plan means anything. Beyond the most none is made in reasonable time, or none
could ever run. The proof keeps a list of its own.
"""

from __future__ import annotations

from twin.errors import PlanError
from twin.plan.options import MOST_STAGGER_NS, Options

# of a node, and of a plan: a board's, and what a rack's switches join
GPUS = (1, 2, 4, 8, 16, 32, 64, 72)
RANGES: dict[str, tuple[int, int]] = {
    "gpus": (1, GPUS[-1]),
    "blocks": (1, 65_536),
    "slot_bytes": (16, 2**30),
    "ring_slots": (1, 2**20),
    "window_slots": (1, 2**20),
    "head_window_slots": (1, 2**20),
    "tile_rows": (1, 65_536),
    "delay": (0, 65_536),
    "context": (1, 2**31 - 1),
    "max_context": (1, 2**31 - 1),
    "kv_page": (1, 2**31 - 1),
    "attention_splits": (1, 65_536),
    "window_splits": (1, 65_536),
    "split_positions": (0, 2**31 - 1),
    "scanning_block_rows": (0, 65_536),
    "copies": (1, 1024),
    "prompt_chunk": (1, 4096),
    "batch": (1, 1024),
    "draft": (0, 64),
    "lookup": (0, 7),
    "expert_ranks": (1, 1024),
    "ahead_slots": (0, 2**20),
    "lane_stagger_ns": (0, MOST_STAGGER_NS),
}
# build.py says what the model makes of their limits
BY_MODEL = ("delay", "context", "lane_stagger_ns")


def check_least(options: Options) -> None:
    """Raises PlanError for what cannot be a number of things, bytes or positions."""
    for name in (name for name in RANGES if name not in BY_MODEL):
        value, least = getattr(options, name), RANGES[name][0]
        if value is not None and value < least:
            raise PlanError(f"{name}={value}: must be at least {least}")


def pages_of(options: Options) -> int:
    """Pages of a cached head at max_context. Raises PlanError for more splits than that, and for
    parts of pages.
    """
    pages = -(-options.max_context // options.kv_page)
    if (options.split_positions or 0) % options.kv_page:
        raise PlanError(
            f"split_positions={options.split_positions}: a split takes whole pages of "
            f"{options.kv_page} positions"
        )
    for name in ("attention_splits", "window_splits"):
        splits = getattr(options, name)
        if splits and splits > pages:
            raise PlanError(
                f"{name}={splits}: more than the {pages} pages of {options.kv_page} positions"
            )
    return pages
