"""Tiles of experts that lie side by side, slots as large as tiles, and refusals whose advice is a
plan.
"""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.block import ROWS_AT_ONCE, TEAM_WARPS
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.teams import team_of
from twin.schedule.tiles import folds, low_rows, teams_joined

EXPERTS = (
    "qwen3-30b-a3b",
    "qwen3-30b-a3b@fp8-128x128",
    "qwen3-30b-a3b@int4-g128",
    "qwen3-30b-a3b@mxfp4",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "mixtral-8x7b",
)
NODES = ("2xh200", "4xh200", "8xh200", "2xh100", "4xh100", "8xh100")
ADVICE = re.compile(r"(\w+)=\d+ holds no tile .* use at least (\d+)|use (\w+)=(\d+)")


def planned(model: str, node: str, **chosen: Any) -> Plan:
    return plan_for(load_model(model), load_node(node), **chosen)


def down(plan: Plan) -> Matrix:
    """Of an expert."""
    return next(s.matrix for s in plan.stages if s.matrix and s.kind is StageKind.ROUTED_DOWN)


@pytest.mark.few(2)
@pytest.mark.parametrize("model", EXPERTS)
def test_experts_have_a_plan_on_several_gpus_by_default(model: str) -> None:
    for node in NODES:
        schedule_of(planned(model, node))


def test_an_experts_row_may_end_within_a_group() -> None:
    plan = planned("gpt-oss-20b@int4-g128", "1xh200")
    prove(plan)
    assert (down(plan).cols, down(plan).tile_cols) == (2880, 1536)


def test_teams_that_hold_several_experts_take_tiles_of_few_rows() -> None:
    """On two GPUs a tile takes two warps of eight, and eight experts lie side by side."""
    plan = planned("qwen3-30b-a3b", "2xh200")
    prove(plan)
    matrix = down(plan)
    assert (matrix.cols, matrix.tile_rows, matrix.tile_cols) == (384, ROWS_AT_ONCE, 384)


def mixture(
    width: int, name: str, *, hidden: int = 2304, experts: int = 8, chosen: int = 3
) -> Plan:
    """As Mixtral, with low-bit weights, on an H200."""
    spec = load_model("mixtral-8x7b")
    feed = replace(spec.experts, experts=experts, top_k=chosen, width=width)
    layout = tuple(replace(layer, feed=feed) for layer in spec.layout[:4])
    made = replace(
        spec, hidden=hidden, ffn=width, layers=4, windows=spec.windows[:4], layout=layout
    )
    return plan_for(requantized(made, format_named(name)), load_node("1xh200"))


@pytest.mark.parametrize(
    ("width", "name", "tile", "slices"),
    [
        (5888, "fp8-128x128", 2048, 3),  # of 46 blocks of columns: even slices had 256
        (9728, "fp8-128x128", 2048, 5),
        (10_368, "int4-g128", 1792, 6),
        (3712, "int4-g128", 1920, 2),  # of 29 groups: even slices had 128
        (7680, "int4-g128", 1920, 4),
        (14_336, "fp8-128x128", 2048, 7),
        (2880, "mxfp4", 960, 3),  # even ones keep more threads busy
        (2880, "int4-g128", 1536, 2),
    ],
)
def test_experts_whose_even_slices_would_be_narrow_end_with_a_narrower_one(
    width: int, name: str, tile: int, slices: int
) -> None:
    plan = mixture(width, name)
    prove(plan)
    assert (down(plan).tile_cols, down(plan).slices) == (tile, slices)
    assert schedule_of(plan).warps.teams["ffn"].slices == 3 * slices


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("ffn", "name", "tile", "slices"),
    [
        (12_800, "fp8-128x128", 2048, 7),  # even ones would have 1,920
        (5120, "int4-g128", 2048, 3),
        (4864, "mxfp4", 2048, 3),
        (2880, "int8", 1440, 2),  # each is a team's last
        (8192, "fp8", 2048, 4),
    ],
)
def test_the_last_of_many_slices_of_few_bits_is_the_narrow_one(
    ffn: int, name: str, tile: int, slices: int
) -> None:
    """So all threads of the others have columns."""
    base = load_model("llama-3.1-8b")
    spec = requantized(replace(base, ffn=ffn), format_named(name))
    plan = plan_for(spec, load_node("1xh200"))
    prove(plan)
    matrix = next(s.matrix for s in plan.stages if s.matrix and s.kind is StageKind.DOWN)
    assert (matrix.tile_cols, matrix.slices) == (tile, slices)
    assert schedule_of(plan).warps.teams["ffn"].full is (tile == 2048)


@pytest.mark.parametrize(
    ("node", "chosen", "rows"),
    [
        ("4xh200", {}, 40),  # a warp a tile: all experts are held at once
        ("2xmi300x", {}, 16),  # no teams
        ("2xh200", {"ahead_slots": 4}, 16),  # simulated only
    ],
)
def test_other_tiles_of_experts_fill_their_slot(
    node: str, chosen: dict[str, Any], rows: int
) -> None:
    assert down(planned("qwen3-30b-a3b", node, **chosen)).tile_rows == rows


