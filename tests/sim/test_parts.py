"""The parts of the machine, tight on both sides: not at t - 1, at t."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.proof.tiny import plan_of, tiny
from tests.sim.machines import FAST, ideal, limits_of, node_of, number, numbers, plan_for, usual
from twin.errors import HardwareError
from twin.hardware.override import apply_fit
from twin.hardware.types import Cache, Device, Sharing, Warps
from twin.kernel.scan import tensor_scan
from twin.models.spec import DType, Lanes
from twin.plan.catalogue import ROWS
from twin.plan.probe import attention_probe, exchange_probe, sample_probe, stream_probe, turns_probe
from twin.plan.types import CollectiveKind, Execution, HandOffKind, Options, Placement, Plan, StageKind
from twin.sim import cost
from twin.sim.attribution import critical_path
from twin.sim.causes import HAND_OFF, STREAMING
from twin.sim.clock import Clock, SimulationError
from twin.sim.cost import cache_tiles, partial_alignment, team_work, vector_bytes, vector_rounds
from twin.sim.links import Links
from twin.sim.lowering import compile_plan
from twin.sim.machine import Machine
from twin.sim.memory import Package, Path, Pipe
from twin.sim.ring import Ring
from twin.sim.run import simulate
from twin.sim.times import Times

US = 10**6  # ps


def fitted(device: Device, **values: float) -> Device:
    return apply_fit(device, {path.replace("__", "."): number(value) for path, value in values.items()})


def package_of(device: Device, placement: Placement = Placement.FLAT) -> Package:
    return Package(device, Times.of(device), placement, 0)


# ---- pipes --------------------------------------------------------------------------------------------------


def test_second_request_waits_for_the_pipe() -> None:
    pipe = Pipe("p", 1e12)  # a byte per picosecond
    assert [pipe.reserve(0, 100), pipe.reserve(40, 100), pipe.reserve(500, 1)] == [100, 200, 501]


def test_a_pipe_rounds_up() -> None:
    assert Pipe("p", 3e12).reserve(0, 1) == 1
    assert Pipe("p", 1e12, share=3).reserve(0, 100) == 300


def test_a_path_takes_as_long_as_its_slowest_pipe_and_its_latency() -> None:
    path = Path((Pipe("a", 1e12), Pipe("b", 5e11)), latency=7)
    assert path.request(0, 100) == 207


def test_small_transfers_get_half_of_a_pipe_that_streams_and_take_that_from_the_stream() -> None:
    pipe = Pipe("p", 1e12)
    pipe.reserve(0, 30)
    assert pipe.share(0, 100) == 130  # at half rate while the 30 last, at full rate after
    assert pipe.free == 130
    assert Pipe("p", 1e12).share(0, 100) == 100


def test_the_load_of_a_package_is_the_share_of_the_last_window() -> None:
    package = package_of(ideal())  # a byte per picosecond
    package.domains[0].reserve(0, 250)
    assert package.load(999, 1000) == 0  # the first window is not over
    assert package.load(1000, 1000) == 250
    assert package.load(2000, 1000) == 0


def test_interleaved_memory_passes_the_fabric_and_local_memory_does_not() -> None:
    device = usual(dies=4, io_dies=4)
    port = Pipe("block", FAST)
    flat, local = (package_of(device, placement).memory_path(0, port) for placement in (Placement.FLAT, Placement.DIE_AWARE))
    die = ["Gpu[0].Die[0].port", "Gpu[0].Die[0].l2", "block"]
    assert [pipe.name for pipe in flat.pipes] == ["Gpu[0].Memory[0]", "Gpu[0].Io[0].ingress", *die]
    assert [pipe.name for pipe in local.pipes] == ["Gpu[0].Memory[0]", *die]
    assert flat.latency - local.latency == 60_000  # ring of four: 0, 1, 1 and 2 hops of 60 ns
    assert local.pipes[0].cost(1000) == 4 * flat.pipes[0].cost(1000)


# ---- ring ---------------------------------------------------------------------------------------------------


def ring_of(capacity: int, window: int, latency: int = 0) -> tuple[Clock, Ring]:
    clock = Clock()
    path = Path((Pipe("p", 1e12),), latency)
    return clock, Ring(clock, [10] * 100, capacity=capacity, window=window, memory=path, cached=None, limit=100)


def test_the_ring_is_filled_and_no_further() -> None:
    clock, ring = ring_of(4, 4)
    ring.pump()
    clock.run(until=1000)
    assert ring.issued == 4
    ring.free()
    clock.run(until=1001)
    assert ring.issued == 5


def test_the_window_limits_slots_in_flight() -> None:
    clock, ring = ring_of(8, 2, latency=100)
    ring.history = []
    ring.pump()
    clock.run(until=10_000)
    assert ring.history[:4] == [(0, 110), (0, 120), (110, 220), (120, 230)]


def test_a_closed_ring_requests_nothing_before_its_kernel_starts() -> None:
    clock, ring = ring_of(4, 4)
    ring.open(2, at=50)
    clock.run(until=50)
    assert ring.issued == 0
    clock.run(until=51)
    assert ring.issued == 2


def test_a_slot_that_is_never_streamed_is_an_error() -> None:
    _, ring = ring_of(4, 4)
    ring.limit = 0
    with pytest.raises(SimulationError, match="never be requested"):
        ring.wait_ps()


# ---- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "second"), [("mesh", 1_020_000), ("switch", 1_040_000)])
def test_two_peers_have_a_link_each_in_a_mesh_and_share_one_behind_a_switch(topology: str, second: int) -> None:
    packages = [package_of(ideal()) for _ in range(3)]
    link = node_of(ideal(), 4, topology=topology).link
    assert link is not None
    links = Links(link, packages)
    assert links.send(0, 1, 0, 1000) == 1_020_000  # 1,000 B at 50 GB/s, 1 us
    assert links.send(0, 2, 0, 1000) == second


def test_an_unknown_topology_is_refused() -> None:
    link = node_of(ideal(), 2, topology="torus").link
    assert link is not None
    with pytest.raises(HardwareError, match="torus"):
        Links(link, [])


# ---- costs --------------------------------------------------------------------------------------------------


def test_a_cost_names_its_terms_and_the_one_that_binds() -> None:
    device = fitted(ideal(), block__bf16_bytes_per_s=1e12, block__row_s=5e-12)
    tile = cost.tile_cost(device.block, Options().weight_dtype, size=100, finished_rows=4)
    assert tile.terms == (("throughput", 100), ("rows", 20))
    assert (tile.ps, tile.binding) == (120, "throughput")
    assert replace(tile, overlap=True).ps == 100


def test_the_splits_of_a_head_read_all_its_positions_once() -> None:
    for context, window in ((1, 0), (100, 0), (100, 37), (256, 16)):
        options = Options(blocks=4, attention_splits=3, context=context, max_context=256)
        plan = attention_probe(options, limits_of(ideal()), heads=4, kv_heads=2, head_dim=16, window=window)
        stage = plan.stages[0]
        assert sum(cost.item_kv_bytes(plan, stage, item) for item in range(6)) == plan.kv_bytes()


def test_a_cache_holds_a_step_that_fits_and_nothing_of_one_that_does_not() -> None:
    whole = Cache(number(100), number(1e9), number(0))
    assert [cost.kept_share(size, whole) for size in (0, 100, 101)] == [0, 1, 0]


def test_a_cache_with_random_replacement_keeps_less_of_a_longer_stream() -> None:
    random = replace(Cache(number(100), number(1e9), number(0)), retention="random")
    shares = [cost.kept_share(size, random) for size in (100, 110, 150, 200, 400)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert abs(shares[3] - 0.2032) < 1e-3  # the root of h = exp(-2 (1 - h)) below 1
    assert shares[4] < 0.03


def test_later_steps_stream_from_the_cache_that_holds_them() -> None:
    device = replace(ideal(stream=1e10), llc=Cache(number(1e6), number(1e12), number(0)))
    plan = stream_probe(Options(blocks=4, slot_bytes=512), limits_of(device), rows=64, cols=64)
    result = simulate(plan, node_of(device), steps=3)
    assert result.step_ends_ps[0] == pytest.approx(simulate(plan, node_of(device), steps=1).floor_s * 1e12, rel=0.01)
    assert result.floor_s == result.bytes_per_step / 1e12
    assert result.step_ps < result.step_ends_ps[0] / 50


# ---- hand-offs: the time of one exchange, in closed form ----------------------------------------------------


def exchange_ps(device: Device, handoff: HandOffKind, blocks: int = 4, elements: int = 40) -> int:
    plan = exchange_probe(Options(blocks=blocks, handoff=handoff), limits_of(device), elements=elements, stages=6)
    return simulate(plan, node_of(device), steps=3).step_ps // 6


def handing(dies: int = 1) -> Device:
    return fitted(
        ideal(dies=dies, per_die=4 // dies), handoff__hop_s=3e-7, handoff__cross_die_s=1e-7, handoff__poll_s=4e-8, handoff__atomic_s=5e-9,
        block__element_s=1e-9, block__stage_s=2e-7, l2__latency_s=1.5e-7,
    )  # fmt: skip


def test_a_sentinel_costs_a_hop_half_a_poll_and_the_gather() -> None:
    own = 10_000  # ps: each block publishes 10 elements, and sets as many back
    assert exchange_ps(handing(), HandOffKind.SENTINEL) == pytest.approx(300_000 + 20_000 + 40_000 + 2 * own + 200_000, abs=10)


def test_another_die_is_further() -> None:
    assert exchange_ps(handing(2), HandOffKind.SENTINEL) - exchange_ps(handing(1), HandOffKind.SENTINEL) == pytest.approx(100_000, abs=10)


@pytest.mark.parametrize("handoff", [HandOffKind.COUNTER, HandOffKind.GRID])
def test_a_counter_costs_two_hops_an_atomic_per_block_and_a_load(handoff: HandOffKind) -> None:
    own = 10_000  # each block publishes 10 elements
    expected = 2 * 300_000 + 4 * 5_000 + 20_000 + 150_000 + 40_000 + own + 200_000
    assert exchange_ps(handing(), handoff) == pytest.approx(expected, abs=10)


def test_a_step_begins_with_one_access_to_memory_for_the_token() -> None:
    node, slow = (node_of(fitted(ideal(), memory__latency_s=latency)) for latency in (0, 1e-7))
    plan = plan_for(node, Options(blocks=4, slot_bytes=512, ring_slots=64, window_slots=64, tile_rows=2, max_context=256))
    reads = 1 + sum(stage.kind is StageKind.ATTENTION for stage in plan.stages)  # the cache is not read ahead either
    assert simulate(plan, slow).step_ps - simulate(plan, node).step_ps <= reads * 100_000
    assert simulate(plan, slow).attribution_ps["other"] >= 100_000


def test_the_sampling_block_looks_at_every_logit() -> None:
    device = fitted(ideal(per_die=1), block__sample_element_s=1e-9)
    plan = sample_probe(Options(blocks=1), limits_of(device), vocab=500)
    result = simulate(plan, node_of(device))
    assert result.step_ps == pytest.approx(500_000, abs=10)
    assert result.attribution_ps["sampling"] >= 500_000


# ---- kernels ------------------------------------------------------------------------------------------------


def test_a_graph_pays_an_edge_per_stage_and_a_stream_a_launch_per_operation() -> None:
    device = fitted(ideal(), launch__graph_edge_s=1e-6, launch__stream_s=3e-6)
    node = node_of(device)
    plan = plan_for(node, Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256))
    operations = sum(len(stage.operations) for stage in plan.stages)
    resident, graph, stream = (simulate(executed(plan, execution), node) for execution in Execution)
    assert graph.attribution_ps["launch"] == len(plan.stages) * US
    assert stream.attribution_ps["launch"] == operations * 3 * US
    assert resident.attribution_ps["launch"] == 0


def test_a_restart_is_counted_from_the_border_to_the_first_data() -> None:
    """restart_s contains the latency, so only the rest is added to it."""
    device = fitted(ideal(per_die=1, stream=1e9), memory__latency_s=3e-7, launch__restart_s=5e-7)
    plan = stream_probe(Options(blocks=1, slot_bytes=1024, execution=Execution.GRAPH), limits_of(device), rows=8, cols=64)
    assert simulate(plan, node_of(device)).step_ps == pytest.approx(500_000 + 1024 * 1000, abs=10)


def test_a_library_collective_waits_for_all_gpus_and_costs_its_time() -> None:
    node = node_of(ideal(), 2)
    options = Options(
        gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.LIBRARY, execution=Execution.GRAPH
    )
    plan = plan_for(node, options)
    calls = sum(stage.kind.value == "collective" for stage in plan.stages)
    assert simulate(plan, node).attribution_ps["collective"] == pytest.approx(calls * 4 * US, abs=2000)


def executed(plan: Plan, execution: Execution) -> Plan:
    return replace(plan, options=replace(plan.options, execution=execution))


# ---- shared cores -------------------------------------------------------------------------------------------


def test_blocks_of_one_core_take_turns() -> None:
    device = replace(fitted(ideal(per_die=1), block__bf16_bytes_per_s=1e9), sharing=Sharing(number(1e-6)))
    plans = [stream_probe(Options(blocks=n, slot_bytes=1024), limits_of(device), rows=16, cols=64) for n in (1, 2)]
    alone, shared = (simulate(plan, node_of(device), steps=1).step_ps for plan in plans)
    assert shared == pytest.approx(alone + US, abs=5000)


def test_emulated_gpus_share_one_memory() -> None:
    device = replace(ideal(per_die=2), sharing=Sharing(number(0)))
    node = node_of(device, 2, topology="memory")
    plan = plan_for(node, Options(gpus=2, blocks=2, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH))
    result = simulate(plan, node)
    assert result.stream_bytes_per_s == device.memory.stream_bytes_per_s.value
    assert result.floor_s == plan.bytes_per_step() / result.stream_bytes_per_s


# ---- refusals -----------------------------------------------------------------------------------------------


def test_a_plan_for_other_hardware_is_refused() -> None:
    node = node_of(ideal(), 2)
    plan = plan_for(node, Options(gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH))
    with pytest.raises(HardwareError, match="gpus=2"):
        simulate(plan, node_of(ideal()))
    with pytest.raises(HardwareError, match="no link"):
        simulate(plan, replace(node, link=None))
    with pytest.raises(HardwareError, match="blocks=4"):
        simulate(plan, node_of(ideal(per_die=2), 2))
    with pytest.raises(HardwareError, match="dies"):
        simulate(replace(plan, die_of_block=(0, 1, 2, 3)), node)


def test_a_value_that_nobody_publishes_in_time_is_a_deadlock() -> None:
    device = ideal()
    plan = exchange_probe(Options(blocks=4), limits_of(device), elements=8, stages=3)
    first = replace(plan.stages[0], reads=(replace(plan.stages[0].reads[0], previous_step=False),))
    with pytest.raises(SimulationError, match="deadlock"):
        simulate(replace(plan, stages=(first, *plan.stages[1:])), node_of(device))


# ---- what the plan is compiled to ---------------------------------------------------------------------------


def test_parts_of_all_ranks_are_gathered_and_reset() -> None:
    node = node_of(fitted(ideal(), block__element_s=1e-9), 2)
    plan = plan_for(node, Options(gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH))
    program = compile_plan(plan, node.device)
    gate_up = next(stage for stage in plan.stages if stage.kind is StageKind.GATE_UP)
    (read,) = program.stages[0][gate_up.index].reads
    assert read.size == 2 * 64 * 4  # two ranks' partial sums of 64 elements, in FP32
    assert read.cost_ps == 2 * 64 * 1000
    pushed = next(s for s in plan.stages for r in s.resets if plan.values[r.value].name == "o_proj[0]")
    others = sum(plan.values[r.value].owned[0][1] for r in pushed.resets if not plan.values[r.value].pushed)
    fixed = program.stages[0][pushed.index].fixed_ps
    own_publication = 0 if pushed.matrix else plan.values[pushed.publishes or 0].owned[0][1]
    assert fixed == (2 * 16 + others + own_publication + pushed.vector_elements) * 1000


def test_the_fixed_cost_of_a_row_is_paid_once_however_many_slices_it_has() -> None:
    device = fitted(ideal(per_die=1), block__row_s=1e-9)
    for slot_bytes in (128, 4096):
        plan = stream_probe(Options(blocks=1, slot_bytes=slot_bytes, tile_rows=2), limits_of(device), rows=8, cols=64)
        (work,) = compile_plan(plan, device).stages[0]
        assert sum(work.slots) - len(work.slots) == 8 * 1000  # a picosecond for each slot's bytes


def test_a_gather_is_limited_by_the_cache_that_all_blocks_of_a_die_share() -> None:
    device = fitted(ideal(), l2__bytes_per_s=1e9)
    gathered = 4 * 40 * 4  # bytes: four blocks, 40 elements each
    assert exchange_ps(device, HandOffKind.SENTINEL) == pytest.approx((gathered + 40 * 4) * 1000, rel=0.01)


def test_a_full_ring_requests_nothing_however_often_it_is_asked() -> None:
    clock, ring = ring_of(4, 4)
    ring.pump()
    clock.run(until=1000)
    ring.pump()
    assert ring.issued == 4


# ---- attribution --------------------------------------------------------------------------------------------


def test_waiting_for_a_slow_block_is_that_blocks_time_not_a_hand_off() -> None:
    """Another block owns all rows in each stage: the others wait long, but the path runs through its consumer."""
    device = fitted(ideal(), block__bf16_bytes_per_s=1e9, handoff__hop_s=3e-7)
    plan = plan_for(node_of(device), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256))
    stages = []
    for stage in plan.stages:
        if stage.matrix:
            rows, slow = stage.matrix.rows, stage.index % 4
            owned = tuple((0, rows) if block == slow else (rows, rows) for block in range(4))
            stage = replace(stage, matrix=replace(stage.matrix, owned=owned))
        stages.append(stage)
    slow = replace(plan, stages=tuple(stages))
    result = simulate(slow, node_of(device))
    exchanges = sum(1 for stage in plan.stages if stage.reads)
    assert result.attribution_ps["hand_off"] == pytest.approx(exchanges * 300_000, rel=0.01)
    down = [stage for stage in result.stages if stage.kind == "down"]
    assert all(stage.causes_ps["consumer"] + stage.causes_ps["streaming"] >= 64 * 128 * 2 * 1000 for stage in down)


def test_a_barrier_after_a_push_waits_for_the_other_gpu() -> None:
    device = fitted(ideal(), handoff__hop_s=3e-7)
    plans = [
        Options(gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH, handoff=HandOffKind.GRID)
    ]
    node = node_of(device, 2, hop_s=5e-6)
    plan = plan_for(node, plans[0])
    pushed = sum(plan.values[s.publishes].pushed for s in plan.stages if s.publishes is not None)
    result = simulate(plan, node)
    link_hops = result.step_ps - simulate(plan, node_of(device, 2, hop_s=0)).step_ps
    assert link_hops == pytest.approx(pushed * (5_000_000 - 300_000), rel=0.01)  # instead of the local hop


def warped(**changed: float) -> Device:
    """An ideal device whose blocks are of warps; only what is named costs anything."""
    rates = dict.fromkeys(("pair_bytes_per_s", "gather_bytes_per_s"), FAST)
    costs = (
        "copy_s", "watch_s", "jitter_s", "leave_s", "slice_s", "reduction_s", "item_s", "heads_s", "round_s", "unit_s", "crowd_s",
        "vector_s", "tile_s",
    )  # fmt: skip
    rates |= dict.fromkeys(costs, 0.0)
    return replace(ideal(stream=FAST), warps=Warps(**numbers(**{**rates, **changed})))


def streamed(device: Device, *, blocks: int = 1, slot_bytes: int = 16384, rows: int = 64) -> float:
    options = Options(blocks=blocks, slot_bytes=slot_bytes, ring_slots=4, window_slots=4)
    return simulate(stream_probe(options, limits_of(device), rows=rows, cols=2048), node_of(device)).step_s


def test_each_copy_of_a_loader_takes_its_time() -> None:
    assert streamed(warped(copy_s=1e-6)) == pytest.approx(16e-6, rel=0.1)
    assert streamed(warped(copy_s=1e-6), slot_bytes=8192) == pytest.approx(32e-6, rel=0.1)


def test_a_tile_bears_its_teams_share_of_the_reductions() -> None:
    """64 rows of 2,048 columns in tiles of 8 x 1,024: two teams of four warps, each ends eight times."""
    assert streamed(warped(reduction_s=1e-6)) == pytest.approx(8e-6, rel=0.01)
    assert streamed(warped(reduction_s=1e-6), rows=60) == pytest.approx(8e-6, rel=0.01)  # four rows cost what eight do


def test_a_warp_waits_for_each_slice_and_the_code_of_probes_joins_two() -> None:
    """64 rows: eight rounds. Of 2,048 columns a team sees one slice, of 4,096 two, which may have been taken ahead, of 12,288 six."""
    device = warped(slice_s=1e-6)
    plans = [stream_probe(Options(blocks=1), limits_of(device), rows=64, cols=cols) for cols in (2048, 4096, 12288)]
    assert [simulate(plan, node_of(device)).step_s for plan in plans] == [pytest.approx(time, rel=0.01) for time in (8e-6, 16e-6, 40e-6)]
    wide = plans[-1].stages[0].matrix
    assert wide is not None
    joined, layer = (team_work(device.warps, wide, rows=8, cols=1024, groups=1, dtype=DType.BF16, joined=said) for said in (True, False))
    assert (joined.ends_ps, layer.ends_ps) == (pytest.approx(5e6 / 12, abs=1), pytest.approx(6e6 / 12, abs=1))


def test_what_is_taken_ahead_is_saved_only_where_a_stage_waits() -> None:
    device, options = warped(slice_s=1e-6), Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=4)
    plain = stream_probe(options, limits_of(device), rows=64, cols=2048)
    (alone,) = compile_plan(plain, device).stages[0]
    assert alone.ahead == alone.slots[:8]
    layer = plan_for(node_of(device), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256))
    work = next(work for work in compile_plan(layer, device).stages[0] if work.kind is StageKind.GATE_UP)
    assert work.ahead
    assert all(rest < ps for ps, rest in zip(work.slots, work.ahead, strict=False))
    met = plan_for(node_of(device), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256, handoff=HandOffKind.GRID))
    work = next(work for work in compile_plan(met, device).stages[0] if work.kind is StageKind.GATE_UP)
    assert work.ahead == work.slots[: len(work.ahead)]


def test_a_team_that_is_alone_takes_as_long_as_two() -> None:
    """1,024 columns: one slice, so that the two teams take different rows."""
    options = Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=4)
    device = warped(reduction_s=1e-6)
    one, two, three = (
        simulate(stream_probe(options, limits_of(device), rows=rows, cols=1024), node_of(device)).step_s for rows in (8, 16, 24)
    )
    assert (one, two) == (pytest.approx(1e-6, rel=0.2), pytest.approx(1e-6, rel=0.3))
    assert three - two == pytest.approx(1e-6, rel=0.2)


def test_lanes_without_columns_take_as_long_as_the_others() -> None:
    """768 columns fill three quarters of four warps."""
    narrow, wide = (stream_probe(Options(blocks=1), limits_of(warped()), rows=64, cols=cols).stages[0].matrix for cols in (1536, 2048))
    assert narrow is not None
    assert wide is not None
    works = [team_work(warped().warps, matrix, rows=8, cols=matrix.tile_cols, groups=1, dtype=DType.BF16) for matrix in (narrow, wide)]
    assert [matrix.tile_cols for matrix in (narrow, wide)] == [768, 1024]
    assert works[0].weights == works[1].weights == 8 * 1024


def test_tiles_taken_ahead_leave_room_in_the_ring() -> None:
    """Eight tiles of a stage, four a team, where the block has one rank's narrow residual in 16 bits; none of FP32, and none where a slot
    is only asked for once the inputs are there."""
    options = Options(blocks=2, slot_bytes=16384, ring_slots=4, window_slots=4)
    for dtype, tiles in ((DType.BF16, 8), (DType.FP32, 0)):
        plan = turns_probe(replace(options, weight_dtype=dtype), limits_of(warped()), elements=2, rows=96, cols=2048, stages=3)
        works = compile_plan(plan, warped()).stages[0]
        assert {len(work.ahead) for work in works if work.slots} == {tiles}
        late = replace(warped(), block=replace(warped().block, loading="on-demand"))
        assert not any(work.ahead for work in compile_plan(plan, late).stages[0])


def test_a_stage_waits_for_its_first_tiles_before_its_inputs() -> None:
    """From a slow memory they come later than a quick hand-off, which is then no part of the wait; a slow one begins before they are there
    and ends as late as without them."""
    options, logs = Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256), []
    for hop_s in (0.0, 1.0):
        device = apply_fit(warped(), {"memory.stream_bytes_per_s": number(1e9), "handoff.hop_s": number(hop_s)})
        machine = Machine(plan_for(node_of(device), options), node_of(device), steps=2, keep_all=True)
        machine.run()
        block = machine.blocks[0]
        at = next(index for index, work in enumerate(block.program) if work.kind is StageKind.GATE_UP)
        assert len(block.program[at].ahead) > block.ring.capacity
        logs.append([(round(end / 1e6), cause, binder) for end, cause, binder in block.log[1][at]])
        pieces = critical_path(machine.blocks, 1, len(machine.plan.stages))
        assert sum(piece.end - piece.start for piece in pieces) == machine.blocks[0].ended[1] - machine.blocks[0].ended[0]
    quick, slow = logs
    assert quick[0][1] == STREAMING
    assert {end for end, _, _ in quick} == {quick[0][0]}
    assert not any(binder for _, _, binder in quick)
    assert [cause for _, cause, _ in slow[:2]] == [STREAMING, HAND_OFF]
    assert slow[1][2] is not None
    assert slow[1][0] == pytest.approx(slow[1][2][2] / 1e6 + 1e6)


def test_blocks_walk_apart_as_the_root_of_their_tiles() -> None:
    """Four times the rows, about twice the deviation; a block that is late in one stretch is not late in the next."""
    options = Options(blocks=32, slot_bytes=16384, ring_slots=4, window_slots=3)

    def deviation(rows: int, **changed: float) -> float:
        device = replace(warped(**changed), memory=replace(warped().memory, latency_s=number(1e-6)))
        device = replace(device, structure=replace(device.structure, blocks_per_die=number(32)))
        machine = Machine(stream_probe(options, limits_of(device), rows=32 * rows, cols=2048), node_of(device), steps=2, keep_all=False)
        machine.run()
        return float(np.std([block.ended[-1] for block in machine.blocks]))

    assert deviation(256) < 10  # ps: requests take turns
    few, many = (deviation(rows, jitter_s=4e-7) for rows in (256, 1024))
    assert few > 10**5
    assert 1.5 < many / few < 2.7


def test_a_fence_comes_behind_each_row_group_that_is_taken_ahead() -> None:
    """Eight tiles: the two slices of four row groups, of which two teams take one slice each."""
    plan = turns_probe(Options(blocks=2, ring_slots=8, window_slots=8), limits_of(warped()), elements=2, rows=96, cols=2048, stages=3)
    works = [work for work in compile_plan(plan, warped()).stages[0] if work.slots]
    assert {(len(work.ahead), work.group) for work in works} == {(8, 2)}
    plain, fenced = (simulate(plan, node_of(warped(leave_s=leave_s))).step_s for leave_s in (0.0, 1e-6))
    assert fenced - plain == pytest.approx(len(works) * 4e-6, rel=0.05)


def test_lanes_of_one_gpu_begin_apart() -> None:
    """Those of the last group end so much later, where nothing is shared."""
    lanes, device = replace(tiny(4, Lanes(8, 2), heads=8, kv_heads=8), ffn=64), ideal(per_die=8)
    times = []
    for stagger in (0, 7000):
        plan = plan_of(lanes, limits=limits_of(device), blocks=8, lane_stagger_ns=stagger)
        machine = Machine(plan, node_of(device), steps=1, keep_all=False)
        machine.run()
        times.append(max(block.ended[0] for block in machine.blocks))
    assert times[1] - times[0] == pytest.approx(21e6, rel=0.01)


def test_two_neighbours_share_a_port_and_a_lone_block_has_its_own() -> None:
    device = warped(pair_bytes_per_s=1e10)
    assert streamed(device, blocks=2, rows=128) == pytest.approx(streamed(device, blocks=1), abs=1e-7)
    size = 64 * 2048 * 2
    assert streamed(device, blocks=4, rows=256) == pytest.approx(2 * size / 1e10, rel=0.05)


def test_an_item_is_scanned_in_rounds() -> None:
    """64 elements, 4 query heads: 2 warps a head, 4 positions a warp and load, 4 loads: 32 positions a round."""
    device = warped(item_s=3e-6, round_s=1e-6)
    options = Options(blocks=1, context=256, max_context=256, attention_splits=1)
    plan = attention_probe(options, limits_of(device), heads=4, kv_heads=1, head_dim=64)
    assert simulate(plan, node_of(device)).step_s == pytest.approx(3e-6 + 8e-6, rel=0.01)


def behind_a_queue(pipe_s: float, **times: float) -> Package:
    """A package whose memory is busy for `pipe_s` from time 0 on."""
    device = apply_fit(usual(), {"handoff.hop_s": number(1e-6)})
    handoff = replace(device.handoff, loaded_hop_s=number(times.get("hop_s", 1e-6)))
    l2 = replace(device.l2, latency_s=number(1e-7), loaded_latency_s=number(times.get("latency_s", 1e-7)))
    device = replace(device, handoff=handoff, l2=l2)
    package = package_of(device)
    package.domains[0].reserve(0, int(pipe_s * device.memory.stream_bytes_per_s.value))
    return package


def test_a_hop_and_a_load_grow_with_the_bytes_in_flight() -> None:
    """Loaded times are those behind a queue of one microsecond."""
    for queue_us in (0, 1, 4):
        package = behind_a_queue(queue_us * 1e-6, hop_s=3e-6, latency_s=6e-7)
        assert package.queueing(0) == pytest.approx(queue_us * 2_000_000, rel=1e-3)
        assert package.fetching(0) == pytest.approx(queue_us * 500_000, rel=1e-3)
        assert package.queueing(queue_us * 1_000_000 + 1000) == 0  # what was asked for has come


def test_hops_without_a_loaded_time_do_not_grow() -> None:
    package = behind_a_queue(5e-6)
    assert package.queueing(0) == package.fetching(0) == 0


def test_a_hand_off_pays_for_the_stream_that_is_in_flight_when_it_is_made() -> None:
    idle = apply_fit(ideal(stream=1e11), {"handoff.hop_s": number(1e-6)})
    loaded = replace(idle, handoff=replace(idle.handoff, loaded_hop_s=number(1.5e-6)))
    options = Options(blocks=4, slot_bytes=2048, ring_slots=4, window_slots=4)
    quiet = exchange_probe(options, limits_of(idle), elements=4, stages=3)
    assert simulate(quiet, node_of(loaded)).step_s == simulate(quiet, node_of(idle)).step_s
    busy = turns_probe(options, limits_of(idle), elements=4, rows=96, cols=512, stages=3)
    assert simulate(busy, node_of(loaded)).step_s > simulate(busy, node_of(idle)).step_s


def test_a_batch_of_rows_ends_with_its_last_tiles_way_through_the_block() -> None:
    for rows, batches in ((8, 1), (64, 1), (65, 2), (128, 2)):
        assert streamed(warped(tile_s=1e-6), rows=rows) == pytest.approx(batches * 1e-6, rel=0.02)


def test_a_loader_that_watches_its_window_takes_longer() -> None:
    device = warped(copy_s=1e-6, watch_s=5e-7)
    times = {}
    for window in (2, 4):
        options = Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=window)
        times[window] = simulate(stream_probe(options, limits_of(device), rows=64, cols=2048), node_of(device)).step_s
    assert times[4] == pytest.approx(16e-6, rel=0.1)
    assert times[2] == pytest.approx(24e-6, rel=0.1)


def test_loads_take_whole_sectors() -> None:
    """Eight elements a lane, 32 bytes: two loads of 16 bytes take each sector twice, four of 8 bytes four times; of items that begin with a
    sector lanes that load together take it once."""
    matrix = stream_probe(Options(blocks=1), limits_of(warped()), rows=8, cols=2048).stages[0].matrix
    assert matrix is not None
    assert [vector_bytes(matrix, aligned=aligned) for aligned in (32, 16, 8)] == [4 * 2048, 2 * 4 * 2048, 4 * 4 * 2048]
    assert [partial_alignment(width) for width in (4 * 66, 2 * 66, 3 * 66, 7)] == [32, 16, 8, 4]
    assert vector_bytes(matrix, aligned=16, element=2) == 2 * 2048  # eight elements of 16 bits are one load


def test_a_look_at_exchanged_elements_takes_a_load_even_if_they_are_there() -> None:
    """Turns long enough to hide the hand-off: the look is all that is left of it."""
    device = replace(warped(reduction_s=1e-6), l2=replace(warped().l2, latency_s=number(3e-7)))
    options = Options(blocks=2, slot_bytes=16384, ring_slots=4, window_slots=4)
    plan = turns_probe(options, limits_of(device), elements=2, rows=64, cols=2048, stages=3)
    quick = replace(device, l2=replace(device.l2, latency_s=number(0)))
    assert simulate(plan, node_of(device)).step_s - simulate(plan, node_of(quick)).step_s == pytest.approx(3 * 3e-7, rel=0.4)


def test_vectors_of_parts_and_splits_are_gathered_in_rounds() -> None:
    """A row of 2,048 columns: one chunk a lane; of 8,192: four."""
    narrow, wide = (stream_probe(Options(blocks=1), limits_of(warped()), rows=8, cols=cols).stages[0].matrix for cols in (2048, 8192))
    assert [vector_rounds(narrow, parts=parts, splits=0) for parts in (1, 4, 7, 8)] == [1, 1, 2, 2]
    assert [vector_rounds(wide, parts=parts, splits=0) for parts in (1, 4, 7, 8)] == [1, 2, 4, 4]
    assert [vector_rounds(narrow, parts=1, splits=splits) for splits in (1, 8, 16)] == [1, 2, 4]
    assert vector_rounds(wide, parts=1, splits=8) == 4  # of all chunks together, half as many splits


def test_a_block_of_warps_norms_a_vector_at_once() -> None:
    plan = plan_for(node_of(ideal()), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256))
    weighs = StageKind.O_PROJ  # the partial outputs where it gathers them
    kinds = [kind for kind, row in ROWS.items() if row.vector and kind is not weighs]
    normed = sum(stage.kind in kinds and stage.vector_elements > 0 for stage in plan.stages)
    steps = [simulate(plan, node_of(warped(vector_s=seconds))).step_s for seconds in (0.0, 1e-6)]
    best = 2  # of all candidates: of a block's, of all blocks'
    assert steps[1] - steps[0] == pytest.approx((normed + best) * 1e-6, rel=0.01)


def test_a_fence_is_paid_where_arrivals_are_counted() -> None:
    device = replace(ideal(), handoff=replace(ideal().handoff, fence_s=number(1e-6)))
    times = {}
    for kind in HandOffKind:
        plan = exchange_probe(Options(blocks=4, handoff=kind), limits_of(device), elements=4, stages=3)
        times[kind] = simulate(plan, node_of(device)).step_s
    assert times[HandOffKind.SENTINEL] == pytest.approx(0, abs=1e-7)
    assert times[HandOffKind.COUNTER] == times[HandOffKind.GRID] == pytest.approx(3e-6, rel=0.05)


def test_cached_keys_come_through_the_ring() -> None:
    """One item of 128 positions, 64 x 2 bytes each for key and value: two slots of 16 KiB, in each a round of one query head."""
    options = Options(blocks=1, slot_bytes=16384, ring_slots=4, window_slots=4, context=128, max_context=128, attention_splits=1)
    device = warped(round_s=1e-6, item_s=5e-6)
    plan = attention_probe(options, limits_of(device), heads=1, kv_heads=1, head_dim=64, stages=1)
    work = compile_plan(plan, device).stages[0][0]
    assert (work.kv, [round(ps / 1e6, 6) for ps in work.slots]) == ((), [6.0, 1.0])
    assert simulate(plan, node_of(device)).step_s == pytest.approx(7e-6, rel=0.01)
    waiting = compile_plan(plan, warped(slice_s=1e-6)).stages[0][0]
    assert [round(ps / 1e6, 6) for ps in waiting.slots] == [1.0, 1.0]  # each tile is awaited


def test_a_round_takes_by_positions_a_lane_and_lanes_a_position() -> None:
    """Heads of 96 hold one position a lane; of 128 on sixteen lanes, so that sums over them take a step more."""
    device, took = warped(round_s=1e-6), {}
    for head_dim in (64, 96, 128):
        plan = attention_probe(Options(blocks=1, context=16, max_context=16), limits_of(device), heads=1, kv_heads=1, head_dim=head_dim)
        took[head_dim] = sum(compile_plan(plan, device).stages[0][0].slots) / 1e6
    assert took == pytest.approx({64: 1.0, 96: 7 / 16, 128: 10 / 9})


def scanned(context: int, head_dim: int, *, group: int = 4, slot_bytes: int = 16384, **times: float) -> list[float]:
    """Microseconds of the cached tiles of one item on tensor cores."""
    options = Options(blocks=1, slot_bytes=slot_bytes, context=context, max_context=context, attention_splits=1)
    limits = replace(limits_of(warped()), teams=True)
    plan = attention_probe(options, limits, heads=group, kv_heads=1, head_dim=head_dim, stages=1)
    assert tensor_scan(plan)
    return [round(ps / 1e6, 6) for ps in compile_plan(plan, warped(**times)).stages[0][0].slots]


def test_on_tensor_cores_four_warps_take_sixteen_positions_each() -> None:
    """Tiles of 16 KiB hold 64 positions of 64 elements, 32 of 128: two of these are looked at side by side, and the last one shows."""
    assert scanned(128, 128, unit_s=1e-6) == [0.0, 1.0, 0.0, 1.0]
    assert scanned(160, 128, unit_s=1e-6) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert scanned(80, 128, unit_s=1e-6, slot_bytes=32768) == [1.0, 1.0]
    assert scanned(128, 64, unit_s=1e-6) == [0.8, 0.8]  # 16 steps of 20: half the products, the same softmax
    assert scanned(16, 128, unit_s=1e-6) == [1.0]
    assert scanned(64, 128, unit_s=1e-6, group=7) == [0.0, 1.0]  # each set of heads has warps of its own
    assert scanned(64, 128, slice_s=1e-6, round_s=1e-6) == [1.0, 1.0]  # each tile is awaited; there are no rounds


def test_an_items_start_and_end_grow_with_its_outputs() -> None:
    """A probe puts down a query for each of 256 threads at once; a layer publishes two outputs a thread."""
    assert [scanned(64, dim, group=group, item_s=2e-6)[0] for dim, group in ((64, 4), (128, 4), (64, 7))] == [2.0, 3.0, 3.0]
    warps = warped(item_s=2e-6).warps
    assert warps is not None
    starts = []
    for heads in (4, 8):  # of one key head: 512 and 1,024 outputs
        layer = plan_of(replace(tiny(heads=heads, kv_heads=1), head_dim=128), blocks=4, slot_bytes=16384, max_context=256)
        starts.append(next(cache_tiles(warps, layer, 64 << 10))[1] / 1e6)
    assert starts == [2.0, 3.0]


def test_heads_of_a_block_are_prepared_a_warp_each() -> None:
    """Four query heads, a key and a value: one round of eight warps; seven query heads: two, the second half as long."""
    warps = warped(heads_s=1e-6).warps
    assert warps is not None
    assert [cost.heads_ps(warps, dim, heads) for dim, heads in ((64, 6), (128, 6), (64, 9), (64, 17))] == [
        10**6,
        2 * 10**6,
        15 * 10**5,
        2 * 10**6,
    ]


def test_of_fewer_splits_than_are_looked_at_together_the_last_is_loaded_again() -> None:
    """A single split four times, two splits the second of them three times, four each once."""
    took = {}
    for splits in (1, 2, 4, 8):
        options = Options(blocks=4, slot_bytes=512, tile_rows=2, context=255, max_context=256, attention_splits=splits)
        plan = plan_for(node_of(ideal()), options)
        idle, crowded = (
            next(work for work in compile_plan(plan, warped(crowd_s=seconds)).stages[0] if work.kind is StageKind.O_PROJ).reads[0].cost_ps
            for seconds in (0.0, 1e-6)
        )
        took[splits] = (crowded - idle) / 1e6
    assert took == pytest.approx({1: 3.0, 2: 1.0, 4: 0.0, 8: 0.0})
