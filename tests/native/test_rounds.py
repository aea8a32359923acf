"""A round of splits is loaded as a whole: seen in machine code, because a wait between two loads
changes no result.
"""

from __future__ import annotations

import pytest

from studies.common.cuda_lines import Kernel
from tests.engine.code_size import function_name
from tests.native.disassembly import SIZE, Program
from tests.native.test_scoreboards import compiled, needs_nvdisasm
from tests.sim.machines import rounds_of_splits
from twin.cost.tiles import vector_team
from twin.hardware.load import load_node
from twin.plan.types import Plan, StageKind
from twin.schedule.splits import SPLITS_AT_ONCE
from twin.schedule.teams import Team

WORDS = ("LDG.E.64.STRONG.GPU", "LDG.E.128.STRONG.GPU")  # of a split: its outputs, its sums


def team_of(plan: Plan) -> Team:
    (matrix,) = (s.matrix for s in plan.stages if s.kind is StageKind.O_PROJ and s.matrix)
    team = vector_team(matrix)
    assert team is not None
    return team


def loads_and_waits(program: Program, kernel: Kernel) -> tuple[int, int]:
    """Loads of a round of splits, and how often one of them is waited for before the last."""
    loads = [
        one
        for one in program.code
        if one.name in WORDS
        and any(function_name(place.function) == "combine" for place in kernel.places(one.at))
    ]
    held = waits = 0
    for one in program.code[loads[0].at // SIZE : loads[-1].at // SIZE + 1]:
        if one.waits & held:
            waits, held = waits + 1, held & ~one.waits
        if one in loads:
            held |= one.result
    return len(loads), waits


@needs_nvdisasm
@pytest.mark.parametrize(
    ("heads", "slot_bytes", "portions", "full"),
    [
        (20, 14336, 3, False),  # 856 columns of 1,024 that a team could hold
        # the last slice is half of one
        pytest.param(20, 16384, 3, True, marks=pytest.mark.slow),
        pytest.param(28, 14336, 2, False, marks=pytest.mark.slow),
        pytest.param(12, 12288, 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_round_of_splits_is_waited_for_once(
    heads: int, slot_bytes: int, portions: int, full: bool
) -> None:
    plan = rounds_of_splits(load_node("1xh200"), heads, slot_bytes)
    team = team_of(plan)
    assert (team.portions, team.full) == (portions, full)
    loads, waits = loads_and_waits(*compiled(plan))
    together = SPLITS_AT_ONCE if portions == 1 else SPLITS_AT_ONCE // 2
    assert loads == 2 * portions * together
    assert waits == 0
