"""The weights that an NVIDIA block's warps take from the ring before a stage's inputs are there."""

from __future__ import annotations

import math
from collections.abc import Mapping

from twin.frozen import frozen
from twin.models.formats import LOAD_BITS
from twin.models.spec import DType
from twin.plan.catalogue import ALWAYS
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.schedule.block import ROWS_AT_ONCE
from twin.schedule.products import tensor_products
from twin.schedule.teams import Team, rows_at_once

# of a thread, most of a hidden or a heads' vector for which weights are taken before a stage's
# inputs are there
AHEAD_ELEMENTS = 16
# of a thread for these weights, by its elements of the widest vector; more of any made some kernel
# spill
AHEAD_REGISTERS = (
    (32, {"hidden": 128, "heads": 32, "ffn": 96}),
    (40, {"hidden": 64, "heads": 32, "ffn": 0}),
    (48, {"hidden": 64, "heads": 64, "ffn": 64}),
    (math.inf, {"hidden": 64, "heads": 64, "ffn": 0}),
)
# of them, where a bias is looked up ahead as well: a row group less of Qwen2-0.5B's, which spilled
# else
BIAS_REGISTERS = 32
# the same of low-bit weights, whose pieces are 8 loads of 16 bytes and their scales: in pieces
CODED_AHEAD = (
    (32, {"hidden": 2, "heads": 0, "ffn": 1}),
    (math.inf, {"hidden": 1, "heads": 0, "ffn": 0}),
)
# of them, where a bias is looked up ahead as well, or heads are normed, with more than a slice of
# some vector: with two of QKV's, four of four such kernels spilled 216 to 604 bytes. And where some
# threads of a slice have no columns: seven of seven without biases and norms spilled 32 to 520.
# With other weights in FP16 and some vector of more elements a thread than TURNED_MOST nothing of
# QKV's: two of two drawn kernels spilled 78 and 232 bytes with one.
TURNED_PIECES = 1
TURNED_MOST = 32
PIECE_REGISTERS = 40  # of such a piece, as this table counts: of 8-bit weights
REGISTER_BYTES = 4


