"""How an NVIDIA block's consumer warps share the tiles of a matrix.

A tile is taken by a team of warps. Each thread of a team holds `vector` neighbouring elements of
the stage's input in registers, for the columns that its team ever sees, and multiplies them with
all rows of its tiles. The kernel's other half of this division is TeamVector in
native/platform/cuda_vector.cuh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from twin.errors import PlanError
from twin.kernel.coded import tensor_products, whole_products
from twin.kernel.experts import has_experts, multiplied
from twin.models.formats import LOAD_BITS
from twin.models.spec import DType
from twin.plan.catalogue import ALWAYS
from twin.plan.partition import FOLD_COLUMNS as FOLD_COLUMNS
from twin.plan.partition import FOLDED_ROWS as FOLDED_ROWS
from twin.plan.partition import ROWS_AT_ONCE as ROWS_AT_ONCE
from twin.plan.partition import TEAM_WARPS
from twin.plan.partition import WARP as WARP
from twin.plan.types import Matrix, Plan, StageKind

# consumer warps, whole warp groups: with more, 96 to 160 registers a thread spilled, and filled the
# first-level cache
WARPS = (TEAM_WARPS,)
MANY_RANKS = 4  # of whose parts a block looks at several together
MOST_TOGETHER = 3  # portions of a residual, at most, where it does
LATE_AT_ONCE = 2  # elements of a thread of the keeper whose late parts are loaded together
VECTORS = (8, 4)  # elements that a thread loads at once
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
# the same of few-bit weights, whose pieces are 8 loads of 16 bytes and their scales: in pieces
CODED_AHEAD = (
    (32, {"hidden": 2, "heads": 0, "ffn": 1}),
    (math.inf, {"hidden": 1, "heads": 0, "ffn": 0}),
)
# of them, where a bias is looked up ahead as well, or heads are normed, beside more than a slice of
# some vector: with two of QKV's, four of four such kernels spilled 216 to 604 bytes. And where some
# threads of a slice have no columns: seven of seven without biases and norms spilled 32 to 520.
# Beside other weights in FP16 and some vector of more elements a thread than TURNED_MOST nothing of
# QKV's: two of two drawn kernels spilled 78 and 232 bytes with one.
TURNED_PIECES = 1
TURNED_MOST = 32
PIECE_REGISTERS = 40  # of such a piece, as this table counts: of 8-bit weights
REGISTER_BYTES = 4
# column slices of which a thread keeps its elements in registers before few-bit weights; of more
# they lie in the block's memory (cuda_wide.cuh). Whole numbers beside them take as many again, and
# tensor cores look for theirs there anyway.
REGISTER_PORTIONS, WHOLE_PORTIONS = 4, 2
WIDE_AT_ONCE = 2  # slices of such an input that are gathered together
# before other weights, elements of a thread of a feed-forward's input: at most in registers and
# gathered at once, beside experts at once, and under way together where it has more. Beside experts
# 84 at once spilled 472 bytes, 112 412 and 144 1,240
FFN_ELEMENTS, EXPERTS_AT_ONCE, FFN_UNDER_WAY = 112, 80, 32
# between the first fours of all threads and their second ones, on the chip: 16 banks
SKEW_FLOATS, BANKS = 16, 32
# of 232, for the vector and the weights: wider FP32 loads, from 136 on, made the compiler spill
THREAD_REGISTERS = 120


@dataclass(frozen=True, slots=True)
class Team:
    """The division of one matrix shape over `warps` consumer warps."""

    cols: int
    tile: int  # columns of a tile
    vector: int
    size: int  # warps of a team; divides `warps`
    warps: int
    beside: int = 1  # equal matrices side by side, whose slices are their own

    @property
    def teams(self) -> int:
        return self.warps // self.size

    @property
    def slices(self) -> int:
        """Column slices, each a tile wide; the last one of each matrix may be narrower."""
        return self.beside * -(-self.cols // (self.beside * self.tile))

    @property
    def folds(self) -> int:
        """In which a team takes a tile that is wider than it holds at once."""
        return -(-self.tile // (self.size * WARP * self.vector))

    @property
    def portions(self) -> int:
        """Slices that one team sees, at most, or folds of its one slice."""
        return self.folds if self.folds > 1 else -(-self.slices // self.teams)

    @property
    def groups(self) -> int:
        """Teams that hold the same slice and take different rows."""
        return max(1, self.teams // self.slices)

    @property
    def full(self) -> bool:
        """Do all threads of a team hold columns of a whole slice?"""
        return self.tile == self.size * WARP * self.vector * self.folds

    @property
    def used(self) -> float:
        """Share of the threads' multiplications that are useful, 0 to 1."""
        return self.cols * self.groups / (self.portions * self.warps * WARP * self.vector)

    def registers(self, weight_bytes: int) -> int:
        """Of a thread: its part of the vector, and the weights of the rows under way and of those
        after them.
        """
        return self.portions * self.vector + 2 * ROWS_AT_ONCE * self.vector * weight_bytes // 4


