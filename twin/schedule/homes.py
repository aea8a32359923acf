"""Where an NVIDIA block keeps the vectors that its warps multiply: in registers, or in its shared
memory where these are too wide, or where registers are scarce.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.models.spec import DType
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.schedule.block import FOLD_COLUMNS
from twin.schedule.products import tensor_products, whole_products
from twin.schedule.teams import VECTORS, Team

# column slices of which a thread keeps its elements in registers before low-bit weights; of more
# they lie in the block's memory (cuda_quantised.cuh). Integers next to them take as many again,
# and tensor cores look for theirs there anyway. Experts' in FP8 are gathered faster there.
REGISTER_PORTIONS, WHOLE_PORTIONS, EXPERTS_PORTIONS = 4, 2, 1
WIDE_AT_ONCE = 2  # slices of such an input that are gathered together
# before other weights, elements of a thread of a feed-forward's input: at most in registers and
# gathered at once; the same with experts; under way together where it has more. With experts
# 84 at once spilled 472 bytes, 112 412 and 144 1,240; next to recurrent states 64 spilled 516
FFN_ELEMENTS, EXPERTS_AT_ONCE, STATES_AT_ONCE, FFN_UNDER_WAY = 112, 80, 40, 32
# between the first fours of all threads and their second ones, in shared memory: 16 banks
SKEW_FLOATS, BANKS = 16, 32


class Home(Enum):
    """Where the residual lies between the stages that use it."""

    REGISTERS = "registers"
    # in registers, but each thread gathers four neighbours, and all take what they multiply from
    # shared memory (cuda_activation.cuh)
    BY_FOURS = "registers, by fours"
    SHARED = "shared memory"  # BetweenStages in cuda_activation.cuh


@frozen
class Residual:
    home: Home
    exchange_floats: int = 0  # where threads hand over their fours, behind the sums of rows


@frozen
class FeedForward:
    """The input of down projections."""

    in_memory: bool  # all of it, before low-bit weights of one format (cuda_quantised.cuh)
    in_registers: int  # column slices; those of the others lie in shared memory (cuda_split.cuh)
    at_once: int  # column slices that are gathered together into registers
    rounds: int  # in which all of it is gathered, wherever it lies


@frozen
class NormOrder:
    """How threads load the weights of a residual's norm, `norm_place` in
    native/platform/cuda_layout.cuh: of each slice of `tile` columns the first four of every
    thread, then the next four of every thread. 0: as they are, where a thread has four neighbours,
    and where no warps share rows.
    """

    tile: int = 0
    vector: int = 0

    def of(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """A norm's weights [hidden] in this order."""
        if not self.tile:
            return weights
        slices = (weights[at : at + self.tile] for at in range(0, weights.size, self.tile))
        fours = (of.reshape(-1, self.vector // 4, 4).swapaxes(0, 1) for of in slices)
        return np.concatenate([of.reshape(-1) for of in fours])


def norm_order(residual: Residual, team: Team) -> NormOrder:
    """`team`: of the matrices that multiply the residual."""
    if residual.home is Home.BY_FOURS:
        return NormOrder()
    return NormOrder(team.tile, team.vector)


def feed_forward(plan: Plan, team: Team) -> FeedForward:
    """`team`: of the input's matrices. A probe's kernel has one slice of none, too."""
    portions = max(1, team.portions)
    if plan.coded:
        wide = _too_wide(plan, team)
        at_once = WIDE_AT_ONCE if wide and not _by_fours_of_all(plan) else portions
        return FeedForward(wide, portions, portions, rounds=-(-team.portions // at_once))
    most = EXPERTS_AT_ONCE if plan.kernel_routed else FFN_ELEMENTS
    if plan.kernel_routed and plan.delta_stages:
        most = STATES_AT_ONCE
    at_once = portions if portions * team.vector <= most else FFN_UNDER_WAY // team.vector
    in_registers = min(portions, FFN_ELEMENTS // team.vector)
    return FeedForward(False, in_registers, at_once, rounds=-(-team.portions // at_once))


def _too_wide(plan: Plan, team: Team) -> bool:
    """Is the input of low-bit down projections, all of one format, too wide for registers?"""
    found = _feed_forwards(plan)
    forms = {matrix.format for matrix in found}
    if len(forms) != 1 or not all(form and form.coded for form in forms):
        return False
    if _other_numbers(found[0]):
        return team.portions > WHOLE_PORTIONS
    return team.portions > (EXPERTS_PORTIONS if _by_fours_of_all(plan) else REGISTER_PORTIONS)


def _feed_forwards(plan: Plan) -> list[Matrix]:
    """The down projections' matrices."""
    return [s.matrix for s in plan.stages if s.matrix and plan.input_of(s) == "ffn"]


def _by_fours_of_all(plan: Plan) -> bool:
    """Would threads gather neighbouring fours of all columns at once, where the input lies in
    shared memory? Of experts on one GPU, but for whole numbers (`BY_FOURS` in cuda_quantised.cuh).
    """
    return (
        plan.kernel_routed
        and plan.ranks == 1
        and not any(map(whole_products, _feed_forwards(plan)))
    )


def _other_numbers(matrix: Matrix) -> bool:
    """Is it multiplied with others than the FP32 numbers that were gathered?"""
    return whole_products(matrix) or tensor_products(matrix)


def residual(plan: Plan, team: Team, ffn: FeedForward) -> Residual:
    """`team`: of the matrices that multiply it."""
    if _in_shared_memory(plan, team, ffn):
        return Residual(Home.SHARED)
    if _by_fours(plan, team):
        return Residual(Home.BY_FOURS, _exchange_floats(team))
    return Residual(Home.REGISTERS)


def _in_shared_memory(plan: Plan, team: Team, ffn: FeedForward) -> bool:
    """Where low-bit weights leave it no registers: who adds up parts of several ranks needs some
    for one more vector, so there it lies in shared memory next to a feed-forward that does. In
    registers such steps spilled up to 652 bytes (Llama-3.1-70B in INT4 took 1,131 us instead of
    1,087 on two H200). Where nothing spills the ring's room is worth more.
    """
    several = 1 < team.portions <= REGISTER_PORTIONS  # of more it fills the chip
    return plan.coded and plan.ranks > 1 and several and ffn.in_memory


def _by_fours(plan: Plan, team: Team) -> bool:
    """Of 16-bit models on one GPU whose residual is one slice of each team, where several threads
    hold the same columns of it, or some hold none.
    """
    wide = plan.coded or plan.options.weight_dtype is DType.FP32
    if plan.spec is None or plan.ranks > 1 or wide:
        return False
    return team.folds > 1 or (team.portions == 1 and (team.groups > 1 or not team.full))


def _exchange_floats(team: Team) -> int:
    """As `shared_place` in native/platform/cuda_activation.cuh."""
    if team.vector == min(VECTORS) or not (team.folds > 1 or team.full):
        return team.cols
    half = (FOLD_COLUMNS if team.folds > 1 else team.cols) // 2
    return 2 * team.folds * (-(-half // BANKS) * BANKS + SKEW_FLOATS)
