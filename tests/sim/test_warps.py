"""Blocks of warps: loaders, teams, rows, prefetched tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.machines import (
    MODEL,
    ideal,
    limits_of,
    node_of,
    number,
    plan_for,
    rounds_of_splits,
    streamed,
    warped,
    warps_of,
)
from twin.calibrate.gpu_layers import chain_plan, chain_spec
from twin.cost.lowering import compile_plan
from twin.cost.tiles import team_work, tiles_of_a_round
from twin.hardware.load import load_node
from twin.models.spec import DType
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.options import HandOffKind, Options
from twin.plan.types import Plan
from twin.schedule import options as defaults
from twin.schedule.choose import priced_schedule
from twin.schedule.plans import build
from twin.schedule.prefetch import Prefetch
from twin.schedule.probe import stream_probe, turns_probe
from twin.schedule.splits import SPLITS_AT_ONCE
from twin.sim.machine import Machine
from twin.sim.run import simulate


def prefetched(plan: Plan, kind: StageKind) -> Prefetch:
    stage = next(stage for stage in plan.stages if stage.kind is kind)
    found = priced_schedule(plan).prefetch(stage)
    assert found
    return found


def test_each_copy_of_a_loader_takes_its_time() -> None:
    assert streamed(warped(copy_s=1e-6)) == pytest.approx(16e-6, rel=0.1)
    assert streamed(warped(copy_s=1e-6), slot_bytes=8192) == pytest.approx(32e-6, rel=0.1)


def test_a_tile_bears_its_teams_share_of_the_reductions() -> None:
    """64 rows of 2,048 columns in tiles of 8 x 1,024: two teams of four warps, each ends eight
    times.
    """
    assert streamed(warped(reduction_s=1e-6)) == pytest.approx(8e-6, rel=0.01)
    # four rows cost what eight do
    assert streamed(warped(reduction_s=1e-6), rows=60) == pytest.approx(8e-6, rel=0.01)


def test_a_warp_waits_for_each_slice_and_the_code_of_probes_joins_two() -> None:
    """64 rows: eight rounds. Of 2,048 columns a team sees one slice, of 4,096 two, which may have
    been prefetched, of 12,288 six.
    """
    device = warped(slice_s=1e-6)
    plans = [
        stream_probe(Options(blocks=1), limits_of(device), rows=64, cols=cols)
        for cols in (2048, 4096, 12288)
    ]
    assert [simulate(plan, node_of(device)).step_s for plan in plans] == [
        pytest.approx(time, rel=0.01) for time in (8e-6, 16e-6, 40e-6)
    ]
    wide = plans[-1].stages[0].matrix
    assert wide is not None
    joined, separate = (
        team_work(
            warps_of(device), wide, rows=8, cols=1024, groups=1, dtype=DType.BF16, joined=said
        )
        for said in (True, False)
    )
    assert (joined.ends_ps, separate.ends_ps) == (
        pytest.approx(5e6 / 12, abs=1),
        pytest.approx(6e6 / 12, abs=1),
    )


def test_of_prefetched_tiles_the_first_round_is_saved_where_a_stage_waits() -> None:
    device, options = (
        warped(slice_s=1e-6),
        Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=4),
    )
    plain = stream_probe(options, limits_of(device), rows=64, cols=2048)
    (alone,) = compile_plan(plain, device).stages[0]
    assert alone.ahead == alone.slots[:8]
    wide, wanted = (
        replace(MODEL, hidden=2048),
        Options(blocks=4, slot_bytes=16384, tile_rows=4, max_context=256),
    )
    layer = build(wide, wanted, limits_of(device))
    work = next(
        work for work in compile_plan(layer, device).stages[0] if work.kind is StageKind.GATE_UP
    )
    gate_up = next(stage for stage in layer.stages if stage.kind is StageKind.GATE_UP)
    assert gate_up.matrix is not None
    first = tiles_of_a_round(gate_up.matrix, layer.options.weight_dtype)
    assert 0 < first < len(work.ahead)
    assert all(rest < ps for ps, rest in zip(work.slots[:first], work.ahead, strict=False))
    assert work.ahead[first:] == work.slots[first : len(work.ahead)]
    met = build(wide, replace(wanted, handoff=HandOffKind.GRID), limits_of(device))
    work = next(
        work for work in compile_plan(met, device).stages[0] if work.kind is StageKind.GATE_UP
    )
    assert work.ahead == work.slots[: len(work.ahead)]


def test_a_team_that_is_alone_takes_as_long_as_two() -> None:
    """1,024 columns: one slice, so that the two teams take different rows."""
    options = Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=4)
    device = warped(reduction_s=1e-6)
    one, two, three = (
        simulate(
            stream_probe(options, limits_of(device), rows=rows, cols=1024), node_of(device)
        ).step_s
        for rows in (8, 16, 24)
    )
    assert (one, two) == (pytest.approx(1e-6, rel=0.2), pytest.approx(1e-6, rel=0.3))
    assert three - two == pytest.approx(1e-6, rel=0.2)


def test_threads_without_columns_take_as_long_as_the_others() -> None:
    """768 columns fill three quarters of four warps."""
    narrow, wide = (
        stream_probe(Options(blocks=1), limits_of(warped()), rows=64, cols=cols).stages[0].matrix
        for cols in (1536, 2048)
    )
    assert narrow is not None
    assert wide is not None
    works = [
        team_work(
            warps_of(warped()), matrix, rows=8, cols=matrix.tile_cols, groups=1, dtype=DType.BF16
        )
        for matrix in (narrow, wide)
    ]
    assert [matrix.tile_cols for matrix in (narrow, wide)] == [768, 1024]
    assert works[0].weights == works[1].weights == 8 * 1024


def test_prefetched_tiles_leave_room_in_the_ring() -> None:
    """Eight tiles of a stage, four a team, where the block has one rank's narrow residual in 16
    bits; none of FP32, and none where a slot is loaded only once the inputs are there.
    """
    options = Options(blocks=2, slot_bytes=16384, ring_slots=4, window_slots=4)
    for dtype, tiles in ((DType.BF16, 8), (DType.FP32, 0)):
        plan = turns_probe(
            replace(options, weight_dtype=dtype),
            limits_of(warped()),
            elements=2,
            rows=96,
            cols=2048,
            stages=3,
        )
        works = compile_plan(plan, warped()).stages[0]
        assert {len(work.ahead) for work in works if work.slots} == {tiles}
        late = replace(warped(), block=replace(warped().block, loading="on-demand"))
        assert not any(work.ahead for work in compile_plan(plan, late).stages[0])


def test_blocks_times_spread_as_the_root_of_their_tiles() -> None:
    """Four times the rows, about twice the deviation; a block that is late in one stretch is not
    late in the next.
    """
    options = Options(blocks=32, slot_bytes=16384, ring_slots=4, window_slots=3)

    def deviation(rows: int, **changed: float) -> float:
        device = warped(**changed)
        device = replace(device, memory=replace(device.memory, latency_s=number(1e-6)))
        device = replace(device, structure=replace(device.structure, blocks_per_die=number(32)))
        machine = Machine(
            stream_probe(options, limits_of(device), rows=32 * rows, cols=2048),
            node_of(device),
            steps=2,
            keep_all=False,
        )
        machine.run()
        return float(np.std([block.ended[-1] for block in machine.blocks]))

    assert deviation(256) < 10  # ps: requests take turns
    few, many = (deviation(rows, jitter_s=4e-7) for rows in (256, 1024))
    assert few > 10**5
    assert 1.5 < many / few < 2.7


def test_a_fence_comes_behind_each_prefetched_row_group() -> None:
    """Eight tiles: the two slices of four row groups, of which two teams take one slice each."""
    plan = turns_probe(
        Options(blocks=2, ring_slots=8, window_slots=8),
        limits_of(warped()),
        elements=2,
        rows=96,
        cols=2048,
        stages=3,
    )
    works = [work for work in compile_plan(plan, warped()).stages[0] if work.slots]
    assert {(len(work.ahead), work.group) for work in works} == {(8, 2)}
    plain, fenced = (
        simulate(plan, node_of(warped(leave_s=leave_s))).step_s for leave_s in (0.0, 1e-6)
    )
    assert fenced - plain == pytest.approx(len(works) * 4e-6, rel=0.05)


def test_two_neighbours_share_a_port_and_a_lone_block_has_its_own() -> None:
    device = warped(pair_bytes_per_s=1e10)
    assert streamed(device, blocks=2, rows=128) == pytest.approx(
        streamed(device, blocks=1), abs=1e-7
    )
    size = 64 * 2048 * 2
    assert streamed(device, blocks=4, rows=256) == pytest.approx(2 * size / 1e10, rel=0.05)


def test_a_batch_of_rows_ends_with_its_last_tiles_way_through_the_block() -> None:
    for rows, batches in ((8, 1), (64, 1), (65, 2), (128, 2)):
        assert streamed(warped(tile_s=1e-6), rows=rows) == pytest.approx(batches * 1e-6, rel=0.02)


def test_a_loader_that_watches_its_window_takes_longer() -> None:
    device = warped(copy_s=1e-6, watch_s=5e-7)
    times = {}
    for window in (2, 4):
        options = Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=window)
        times[window] = simulate(
            stream_probe(options, limits_of(device), rows=64, cols=2048), node_of(device)
        ).step_s
    assert times[4] == pytest.approx(16e-6, rel=0.1)
    assert times[2] == pytest.approx(24e-6, rel=0.1)


def test_a_block_of_warps_norms_a_vector_at_once() -> None:
    plan = plan_for(
        node_of(ideal()), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256)
    )
    weighs = StageKind.O_PROJ  # the partial outputs where it gathers them
    kinds = [kind for kind, row in ROWS.items() if row.vector and kind is not weighs]
    normed = sum(stage.kind in kinds and stage.vector_elements > 0 for stage in plan.stages)
    steps = [simulate(plan, node_of(warped(vector_s=seconds))).step_s for seconds in (0.0, 1e-6)]
    best = 2  # of all candidates: of a block's, of all blocks'
    assert steps[1] - steps[0] == pytest.approx((normed + best) * 1e-6, rel=0.01)


def test_a_normed_input_costs_more_behind_prefetched_weights() -> None:
    plan = plan_for(
        node_of(ideal()), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256)
    )
    taken = priced_schedule(plan)
    behind = [
        stage
        for stage in plan.stages
        if stage.vector_elements
        and stage.kind is not StageKind.O_PROJ
        and (prefetch := taken.prefetch(stage))
        and prefetch.portions
    ]
    assert {stage.kind for stage in behind} >= {StageKind.QKV, StageKind.GATE_UP}
    steps = [simulate(plan, node_of(warped(prefetch_s=seconds))).step_s for seconds in (0.0, 1e-6)]
    assert steps[1] - steps[0] == pytest.approx(len(behind) * 1e-6, rel=0.01)


@pytest.mark.parametrize(("ffn", "held"), [(3072, False), (4096, True), (8192, False)])
def test_a_down_projection_ends_later_where_its_teams_hold_whole_row_groups(
    ffn: int, *, held: bool
) -> None:
    """Three slices for one team; two for each of two, all prefetched; four, of which three are."""
    node = load_node("1xh200")
    spec = chain_spec("held", layers=2, hidden=896, heads=12, kv_heads=4, head_dim=128, ffn=ffn)
    plan = chain_plan(defaults.limits_of(node), spec)
    assert prefetched(plan, StageKind.DOWN).whole is held
    costs = warps_of(node.device)
    steps = [
        simulate(
            plan,
            replace(
                node,
                device=replace(
                    node.device,
                    kernel=replace(costs, group_s=replace(costs.group_s, value=seconds)),
                ),
            ),
        ).step_s
        for seconds in (0.0, 2e-6)
    ]
    longer = steps[1] - steps[0]
    assert 2e-6 < longer < 4.1e-6 if held else longer == 0


@pytest.mark.parametrize(("heads", "several"), [(12, False), (20, True), (40, False)])
def test_an_output_projection_ends_later_behind_weights_of_several_slices(
    heads: int, *, several: bool
) -> None:
    """One slice of 1,536 columns for each of two teams; three of 2,560; five, with nothing
    prefetched.
    """
    node = load_node("1xh200")
    spec = chain_spec(
        "sliced", layers=2, hidden=1600, heads=heads, kv_heads=4, head_dim=128, ffn=5120
    )
    plan = chain_plan(defaults.limits_of(node), spec)
    assert prefetched(plan, StageKind.O_PROJ).several is several
    assert not prefetched(plan, StageKind.DOWN).whole
    costs = warps_of(node.device)
    steps = []
    for seconds in (0.0, 2e-6):
        warps = replace(costs, group_s=replace(costs.group_s, value=seconds))
        steps.append(
            simulate(plan, replace(node, device=replace(node.device, kernel=warps))).step_s
        )
    longer = steps[1] - steps[0]
    assert 2e-6 < longer < 4.1e-6 if several else longer == 0


@pytest.mark.parametrize(
    ("heads", "slot_bytes", "latencies"),
    [(12, 16384, 1), (28, 16384, 2), (20, 16384, 1), (20, 14336, 1), (40, 16384, 1)],
)
def test_splits_come_later_into_two_slices_next_to_weights(
    heads: int, slot_bytes: int, latencies: int
) -> None:
    """One slice of a thread; two where it holds weights as well; three whole ones, and three of 856
    columns, of which some threads have none; five. Two splits are on their way at a time, four
    where a thread has one slice.
    """
    node = load_node("1xh200")
    plan = rounds_of_splits(node, heads, slot_bytes)
    (stage,) = (stage for stage in plan.stages if stage.kind is StageKind.O_PROJ)
    (read,) = compile_plan(plan, node.device).stages[0][stage.index].reads
    together = SPLITS_AT_ONCE if heads == 12 else SPLITS_AT_ONCE // 2
    assert read.rounds == plan.kernel_attention().splits // together * latencies - 1