def test_the_plan_knows_how_many_tiles_teams_hold_side_by_side() -> None:
    """One expert more, and a team of the kernel's division holds two."""
    for weight_bytes, cols, joined in product((2, 4), range(8, 1025, 8), range(1, 17)):
        team = team_of(joined * cols, cols, TEAM_WARPS, weight_bytes=weight_bytes)
        assert team is not None
        several = team.slices > team.teams
        assert several == (joined > teams_joined(cols, weight_bytes)), (weight_bytes, cols, joined)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "node", "chosen"),
    [
        ("qwen3-30b-a3b", "1xh200", {"tile_rows": 2}),
        ("qwen3-30b-a3b", "2xh200", {"tile_rows": 16}),
        ("qwen3-30b-a3b", "2xh200", {"slot_bytes": 64}),
        ("qwen3-30b-a3b", "1xh200", {"slot_bytes": 65536}),
        ("qwen3-30b-a3b@int4-g128", "1xh200", {"tile_rows": 2}),
        ("qwen3-30b-a3b@int4-g128", "1xh200", {"tile_rows": 12}),
        ("qwen3-30b-a3b@int4-g128", "8xh200", {"tile_rows": 24}),
        ("qwen3-30b-a3b@fp8-128x128", "2xh200", {"slot_bytes": 512}),
        ("gpt-oss-20b", "1xh200", {"tile_rows": 24}),
        ("gpt-oss-20b", "2xh200", {"tile_rows": 64}),
        ("gpt-oss-20b", "2xh200", {"slot_bytes": 256}),
        ("mixtral-8x7b", "2xh200", {"tile_rows": 32}),
    ],
)
def test_what_a_refusal_advises_is_a_plan(model: str, node: str, chosen: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refusal:
        schedule_of(planned(model, node, **chosen))
    found = ADVICE.search(str(refusal.value))
    assert found, str(refusal.value)
    name, value = (found[1], found[2]) if found[1] else (found[3], found[4])
    prove(planned(model, node, **{**chosen, name: int(value)}))


# ---- slots as large as tiles ---------------------------------------------------------------------


def tiles_of(plan: Plan, kind: StageKind) -> tuple[int, int]:
    matrix = next(s.matrix for s in plan.stages if s.matrix and s.kind is kind)
    return matrix.tile_rows, matrix.tile_cols


def test_a_ring_holds_more_where_no_tile_fills_a_slot() -> None:
    """12 KiB: 8 rows of 768 columns, and 6 of 1,024 where a block has 12 rows."""
    plan = planned("qwen2.5-coder-1.5b", "1xh200")
    assert (plan.options.slot_bytes, plan.options.ring_slots) == (12288, 17)
    assert plan.options.window_slots == 3  # as many as of 16 KiB
    assert tiles_of(plan, StageKind.GATE_UP) == (8, 768)
    assert tiles_of(plan, StageKind.DOWN) == (6, 1024)
    prove(plan)
    standard = planned("qwen2.5-coder-1.5b", "1xh200", slot_bytes=16384)
    assert standard.options.ring_slots == 13
    assert tiles_of(standard, StageKind.DOWN) == (8, 1024)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("llama-3.2-1b", {}),  # tiles fill their slots
        ("qwen2.5-coder-1.5b", {"max_context": 32768}),  # cached keys would come in small copies
        ("laneformer-2b", {}),
        ("qwen3-30b-a3b", {}),
        ("qwen2.5-coder-1.5b", {"gpus": 2}),
    ],
)
def test_other_slots_stay(model: str, chosen: dict[str, Any]) -> None:
    node = "2xh200" if "gpus" in chosen else "1xh200"
    assert planned(model, node, **chosen).options.slot_bytes == 16384


def test_rows_that_threads_share_badly_lie_whole() -> None:
    """18 KiB: 8 rows of 1,152 columns, of which each warp takes some by itself."""
    plan = planned("gemma-3-1b", "1xh200")
    assert (plan.options.slot_bytes, plan.options.ring_slots) == (18432, 11)
    for kind in (StageKind.QKV, StageKind.GATE_UP, StageKind.LM_HEAD):
        assert tiles_of(plan, kind) == (8, 1152)
    folded = {s.kind for s in plan.stages if s.matrix and s.matrix.folded}
    assert folded == {StageKind.QKV, StageKind.GATE_UP, StageKind.LM_HEAD}
    prove(plan)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("gemma-3-1b", {"slot_bytes": 16384}),
        ("gemma-3-1b", {"weight_dtype": DType.FP32}),
        ("gemma-3-1b", {"gpus": 2}),
        ("llama-3.2-1b", {"slot_bytes": 32768}),  # each thread has columns
        ("qwen3-30b-a3b", {"slot_bytes": 32768}),
    ],
)
def test_teams_share_other_rows(model: str, chosen: dict[str, Any]) -> None:
    plan = planned(model, "2xh200" if "gpus" in chosen else "1xh200", **chosen)
    assert not any(m.folded for s in plan.stages for m in s.matrices)


def test_folds_are_for_rows_of_which_they_waste_less() -> None:
    def matrix(cols: int, **other: Any) -> Matrix:
        shape = {"rows": 64, "tile_rows": 8, "tile_cols": cols} | other
        return Matrix(cols=cols, unit=1, owned=((0, 64),), **shape)

    assert [cols for cols in range(1024, 2056, 8) if folds(matrix(cols))] == list(
        range(1032, 1800, 8)
    )
    assert not folds(matrix(1152, tile_rows=16))
    assert not folds(matrix(1152, tile_cols=576))


def test_low_tiles_are_no_more_tiles() -> None:
    spread = ((0, 11), (11, 21))
    assert low_rows(1, spread, 8) == 6  # 6 and 5, for 8 and 3
    assert low_rows(1, ((0, 28),), 8) == 7
    assert low_rows(1, ((0, 9),), 8) == 6  # 5 rows would cost as much
    assert low_rows(1, ((0, 16),), 8) == 8
    assert low_rows(2, spread, 8) == 8  # a gate and its up row stay together
    assert low_rows(1, (), 8) == 8
