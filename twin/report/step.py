"""What texts and pages say of one simulated step: its causes, its slowest stages, the blocks of
its timeline.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # figures that name causes need no simulator
    from twin.sim.run import Result, StageTime

TIMELINE_BLOCKS = 8  # of one GPU, spread evenly: more rows cannot be read


def spoken(cause: str) -> str:
    """A cause as people read it."""
    return cause.replace("_", "-")


def by_kind(result: Result) -> dict[str, dict[str, float]]:
    """Microseconds of the critical path by kind of stage and cause."""
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage in result.stages:
        for cause, ps in stage.causes_ps.items():
            kinds[stage.kind][cause] += ps / 1e6
    return {kind: dict(causes) for kind, causes in kinds.items()}


def ordered_causes(result: Result) -> list[tuple[str, float]]:
    """(cause, seconds), the largest first; causes without time are left out."""
    return sorted(
        ((c, s) for c, s in result.attribution.items() if s > 0), key=lambda item: -item[1]
    )


def slowest_stages(result: Result, most: int) -> list[StageTime]:
    return sorted(result.stages, key=lambda s: -s.ps)[:most]


def traced_blocks(total: int) -> list[int]:
    """Of the blocks of each GPU those that a timeline shows."""
    return sorted({i * total // TIMELINE_BLOCKS for i in range(min(TIMELINE_BLOCKS, total))})
