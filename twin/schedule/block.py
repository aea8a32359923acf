"""The geometry of an NVIDIA block that tiles and warps are divided by."""

from __future__ import annotations

WARP, TEAM_WARPS = 32, 8  # threads of a warp, warps that multiply
# of a tile: their weights, and those of the next ones, are in a thread's registers
ROWS_AT_ONCE = 8
# the same of a warp that takes its rows in column folds, of so many columns each
FOLDED_ROWS, FOLD_COLUMNS = 4, 256
LINE_BYTES = 128
# exchange rows, counters and parts of a block's scratch never share a 128-byte line, the widest of
# the targets
LINE_FLOATS = 32


def up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step
