"""Where a step's time goes: the critical path, walked back from the last block to finish.

At a wait the path jumps to the block that published last; what lies between its publication and the
end of the wait is the hand-off itself. The pieces follow each other without gap or overlap, so
their sum is the step, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.cost.causes import CAUSES
from twin.frozen import frozen
from twin.sim.block import Block

Table = list[list[int]]  # [stage][cause] ps


@frozen
class Piece:
    """A stretch of the critical path."""

    block: str
    stage: int
    start: int
    end: int
    cause: int


def critical_path(blocks: Sequence[Block], step: int, stages: int) -> list[Piece]:
    """Pieces from the end of step - 1 to the end of `step`, in time order."""
    finish = max(block.ended[step] for block in blocks)
    begin = max(block.ended[step - 1] for block in blocks) if step else 0
    block = next(b for b in blocks if b.ended[step] == finish)
    stage, time = stages - 1, finish
    pieces: list[Piece] = []
    while time > begin:
        start, jump = _back(pieces, blocks, block, step, stage, time, begin)
        time = start
        block, stage = jump if jump is not None else (block, _before(block, step, stage))
        if stage < 0:
            break
    assert time <= begin, (
        f"the critical path of step {step} breaks off at {time} ps in {block.place.name}"
    )
    pieces.reverse()
    return pieces


def tabulate(pieces: Sequence[Piece], stages: int) -> Table:
    table = [[0] * len(CAUSES) for _ in range(stages)]
    for piece in pieces:
        table[piece.stage][piece.cause] += piece.end - piece.start
    return table


def _back(
    pieces: list[Piece],
    blocks: Sequence[Block],
    block: Block,
    step: int,
    stage: int,
    time: int,
    begin: int,
) -> tuple[int, tuple[Block, int] | None]:
    """Walk one stage of one block backwards from `time`: where it got to, and whom it had waited
    for.
    """
    log = block.log[step][stage]
    begun = _entered(block, step, stage)
    for position in range(len(log) - 1, -1, -1):
        end, cause, binder = log[position]
        start = log[position - 1][0] if position else begun
        if start >= time or end == start:
            continue
        origin = start
        if binder is not None and binder[2] > start:
            origin = binder[2]  # before this, the one it waited for was still at work
        low, high = max(origin, begin), min(end, time)
        if high > low:
            pieces.append(Piece(block.place.name, stage, low, high, cause))
            time = low
        if time <= begin:
            return time, None
        if binder is not None and origin > start:
            return origin, (blocks[binder[0]], binder[1])
    return min(time, begun), None


def _before(block: Block, step: int, stage: int) -> int:
    """The stage that the block made before this one. A scheduler's stages follow the last one
    before them, nothing follows them.
    """
    works, before = block.works(step), stage - 1
    while before >= 0 and works[before].by_scheduler and not works[stage].by_scheduler:
        before -= 1
    return before


def _entered(block: Block, step: int, stage: int) -> int:
    """When the block came to this stage: the end of the last segment before it. A scheduler's stage
    begins with its first segment.
    """
    if block.works(step)[stage].by_scheduler:
        return block.log[step][stage][0][0]
    before = stage
    while (before := _before(block, step, before)) >= 0:
        log = block.log[step][before]
        if log:
            return log[-1][0]
    return block.ended[step - 1] if step else 0