def team_of(
    cols: int,
    tile: int,
    warps: int,
    *,
    weight_bytes: int = 2,
    pack: int = 0,
    beside: int = 1,
    folded: bool = False,
) -> Team | None:
    """The team that wastes least, with the fewest warps; None when all warps together do not cover
    a tile.

    Where the wider loads need more registers than a thread can spare, the narrower ones are taken.
    `pack`: of a plan with coded weights. `beside`, `folded`: as of a matrix.
    """
    if folded:
        return Team(cols, tile, FOLD_COLUMNS // WARP, 1, warps)
    found = []
    for vector in (pack,) if pack else VECTORS:
        if tile % vector or cols % vector:
            continue
        needed = -(-tile // (WARP * vector))
        sizes = [size for size in range(needed, warps + 1) if warps % size == 0]
        if sizes:
            found.append(Team(cols, tile, vector, sizes[0], warps, beside))
    return min(
        found,
        key=lambda team: (
            max(0, team.registers(weight_bytes) - THREAD_REGISTERS),
            -team.used,
            -team.vector,
        ),
        default=None,
    )


@dataclass(frozen=True, slots=True)
class Teams:
    """Of the matrices whose input is the residual (a probe's matrix too), the attention heads, the
    feed-forward.

    Of shared experts, and of layers without experts where others have some. A plan without such a
    matrix has a team of no columns there.
    """

    warps: int
    hidden: Team
    heads: Team
    ffn: Team
    shared: Team
    dense: Team


def rows_at_once(matrix: Matrix, dtype: DType) -> int:
    """Rows of a tile whose weights a thread has at once: of a coded plan as many bytes of each
    format.
    """
    if matrix.folded:
        return FOLDED_ROWS
    if not matrix.pack:
        return ROWS_AT_ONCE
    bits = matrix.format.bits if matrix.format else 8 * dtype.bytes
    return ROWS_AT_ONCE * LOAD_BITS // (matrix.pack * bits)


@lru_cache(maxsize=64)
def teams_of(plan: Plan) -> Teams:
    """The number of consumer warps that wastes least, weighed by the weights that a step streams.

    Raises PlanError for tiles that the warps of a block do not cover, and for tiles of more rows
    than a team of several slices takes.
    """
    shapes: dict[str, Matrix] = {}
    by_input = plan.kinds_by_input
    weights: dict[str, int] = dict.fromkeys(by_input, 0)
    for stage in plan.stages:
        matrix = multiplied(plan, stage)
        for name, kinds in by_input.items():
            if matrix and stage.kind in kinds:
                shapes[name] = matrix
                weights[name] += matrix.rows * matrix.cols

    def division(warps: int) -> dict[str, Team | None]:
        size = plan.options.weight_dtype.bytes
        return {
            name: team_of(
                matrix.cols,
                matrix.tile_cols,
                warps,
                weight_bytes=size,
                pack=matrix.pack,
                beside=matrix.beside,
                folded=matrix.folded,
            )
            for name, matrix in shapes.items()
        }

    def time(warps: int) -> float:
        wasted = math.fsum(
            weights[name] / team.used if team else math.inf
            for name, team in division(warps).items()
        )
        return wasted * math.pow(WARPS[0] / warps, 0.25)  # judged: more warps hide more latency

    warps = min(WARPS, key=time)
    if math.isinf(time(warps)):
        widest = max(matrix.tile_cols for matrix in shapes.values())
        covered = WARPS[0] * WARP * max(VECTORS)
        most_bytes = plan.options.tile_rows * covered * plan.options.weight_dtype.bytes
        raise PlanError(
            f"tiles of {widest} columns are wider than a block's {WARPS[0]} warps take at once: "
            f"use slot_bytes={most_bytes} or less"
        )
    for name, matrix in shapes.items():
        team, most = division(warps)[name], rows_at_once(matrix, plan.options.weight_dtype)
        if team and team.slices > team.teams and matrix.tile_rows > most:
            raise PlanError(
                f"tile_rows={plan.options.tile_rows}: tiles of {matrix.tile_rows} rows, and a "
                f"block takes {most} rows of a matrix of {matrix.cols} columns at once; use "
                f"tile_rows={ROWS_AT_ONCE}"
            )
    none = Team(0, 1, 4, warps, warps)
    made = division(warps)
    return Teams(warps, *(made.get(name) or none for name in by_input))


def ahead_registers(plan: Plan, name: str) -> int:
    """NVIDIA: of a thread, for weights that leave the ring before a stage's inputs are there; none
    where its vectors need them all.
    """
    if plan.ranks > 1 or plan.options.weight_dtype is DType.FP32:
        return 0
    # of experts, whose layer's code would not fit the instruction cache
    if has_experts(plan) or name not in ALWAYS:
        return 0
    if any(tensor_products(m) for stage in plan.stages for m in stage.matrices):
        return 0  # a warp's pieces are not a thread's
    if name == "ffn" and wide_ffn(plan):
        return 0  # its tiles are taken when their part of the input is
    teams = teams_of(plan)
    divided: dict[str, Team] = {kind: getattr(teams, kind) for kind in ALWAYS}
    elements = {kind: team.portions * team.vector for kind, team in divided.items()}
    if name != "ffn" and elements[name] > AHEAD_ELEMENTS:
        return 0
    # Where two teams have all columns of a narrow residual, its stages are short: what they took
    # ahead kept them from looking at their inputs (Qwen2.5-0.5B 511 us instead of 490 on an H100).
    narrow = plan.limits.teams and plan.spec is not None and teams.hidden.groups > 1
    if name == "hidden" and narrow:
        return 0
    if plan.coded:
        most = next(
            pieces[name] for widest, pieces in CODED_AHEAD if max(elements.values()) <= widest
        )
        turned = plan.spec is not None and (plan.spec.qkv_bias or plan.spec.qk_norm)
        several = max(elements.values()) > AHEAD_ELEMENTS
        if (turned and several) or not teams.hidden.full:
            wide = plan.options.weight_dtype is DType.FP16 and max(elements.values()) > TURNED_MOST
            most = min(most, 0 if wide and name == "hidden" else TURNED_PIECES)
        return PIECE_REGISTERS * most
    most = next(
        registers[name] for widest, registers in AHEAD_REGISTERS if max(elements.values()) <= widest
    )
    return most - BIAS_REGISTERS if name == "hidden" and plan.spec and plan.spec.qkv_bias else most


def ahead_pieces(plan: Plan, name: str) -> tuple[int, int]:
    """NVIDIA: what they hold, in pieces of ROWS_AT_ONCE rows: (portions of a row group, row
    groups); one group of several portions.
    """
    team: Team = getattr(teams_of(plan), name)
    each = ROWS_AT_ONCE * team.vector * plan.options.weight_dtype.bytes // 4
    if plan.coded:
        each = max(PIECE_REGISTERS, *(_piece_registers(m) for s in plan.stages for m in s.matrices))
    most = ahead_registers(plan, name) // each
    portions = min(most, team.portions)
    return portions, most if team.portions == 1 else min(1, portions)


def _piece_registers(matrix: Matrix) -> int:
    """Of a thread for a piece of coded weights: its loads, and the scales of its rows."""
    form = matrix.format
    if form is None:
        return 0
    rows = ROWS_AT_ONCE * LOAD_BITS // (matrix.pack * form.bits)
    scaling = form.scale_bytes + form.zero_bytes + form.row_bytes
    return (ROWS_AT_ONCE * LOAD_BITS // 8 + rows * scaling) // REGISTER_BYTES


def wide_ffn(plan: Plan) -> bool:
    """NVIDIA: is the input of few-bit down projections, all of one format, too wide for
    registers?
    """
    if not plan.coded:
        return False
    kinds = plan.kinds_by_input["ffn"]
    found = [s.matrix for s in plan.stages if s.matrix and s.kind in kinds]
    forms = {matrix.format for matrix in found}
    if len(forms) != 1 or not all(form and form.coded for form in forms):
        return False
    whole = whole_products(found[0]) or tensor_products(found[0])
    most = WHOLE_PORTIONS if whole else REGISTER_PORTIONS
    return teams_of(plan).ffn.portions > most


def ffn_in_registers(plan: Plan) -> int:
    """NVIDIA: column slices of which a thread keeps its elements of a feed-forward's input in
    registers; those of the others lie in the block's memory (cuda_tall.cuh).
    """
    team = teams_of(plan).ffn
    portions = max(1, team.portions)  # of a probe without feed-forward the kernel has one, too
    if plan.coded:
        return portions  # unless all of them lie there: `wide_ffn`
    return min(portions, FFN_ELEMENTS // team.vector)


def ffn_at_once(plan: Plan) -> int:
    """NVIDIA: column slices of a feed-forward's input that are gathered together before weights
    that are not few-bit; all of them where registers allow.
    """
    team = teams_of(plan).ffn
    portions = max(1, team.portions)
    most = EXPERTS_AT_ONCE if has_experts(plan) else FFN_ELEMENTS
    if plan.coded or portions * team.vector <= most:
        return portions
    return FFN_UNDER_WAY // team.vector


def held_on_chip(plan: Plan) -> bool:
    """NVIDIA: does the residual lie in a block's shared memory between the stages that use it?

    Where few-bit weights leave it no registers: who adds up parts of several ranks needs some for
    one more vector, so there it lies on the chip beside a feed-forward that does. In registers such
    steps spilled up to 652 bytes (Llama-3.1-70B in INT4 took 1,131 us instead of 1,087 on two
    H200). Where nothing spills the ring's room is worth more.
    """
    several = 1 < teams_of(plan).hidden.portions <= REGISTER_PORTIONS  # of more it fills the chip
    return plan.coded and plan.ranks > 1 and several and wide_ffn(plan)


def hidden_in_quads(plan: Plan) -> bool:
    """NVIDIA: does each thread of a block gather four neighbours of the residual, before all take
    what they multiply from the chip (cuda_quads.cuh)?

    Of 16-bit models on one GPU whose residual is one slice of each team, where several threads hold
    the same columns of it, or some hold none.
    """
    wide = plan.coded or plan.options.weight_dtype is DType.FP32
    if plan.spec is None or not plan.limits.teams or plan.ranks > 1 or wide:
        return False
    team = teams_of(plan).hidden
    return team.folds > 1 or (team.portions == 1 and (team.groups > 1 or not team.full))


def quads_floats(plan: Plan) -> int:
    """NVIDIA: where these threads hand them over, behind the sums of rows, as `chip_place` in
    native/platform/cuda_quads.cuh.
    """
    if not hidden_in_quads(plan):
        return 0
    team = teams_of(plan).hidden
    if team.vector == min(VECTORS) or not (team.folds > 1 or team.full):
        return team.cols
    half = (FOLD_COLUMNS if team.folds > 1 else team.cols) // 2
    return 2 * team.folds * (-(-half // BANKS) * BANKS + SKEW_FLOATS)


def parts_together(plan: Plan, portions: int, *, coded: bool) -> int:
    """NVIDIA: of the parts of a residual that other GPUs push, those that a block looks at together
    behind the first one, with so many portions of a thread; 1: one after the other.

    Fewer round trips of four GPUs and more, where registers are left: few-bit steps spilled with
    any, 16-bit ones with four portions or recurrent states. Lanes, and AMD, take parts in
    turn.
    """
    if not plan.limits.teams or plan.ranks < MANY_RANKS or coded:
        return 1
    if plan.spec is None or plan.spec.lanes or plan.spec.delta:
        return 1
    return 1 if portions > MOST_TOGETHER else 4 if portions == 1 else 2


def in_norm_order(plan: Plan, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """NVIDIA: a norm's weights [hidden] as a block's threads load them, `norm_place` in
    native/platform/cuda_vector.cuh: of each column slice the first four of every thread, then the
    next four of every thread; as they are where a thread has four neighbours.
    """
    if hidden_in_quads(plan):
        return weights
    team = teams_of(plan).hidden
    slices = (weights[at : at + team.tile] for at in range(0, weights.size, team.tile))
    fours = (of.reshape(-1, team.vector // 4, 4).swapaxes(0, 1) for of in slices)
    return np.concatenate([of.reshape(-1) for of in fours])


@dataclass(frozen=True, slots=True)
class Ahead:
    """NVIDIA: the row groups of one kind of input that a block's warps take from the ring before a
    stage's inputs are there.
    """

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
        """Tiles of a matrix that are taken, as `take_ahead` in cuda_core.cuh: each team those of
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

        `take_ahead` leaves the slices of a row group when it has the last of them: the first team
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


def taken_ahead(plan: Plan) -> dict[StageKind, Ahead]:
    """By kind of stage that has a matrix; nothing of a plan that the kernel has no code for. Raises
    PlanError as `teams_of` does.

    For a whole plan: a plan is large, and slow to look up.
    """
    if plan.without_code():
        return {}
    teams, by_input = teams_of(plan), plan.kinds_by_input
    ahead = {
        name: Ahead(getattr(teams, name), *ahead_pieces(plan, name), plan.options.weight_dtype)
        for name in by_input
    }
    return {kind: ahead[name] for name, kinds in by_input.items() for kind in kinds}
