"""Teams of warps cover their tiles and their columns, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.h200 import H200
from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.kernel.tables import layout
from twin.models.load import load_model
from twin.models.spec import WEIGHT_TYPES, DType
from twin.plan.catalogue import ALWAYS, StageKind
from twin.plan.coding import COLUMN_STEP
from twin.plan.options import CollectiveKind, Options
from twin.plan.types import Plan
from twin.schedule.block import FOLD_COLUMNS, WARP
from twin.schedule.choose import schedule_of
from twin.schedule.homes import SKEW_FLOATS
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.schedule.teams import THREAD_REGISTERS, VECTORS, Team, team_of

MODELS = ("llama-3.2-1b", "laneformer-2b", "qwen3-8b", "qwen2.5-coder-1.5b", "llama-3.1-8b")
# grains of a tile, slices, warps
shapes = st.tuples(st.integers(1, 2048), st.integers(1, 40), st.sampled_from([4, 8, 12, 16]))


def planned(model: str, **chosen: object) -> Plan:
    spec = load_model(model)
    collective = CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE
    return build(spec, Options(**({"blocks": 128, "collective": collective} | chosen)), H200)  # type: ignore[arg-type]


def columns(team: Team) -> list[int]:
    """The columns that the threads of all teams hold, as TeamLayout in cuda_layout.cuh divides
    them: group 0 only.
    """
    held = []
    for warp in range(team.warps):
        at = warp // team.size
        if team.slices < team.teams and at // team.slices:
            continue  # another group holds the same slices
        for thread in range(WARP):
            for portion in range(team.portions):
                fold = portion * team.size * WARP if team.folds > 1 else 0
                local = (fold + warp % team.size * WARP + thread) * team.vector
                slice_ = at % team.slices if team.slices < team.teams else at + portion * team.teams
                first = slice_ * team.tile + local
                if local < team.tile and first < team.cols:
                    held += range(first, first + team.vector)
    return held


@drawn(100)
@given(shape=shapes, ragged=st.integers(0, 2047))
def test_every_column_is_held_once(shape: tuple[int, int, int], ragged: int) -> None:
    grains, slices, warps = shape
    tile = grains * COLUMN_STEP
    cols = tile * slices - ragged % grains * COLUMN_STEP
    team = team_of(cols, tile, warps)
    if team is None:
        assert tile > warps * WARP * max(VECTORS)
        return
    assert warps % team.size == 0
    assert tile <= team.size * WARP * team.vector
    assert 0 < team.used <= 1
    assert sorted(columns(team)) == list(range(cols))


@pytest.mark.parametrize("cols", [1032, 1152, 1280, 1792])
def test_a_warp_holds_every_column_in_folds(cols: int) -> None:
    team = team_of(cols, cols, 8, folded=True)
    assert team is not None
    assert (team.size, team.groups, team.portions) == (1, 8, -(-cols // 256))
    assert team.used == cols / (256 * team.portions)
    assert team.full == (cols % 256 == 0)
    assert sorted(columns(team)) == list(range(cols))


@pytest.mark.parametrize("cols", [512, 1024, 1032, 1152, 1280])
def test_threads_hand_each_other_eights_without_meeting_a_bank_twice(cols: int) -> None:
    """Written again as `shared_place` in cuda_activation.cuh has it."""
    spec = replace(load_model("llama-3.2-1b"), hidden=cols)
    slot = -(-16 * cols // 128) * 128 if 1024 < cols <= 1280 else 16384
    plan = plan_for(spec, load_node("1xh200"), context=64, max_context=256, slot_bytes=slot)
    schedule = schedule_of(plan)
    assert schedule.by_fours
    warps = schedule.warps
    width = FOLD_COLUMNS if warps.teams["hidden"].folds > 1 else cols
    plane = -(-width // 64) * 32 + SKEW_FLOATS

    def place(column: int) -> int:
        fold, at = divmod(column, width)
        return (2 * fold + column // 4 % 2) * plane + at // 8 * 4

    places = [place(column) for column in range(0, cols, 4)]
    assert len({*places}) == len(places)
    assert max(places) + 4 <= warps.residual.exchange_floats
    # eight threads store sixteen bytes each at a time, neighbours of one another, or load them
    for first in range(0, cols - 64, 64):
        stored = [place(first + 4 * thread) for thread in range(8)]
        loaded = [place(first + 8 * thread) for thread in range(8)]
        for together in (stored, loaded):
            assert len({at // 4 % 8 for at in together}) == 8


@pytest.mark.parametrize("model", [*MODELS, "llama-3.2-1b@int8", "qwen3-8b@fp8-128x128"])
def test_norms_weights_lie_where_threads_look_for_them(model: str) -> None:
    """Written again as `norm_place` in cuda_layout.cuh has it."""
    schedule = schedule_of(planned(model))
    team = schedule.warps.teams["hidden"]
    given = np.arange(team.cols, dtype=np.float32)
    lies = schedule.norm_order.of(given)
    if schedule.by_fours:  # a thread has four neighbours
        assert (lies == given).all()
        return
    for column in range(team.cols):
        slice_, at = divmod(column, team.tile)
        width = min(team.tile, team.cols - slice_ * team.tile)
        four = at % team.vector // 4 * (width // team.vector * 4) + at // team.vector * 4
        assert lies[slice_ * team.tile + four + at % 4] == column
    # neighbouring threads load neighbouring fours
    assert (lies[:8] == [0, 1, 2, 3, *range(team.vector, team.vector + 4)]).all()


@pytest.mark.parametrize(
    ("hidden", "more", "quads"),
    [
        (1024, {}, True),  # two teams have all columns
        (1536, {}, True),  # a quarter of the threads has none
        (2048, {}, False),
        (2560, {}, False),  # two slices a thread
        (1024, {"weight_dtype": DType.FP32}, False),
        (1024, {"gpus": 2}, False),
    ],
)
def test_narrow_models_on_one_gpu_gather_each_word_once(
    hidden: int, more: dict[str, Any], quads: bool
) -> None:
    spec = load_model("llama-3.2-1b")
    node = load_node(f"{more.get('gpus', 1)}xh200")
    plan = plan_for(replace(spec, hidden=hidden), node, context=64, max_context=256, **more)
    assert schedule_of(plan).by_fours == quads
    # behind the sums of rows, and in the block's memory
    sizes = layout(plan).sizes
    assert sizes["residual_by_fours"] == quads
    assert sizes["scratch_floats"] >= 2 * sizes["half_floats"] + (hidden if quads else 0)


@drawn(100)
@given(grains=st.integers(1, 4096), warps=st.sampled_from([4, 8, 12]))
def test_a_tile_has_a_team_exactly_if_all_warps_cover_it(grains: int, warps: int) -> None:
    tile = grains * COLUMN_STEP
    assert (team_of(tile, tile, warps) is not None) == (tile <= warps * WARP * max(VECTORS))


def test_wide_loads_give_way_where_registers_are_scarce() -> None:
    narrow, wide = team_of(4096, 512, 8, weight_bytes=4), team_of(4096, 512, 8, weight_bytes=2)
    assert narrow is not None
    assert wide is not None
    assert (narrow.vector, wide.vector) == (4, 8)
    assert narrow.registers(4) <= THREAD_REGISTERS < replace(narrow, vector=8).registers(4)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=lambda d: d.value)
@pytest.mark.parametrize("model", MODELS)
def test_models_have_a_team_for_each_input(model: str, dtype: DType) -> None:
    plan = planned(model, weight_dtype=dtype)
    teams = schedule_of(plan).warps.teams
    wanted = {s.kind: s.matrix.cols for s in plan.stages if s.matrix}
    assert teams["hidden"].cols == wanted[StageKind.QKV] == wanted[StageKind.GATE_UP]
    assert teams["heads"].cols == wanted[StageKind.O_PROJ]
    assert teams["ffn"].cols == wanted[StageKind.DOWN]
    assert all(teams[name].registers(dtype.bytes) <= THREAD_REGISTERS for name in ALWAYS)


def test_a_tile_too_wide_is_refused_with_what_to_use() -> None:
    with pytest.raises(
        PlanError,
        match=r"tiles of 4096 columns are wider than a block's 8 warps take at once: use "
        r"slot_bytes=32768 or less",
    ):
        schedule_of(planned("qwen3-8b", slot_bytes=65536))


def test_rows_that_a_team_does_not_take_at_once_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"tile_rows=16: tiles of 16 rows, and a block takes 8 rows of a matrix of 4096 "
        r"columns at once; use tile_rows=8",
    ):
        schedule_of(planned("qwen3-8b", tile_rows=16, slot_bytes=32768))


@drawn(100)
@given(shape=shapes, ragged=st.integers(0, 2047))
def test_only_a_teams_last_slice_is_missing_or_short(
    shape: tuple[int, int, int], ragged: int
) -> None:
    """The kernel asks nothing of the others (`inner` in cuda_layout.cuh)."""
    grains, slices, warps = shape
    tile = grains * COLUMN_STEP
    team = team_of(tile * slices - ragged % grains * COLUMN_STEP, tile, warps)
    if team is None or team.slices < team.teams:
        return
    for number in range(team.teams):
        for portion in range(team.portions - 1):
            assert (number + portion * team.teams + 1) * tile <= team.cols