@frozen
class Prefetch:
    """The row groups of one kind of input that are prefetched into a thread's registers."""

    team: Team
    portions: int  # slices of a row group, at most
    groups: int
    dtype: DType

    @property
    def whole(self) -> bool:
        """Does a team of few warps hold all its slices of a row group, more than one?"""
        return 1 < self.portions == self.team.portions and self.team.teams > 1

    @property
    def several(self) -> bool:
        """Do threads that hold elements of several column slices take weights ahead?"""
        return self.portions > 0 and self.team.portions > 1

    @property
    def group(self) -> int:
        """Tiles of one row group of each team, at least one: behind them a warp waits for its
        loads, and leaves the tiles.
        """
        return max(1, self.portions * self.team.groups * min(self.team.slices, self.team.teams))

    def tiles(self, matrix: Matrix) -> int:
        """Tiles of a matrix that are taken, as `prefetch` in cuda_core.cuh: each team those of
        its first row groups and slices.
        """
        at_once = rows_at_once(matrix, self.dtype)
        # who has taken a tile's first rows holds on to its slot
        if not self.portions or matrix.tile_rows > at_once:
            return 0
        return min(
            self.groups * self.group, matrix.batch_rows // matrix.tile_rows * self.team.slices
        )

    def ring_slots(self, matrix: Matrix) -> int:
        """Slots that a ring needs, so that every warp finds all that it takes before a stage's
        inputs are there.

        `prefetch` leaves the slices of a row group when it has the last of them: the first team
        holds its first slice until then, and no slot is free behind the ring's last. Of a tile of
        several pieces it keeps the slot until it multiplies, when it has taken some of them.
        """
        longest = max((hi - lo for lo, hi in matrix.owned), default=0)
        rows = min(longest, matrix.batch_rows)
        if not self.portions or not rows:
            return 1
        at_once = rows_at_once(matrix, self.dtype)
        if matrix.tile_rows <= at_once:
            return (self.portions - 1) * self.team.teams + 1
        pieces, groups = -(-matrix.tile_rows // at_once), self.team.groups
        whole = self.groups // pieces  # tiles of a team that it takes to their end
        held = -(-rows // matrix.tile_rows) - whole * groups if self.groups % pieces else 0
        return max(1, min(groups, held)) * self.team.slices


def prefetches(
    plan: Plan, teams: Mapping[str, Team], *, ffn_in_memory: bool, short_ahead: bool
) -> Mapping[str, Prefetch]:
    """By input of a plan that the kernel has code for. `ffn_in_memory`: a feed-forward's input is
    too wide for registers. `short_ahead`: also before the short stages of a narrow residual.

    Pieces are of ROWS_AT_ONCE rows, and one group of several portions is the most.
    """
    registers = _registers(plan, teams)
    # Where two teams have all columns of a narrow residual, its stages are short: what they took
    # ahead kept them from looking at their inputs (Qwen2.5-0.5B 511 us instead of 490 on an H100).
    if not short_ahead and plan.spec is not None and teams["hidden"].groups > 1:
        registers["hidden"] = 0
    if ffn_in_memory:
        registers["ffn"] = 0  # its tiles are taken when their part of the input is
    found, dtype = {}, plan.options.weight_dtype
    coded = plan.coded and _largest_piece(plan)
    for name, team in teams.items():
        most = registers[name] // (
            coded or ROWS_AT_ONCE * team.vector * dtype.bytes // REGISTER_BYTES
        )
        portions = min(most, team.portions)
        groups = most if team.portions == 1 else min(1, portions)
        found[name] = Prefetch(team, portions, groups, dtype)
    return found


def _registers(plan: Plan, teams: Mapping[str, Team]) -> dict[str, int]:
    """Of a thread, by input; none where its vectors need them all."""
    none = dict.fromkeys(teams, 0)
    if plan.ranks > 1 or plan.options.weight_dtype is DType.FP32:
        return none
    # of experts, whose layer's code would not fit the instruction cache
    if plan.kernel_routed:
        return none
    if any(tensor_products(m) for stage in plan.stages for m in stage.matrices):
        return none  # a warp's pieces are not a thread's
    elements = {name: teams[name].portions * teams[name].vector for name in ALWAYS}
    rare = [teams[name].portions * teams[name].vector for name in ("other", "states")]
    widest = max(*elements.values(), *rare)
    by_widest = _of_coded(plan, teams, widest) if plan.coded else _of_plain(plan, widest)
    found = {
        name: by_widest[name] if name == "ffn" or elements[name] <= AHEAD_ELEMENTS else 0
        for name in ALWAYS
    }
    return none | found


def _of_plain(plan: Plan, widest: int) -> dict[str, int]:
    """Before weights that are not low-bit."""
    found = dict(next(registers for most, registers in AHEAD_REGISTERS if widest <= most))
    if plan.spec and plan.spec.qkv_bias:
        found["hidden"] -= BIAS_REGISTERS
    return found


def _of_coded(plan: Plan, teams: Mapping[str, Team], widest: int) -> dict[str, int]:
    pieces = dict(next(pieces for most, pieces in CODED_AHEAD if widest <= most))
    turned = plan.spec is not None and (plan.spec.qkv_bias or plan.spec.qk_norm)
    if (turned and widest > AHEAD_ELEMENTS) or not teams["hidden"].full:
        wide = plan.options.weight_dtype is DType.FP16 and widest > TURNED_MOST
        pieces = {name: min(count, TURNED_PIECES) for name, count in pieces.items()}
        pieces["hidden"] = 0 if wide else pieces["hidden"]
    return {name: PIECE_REGISTERS * count for name, count in pieces.items()}


def _largest_piece(plan: Plan) -> int:
    """Registers of a thread, of any coded matrix of the plan."""
    matrices = (matrix for stage in plan.stages for matrix in stage.matrices)
    return max(PIECE_REGISTERS, *map(_piece_registers, matrices))


def _piece_registers(matrix: Matrix) -> int:
    """Of a thread for a piece of coded weights: its loads, and the scales of its rows."""
    form = matrix.format
    if form is None:
        return 0
    rows = ROWS_AT_ONCE * LOAD_BITS // (matrix.pack * form.bits)
    scaling = form.scale_bytes + form.zero_bytes + form.row_bytes
    return (ROWS_AT_ONCE * LOAD_BITS // 8 + rows * scaling) // REGISTER_BYTES
