"""A round of splits is loaded as a whole: seen in machine code, because a wait between two loads
changes no result.
"""

from __future__ import annotations

import pytest

from studies.common.cuda_lines import Kernel
from tests.engine.code_size import function_name
from tests.h200 import H200
from tests.native.disassembly import SIZE, Program
from tests.native.test_device_builds import planned
from tests.native.test_scoreboards import compiled, needs_nvdisasm
from tests.sim.machines import rounds_of_splits
from twin.cost.tiles import vector_team
from twin.hardware.load import load_node
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.schedule.splits import SPLITS_AT_ONCE
from twin.schedule.teams import Team

WORDS = ("LDG.E.64.STRONG.GPU", "LDG.E.128.STRONG.GPU")  # of a split: its outputs, its sums


def team_of(plan: Plan) -> Team:
    """The first layer's."""
    matrix = next(s.matrix for s in plan.stages if s.kind is StageKind.O_PROJ)
    assert matrix is not None
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


def requested_as_a_whole(plan: Plan) -> None:
    portions = team_of(plan).portions
    loads, waits = loads_and_waits(*compiled(plan))
    together = SPLITS_AT_ONCE if portions == 1 else SPLITS_AT_ONCE // 2
    assert loads == 2 * portions * together
    assert waits == 0


@needs_nvdisasm
def test_a_round_of_splits_is_waited_for_once() -> None:
    """By a kernel that other tests compile anyway."""
    requested_as_a_whole(planned("llama-3.2-1b", H200))


@pytest.mark.slow
@needs_nvdisasm
@pytest.mark.parametrize(
    ("heads", "slot_bytes", "portions", "full"),
    [
        (20, 14336, 3, False),  # 856 columns of 1,024 that a team could hold
        (20, 16384, 3, True),  # the last slice is half of one
        (28, 14336, 2, False),
        (12, 12288, 1, False),
    ],
)
def test_a_round_of_splits_of_narrow_projections_is_waited_for_once(
    heads: int, slot_bytes: int, portions: int, full: bool
) -> None:
    plan = rounds_of_splits(load_node("1xh200"), heads, slot_bytes)
    team = team_of(plan)
    assert (team.portions, team.full) == (portions, full)
    requested_as_a_whole(plan)
