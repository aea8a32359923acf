"""Kernels, shared cores, and what no machine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.proof.tiny import plan_of, tiny
from tests.sim.machines import fitted, ideal, limits_of, node_of, number, plan_for
from twin.errors import HardwareError
from twin.hardware.load import load_node
from twin.hardware.types import Sharing
from twin.models.load import load_model
from twin.models.spec import Lanes
from twin.plan.options import CollectiveKind, Execution, Options
from twin.plan.types import Plan
from twin.schedule.options import plan_for as default_plan
from twin.schedule.probe import exchange_probe, stream_probe
from twin.sim.clock import SimulationError
from twin.sim.machine import Machine
from twin.sim.run import simulate

US = 10**6  # ps


def test_a_graph_pays_an_edge_per_stage_and_launches_one_per_operation() -> None:
    device = fitted(ideal(), launch__graph_edge_s=1e-6, launch__stream_s=3e-6)
    node = node_of(device)
    plan = plan_for(node, Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256))
    operations = sum(len(stage.operations) for stage in plan.stages)
    resident, graph, stream = (simulate(executed(plan, execution), node) for execution in Execution)
    assert graph.attribution_ps["launch"] == len(plan.stages) * US
    assert stream.attribution_ps["launch"] == operations * 3 * US
    assert resident.attribution_ps["launch"] == 0


@pytest.mark.parametrize(("hidden", "pays"), [(2048, True), (1024, False)])
def test_graphs_of_narrow_residuals_hand_no_state_over(hidden: int, pays: bool) -> None:
    node = load_node("1xh200")
    base = load_model("llama-3.2-1b")
    spec = replace(base, layers=1, windows=base.windows[:1], hidden=hidden)
    plan = default_plan(spec, node, context=64, max_context=128, execution=Execution.GRAPH)
    kernel = replace(node.device.kernel, border_s=number(0))
    free = replace(node, device=replace(node.device, kernel=kernel))
    charged, without = simulate(plan, node).step_s, simulate(plan, free).step_s
    assert (charged > without) == pays


def test_a_restart_is_counted_from_the_border_to_the_first_data() -> None:
    """restart_s contains the latency, so only the rest is added to it."""
    device = fitted(ideal(per_die=1, stream=1e9), memory__latency_s=3e-7, launch__restart_s=5e-7)
    plan = stream_probe(
        Options(blocks=1, slot_bytes=1024, execution=Execution.GRAPH),
        limits_of(device),
        rows=8,
        cols=64,
    )
    assert simulate(plan, node_of(device)).step_ps == pytest.approx(500_000 + 1024 * 1000, abs=10)


def test_a_library_collective_waits_for_all_gpus_and_costs_its_time() -> None:
    node = node_of(ideal(), 2)
    options = Options(
        gpus=2,
        blocks=4,
        slot_bytes=512,
        tile_rows=2,
        max_context=256,
        collective=CollectiveKind.LIBRARY,
        execution=Execution.GRAPH,
    )
    plan = plan_for(node, options)
    calls = sum(stage.kind.value == "collective" for stage in plan.stages)
    assert simulate(plan, node).attribution_ps["collective"] == pytest.approx(
        calls * 4 * US, abs=2000
    )


def executed(plan: Plan, execution: Execution) -> Plan:
    return replace(plan, options=replace(plan.options, execution=execution))


def test_blocks_of_one_core_take_turns() -> None:
    device = replace(
        fitted(ideal(per_die=1), kernel__bf16_bytes_per_s=1e9), sharing=Sharing(number(1e-6))
    )
    plans = [
        stream_probe(Options(blocks=n, slot_bytes=1024), limits_of(device), rows=16, cols=64)
        for n in (1, 2)
    ]
    alone, shared = (simulate(plan, node_of(device), steps=1).step_ps for plan in plans)
    assert shared == pytest.approx(alone + US, abs=5000)


def test_emulated_gpus_share_one_memory() -> None:
    device = replace(ideal(per_die=2), sharing=Sharing(number(0)))
    node = node_of(device, 2, topology="memory")
    plan = plan_for(
        node,
        Options(
            gpus=2,
            blocks=2,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
        ),
    )
    result = simulate(plan, node)
    assert result.stream_bytes_per_s == device.memory.stream_bytes_per_s.value
    assert result.floor_s == plan.bytes_per_step() / result.stream_bytes_per_s


def test_a_plan_for_other_hardware_is_refused() -> None:
    node = node_of(ideal(), 2)
    plan = plan_for(
        node,
        Options(
            gpus=2,
            blocks=4,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
        ),
    )
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


def test_lanes_of_one_gpu_are_staggered() -> None:
    """Those of the last group end so much later, where nothing is shared."""
    lanes, device = replace(tiny(4, Lanes(8, 2), heads=8, kv_heads=8), ffn=64), ideal(per_die=8)
    times = []
    for stagger in (0, 7000):
        plan = plan_of(lanes, limits=limits_of(device), blocks=8, lane_stagger_ns=stagger)
        machine = Machine(plan, node_of(device), steps=1, keep_all=False)
        machine.run()
        times.append(max(block.ended[0] for block in machine.blocks))
    assert times[1] - times[0] == pytest.approx(21e6, rel=0.01)
