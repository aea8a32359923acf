"""What must hold for every machine and every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.sim.machines import (
    FAST,
    LANES,
    MODEL,
    devices,
    ideal,
    limits_of,
    node_of,
    nodes,
    number,
    plan_for,
    plans,
    usual,
    warped,
)
from tests.sim.test_executors import variations
from twin.calibrate.node import calibrated_node
from twin.hardware.override import apply_fit, numbers, with_number, with_numbers
from twin.hardware.schema import limits
from twin.hardware.types import Device, Node
from twin.models.load import load_model
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Options, Placement
from twin.plan.types import Parts, Plan
from twin.schedule.options import plan_for as default_plan
from twin.schedule.plans import build
from twin.schedule.probe import stream_probe
from twin.sim.machine import Machine
from twin.sim.run import simulate


@st.composite
def cases(draw: st.DrawFn, **kinds: object) -> tuple[Node, Plan]:
    node = draw(nodes(**kinds))  # type: ignore[arg-type]
    return node, draw(plans(node))


@drawn(32)
@given(cases(caches=True), st.integers(1, 3))
def test_every_byte_of_the_plan_is_delivered_once(case: tuple[Node, Plan], steps: int) -> None:
    node, plan = case
    result = simulate(plan, node, steps=steps)
    assert result.consumed_bytes == plan.bytes_per_step() * steps
    assert result.delivered_bytes == result.consumed_bytes + result.in_ring_bytes


@drawn(32)
@given(cases())
def test_nothing_starts_before_its_inputs(case: tuple[Node, Plan]) -> None:
    """A stage's own work is done at the earliest when its last input was published, plus that
    work.
    """
    node, plan = case
    machine = Machine(plan, node, steps=2, keep_all=True)
    published: dict[tuple[int, int, int, int], int] = {}
    publish = machine.handoffs.publish

    def recording(place, step, stage, publication):  # type: ignore[no-untyped-def]
        published[place.rank, place.index, step, stage] = machine.handoffs.env.now
        return publish(place, step, stage, publication)

    machine.handoffs.publish = recording  # type: ignore[method-assign]
    machine.run()
    blocks = {(block.place.rank, block.place.index): block for block in machine.blocks}
    inputs = _inputs(plan)
    for (rank, index, step, stage), done in published.items():
        own = blocks[rank, index].program[stage]
        effort = own.fixed_ps + sum(own.slots) + sum(cost for _, cost in own.kv) + own.sample_ps
        for previous, parts, producer, at in inputs[index, stage]:
            if step < previous:
                continue
            for source in [rank] if parts is Parts.OWN else range(plan.ranks):
                if parts is not Parts.OTHERS or source != rank:
                    assert done - effort >= published[source, producer, step - previous, at]


def _inputs(plan: Plan) -> dict[tuple[int, int], list[tuple[int, Parts, int, int]]]:
    """What a block reads in a stage, worked out from the plan alone: how many steps earlier it was
    published, by which ranks, by which block of them and in which stage.
    """
    inputs: dict[tuple[int, int], list[tuple[int, Parts, int, int]]] = {}
    for stage in plan.stages:
        for block in range(plan.blocks):
            found = inputs[block, stage.index] = []
            for read in stage.reads:
                value = plan.values[read.value]
                parts = read.parts if value.pushed else Parts.OWN
                for producer, (lo, hi) in enumerate(value.owned):
                    if any(max(a, lo) < min(b, hi) for a, b in read.spans[block]):
                        found.append((int(read.previous_step), parts, producer, value.stage))
    return inputs


@drawn(32)
@given(cases(), st.integers(1, 3))
def test_never_faster_than_the_floor(case: tuple[Node, Plan], steps: int) -> None:
    """Exact from the start; a single step may be ahead by what the rings held when it began."""
    node, plan = case
    result = simulate(plan, node, steps=steps)
    for step, end in enumerate(result.step_ends_ps):
        assert end + 1 >= (step + 1) * result.floor_s * 1e12
    rings = plan.ranks * plan.blocks * plan.options.ring_slots * plan.options.slot_bytes
    # blocks of a stream probe drift
    if all(stage.kind.value != "stream" for stage in plan.stages):
        assert result.step_ps + 1 >= (result.floor_s - rings / result.stream_bytes_per_s) * 1e12


@drawn(32)
@given(st.data(), nodes(caches=True), st.sampled_from((1.0, 0.01, 1e-4)))
def test_never_faster_than_the_floor_whatever_caches_and_answers_do(
    data: st.DataObject, node: Node, slower: float
) -> None:
    """Blocks of warps whose answers come sooner or later, caches that keep all of a step or a
    share, memory that is slow compared with them.
    """
    node = data.draw(variations(node))
    plan = data.draw(plans(node))
    least, _ = limits("memory.stream_bytes_per_s")
    # variations have made some slow already
    rate = max(least, slower * node.device.memory.stream_bytes_per_s.value)
    node = with_number(node, "memory.stream", f"{rate} B/s")
    result = simulate(plan, node, steps=3)
    for step, end in enumerate(result.step_ends_ps):
        assert end + 1 >= (step + 1) * result.floor_s * 1e12


def test_a_floor_leaves_out_what_a_cache_serves() -> None:
    """Weights that the L2 holds after a step do not come from memory again: the floor was 1,000
    times the step.
    """
    device = apply_fit(
        usual(), {"l2.capacity_bytes": number(1e9), "memory.stream_bytes_per_s": number(1e7)}
    )
    plan = plan_for(
        node_of(device), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256)
    )
    result = simulate(plan, node_of(device))
    assert result.floor_s == plan.bytes_per_step() / device.l2.bytes_per_s.value
    assert result.floor_s <= result.step_s < 0.1 * plan.bytes_per_step() / result.stream_bytes_per_s
    cold = simulate(plan, node_of(device), steps=1)
    assert cold.floor_s == plan.bytes_per_step() / cold.stream_bytes_per_s <= cold.step_s


def test_no_answer_comes_before_the_memory_has_served_it() -> None:
    """An answer may be sooner than the mean one by up to the latency: by more, a step was shorter
    than its bytes take.
    """
    device = warped(jitter_s=5e-7)
    device = apply_fit(device, {"memory.stream_bytes_per_s": number(1e9)})
    device = apply_fit(device, {"structure.blocks_per_die": number(1)})
    plan = stream_probe(
        Options(blocks=1, slot_bytes=512, ring_slots=2, window_slots=2),
        limits_of(device),
        rows=8,
        cols=64,
    )
    result = simulate(plan, node_of(device), steps=3)
    for step, end in enumerate(result.step_ends_ps):
        assert end + 1 >= (step + 1) * result.floor_s * 1e12


@drawn(32)
@given(cases(caches=True))
def test_the_attribution_sums_to_the_step(case: tuple[Node, Plan]) -> None:
    node, plan = case
    result = simulate(plan, node)
    assert sum(result.attribution_ps.values()) == result.step_ps
    assert sum(stage.ps for stage in result.stages) == result.step_ps
    assert all(sum(stage.causes_ps.values()) == stage.ps for stage in result.stages)
    assert all(ps >= 0 for ps in result.attribution_ps.values())


@drawn(20)
@given(cases(caches=True))
def test_the_same_input_gives_the_same_bytes(case: tuple[Node, Plan]) -> None:
    node, plan = case
    first, second = (simulate(plan, node, trace=True, blocks=(0, 1)) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert first.trace is not None
    assert second.trace is not None
    assert first.trace.to_json() == second.trace.to_json()


@drawn(30)
@given(st.data(), nodes(sharing=False))
def test_resident_is_not_slower_than_a_graph_nor_a_graph_than_launches(
    data: st.DataObject, node: Node
) -> None:
    """On machines where a launch costs more than a hand-off. Sentinel: a counter or barrier may
    cost more than an edge.

    Hops do not grow here: behind a long queue of the stream a hand-off takes longer than the end of
    a kernel, which has drained it.
    """
    plan = data.draw(
        plans(
            node,
            handoff=HandOffKind.SENTINEL,
            collective=CollectiveKind.PUSH if node.gpus > 1 else CollectiveKind.NONE,
        )
    )
    handoff = replace(node.device.handoff, loaded_hop_s=None)
    node = replace(node, device=replace(node.device, handoff=handoff))
    edge = handoff.hop_s.value + handoff.cross_die_s.value + handoff.poll_s.value + 1e-7
    node = replace(
        node,
        device=apply_fit(
            node.device, {"launch.graph_edge_s": number(edge), "launch.stream_s": number(2 * edge)}
        ),
    )
    times = [
        simulate(
            replace(plan, options=replace(plan.options, execution=execution)), node, steps=3
        ).step_ps
        for execution in (Execution.RESIDENT, Execution.GRAPH, Execution.LAUNCHES)
    ]
    assert times == sorted(times)


@drawn(20)
@given(
    devices(), st.sampled_from(list(Placement)), st.sampled_from((0.0, 1e-6, 4e-6)), st.booleans()
)
def test_delay_is_never_slower(device, placement: Placement, hop_s: float, early: bool) -> None:  # type: ignore[no-untyped-def]
    """Within the anomaly below: the parts that came early are gathered at other times."""
    node = node_of(device, 4, hop_s=hop_s)
    options = Options(
        gpus=4,
        blocks=device.blocks,
        slot_bytes=512,
        tile_rows=2,
        collective=CollectiveKind.PUSH,
        max_context=256,
        placement=placement,
    )
    lanes = replace(LANES, early_exchange=early)
    delayed, blocking = (
        simulate(plan_for(node, replace(options, delay=delay), lanes=lanes), node)
        for delay in (1, 0)
    )
    assert delayed.step_ps <= blocking.step_ps * ANOMALY


ANOMALY = 1.03
SHARED_PIPES = ("memory.stream_bytes_per_s", "block.load_bytes_per_s", "l2.bytes_per_s")
BETTER = {  # path -> factor that improves it
    "handoff.hop_s": 0.5,
    "handoff.cross_die_s": 0.5,
    "handoff.atomic_s": 0.5,
    "handoff.poll_s": 0.5,
    "link.hop_s": 0.5,
    "link.peer_s": 0.5,
    "link.bytes_per_s": 2.0,
    "launch.graph_edge_s": 0.5,
    "launch.restart_s": 0.5,
    "memory.stream_bytes_per_s": 2.0,
    "memory.latency_s": 0.5,
    "kernel.bf16_bytes_per_s": 2.0,
    "block.load_bytes_per_s": 2.0,
    "kernel.element_s": 0.5,
    "kernel.stage_s": 0.5,
    "kernel.row_s": 0.5,
    "l2.bytes_per_s": 2.0,
    "fabric.die_port_bytes_per_s": 2.0,
}


@pytest.mark.few(6)
@pytest.mark.parametrize("path", BETTER)
@drawn(10)
@given(data=st.data())
def test_better_hardware_is_never_slower(path: str, data: st.DataObject) -> None:
    """Within 3 %: a prefetch that comes sooner may now stand in the queue before a cache read or a
    gather that somebody waits for (Graham's anomaly). A random search over 2,200 machines found 1.4
    % at most, in one of 200 cases.
    """
    before, after = _improved(data, path, contended=True)
    assert after <= before * ANOMALY


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "path",
    [
        path
        for path in BETTER
        if not path.startswith(("memory.stream", "block.load", "l2", "fabric"))
    ],
)
@drawn(10)
@given(data=st.data())
def test_without_shared_pipes_better_hardware_is_never_slower_at_all(
    path: str, data: st.DataObject
) -> None:
    """Waits and sums only: the latest of some times plus a cost, which cannot grow when a cost
    shrinks.
    """
    before, after = _improved(data, path, contended=False)
    assert after <= before


def _improved(data: st.DataObject, path: str, *, contended: bool) -> tuple[int, int]:
    """Time of two steps before and after the improvement."""
    node = data.draw(
        nodes(sharing=False, gpus=(2,) if path.startswith("link") else (1, 2), loads=(1.0,))
    )
    plan = data.draw(plans(node))
    if path.startswith("launch"):
        plan = replace(plan, options=replace(plan.options, execution=Execution.GRAPH))
    if not contended:
        node = replace(
            node,
            device=apply_fit(
                replace(node.device, fabric=None), {pipe: number(FAST) for pipe in SHARED_PIPES}
            ),
        )
    full = path if path.startswith("link") else f"device.{path}"
    known = numbers(node)
    if full not in known:
        return 0, 0
    better = apply_fit(node, {full: number(known[full].value * BETTER[path])})
    return simulate(plan, node).step_ends_ps[-1], simulate(plan, better).step_ends_ps[-1]


SLOW_STREAM = [("memory.stream", "x0.1")]


@pytest.mark.parametrize("factor", ["x0.5", "x0.1", "x0"])
@pytest.mark.parametrize(
    "path",
    [
        "handoff.hop",
        "l2.latency",
        "handoff.loaded_hop",
        "l2.loaded_latency",
        "link.hop",
        "link.loaded_hop",
    ],
)
def test_a_better_hop_or_latency_behind_a_long_queue_is_never_slower(
    path: str, factor: str
) -> None:
    """A queue of many QUEUE_S, where a lower idle hop once meant a longer wait: 12 % of the
    step.
    """
    node = with_numbers(calibrated_node("8xh200"), SLOW_STREAM)
    spec = replace(load_model("llama-3.2-1b"), layers=2, windows=(0, 0))
    plan = default_plan(spec, node)
    before, after = (
        simulate(plan, one).step_ends_ps[-1] for one in (node, with_number(node, path, factor))
    )
    assert after <= before * ANOMALY


@pytest.mark.parametrize("factor", ["x0.5", "x0.1"])
def test_a_better_memory_latency_does_not_slow_what_comes_from_a_cache(factor: str) -> None:
    """A block loads from a cache what it keeps in flight over the cache's latency; half of memory's
    latency once meant half of that.
    """
    node = with_number(calibrated_node("4xmi300x"), "l2.capacity", "x100")
    spec = replace(load_model("llama-3.2-1b"), layers=2, windows=(0, 0))
    plan = default_plan(spec, node, blocks=2)
    before, after = (
        simulate(plan, one).step_ends_ps[-1]
        for one in (node, with_number(node, "memory.latency", factor))
    )
    assert after <= before * ANOMALY


@drawn(30)
@given(
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((256, 512, 2048)),
    st.integers(1, 6),
    st.sampled_from(list(HandOffKind)),
    st.sampled_from(list(Placement)),
    st.booleans(),
)
def test_free_hand_offs_leave_the_closed_form(
    blocks: int,
    io_dies: int,
    slot: int,
    ring: int,
    handoff: HandOffKind,
    placement: Placement,
    model: bool,
) -> None:
    """Only the memory's rate is finite: a step takes bytes / rate, within one slot of each
    block.
    """
    io_dies = min(io_dies, blocks)
    device = ideal(dies=io_dies, per_die=blocks // io_dies, io_dies=io_dies, stream=1e10)
    options = Options(
        blocks=blocks,
        slot_bytes=slot,
        ring_slots=ring,
        window_slots=ring,
        tile_rows=2,
        handoff=handoff,
        placement=placement,
        max_context=256,
    )
    limits = limits_of(device)
    plan = (
        plan_for(node_of(device), options)
        if model
        else stream_probe(options, limits, rows=16 * blocks, cols=64, stages=2)
    )
    result = simulate(plan, node_of(device), steps=3)
    slack = blocks * slot / result.stream_bytes_per_s
    assert abs(result.step_s - result.floor_s) <= slack + 1e-12


@drawn(15)
@given(devices(), st.sampled_from((1, 2, 4)), st.sampled_from(list(Placement)), st.integers(1, 6))
def test_more_blocks_are_never_slower_where_rows_divide(
    device: Device, blocks: int, placement: Placement, ring: int
) -> None:
    """On one die, with sentinels and an L2 that does not bind: every further block gathers
    everything once more. Nor may streams delay hops, because more blocks stream longer at once.
    """
    single = {
        "handoff.loaded_hop_s": device.handoff.hop_s,
        "structure.dies": number(1),
        "structure.io_dies": number(1),
        "l2.bytes_per_s": number(FAST),
    }
    device = apply_fit(replace(device, fabric=None), single)
    times = []
    for count in (blocks, 2 * blocks):
        more = apply_fit(device, {"structure.blocks_per_die": number(count)})
        options = Options(
            blocks=count,
            slot_bytes=512,
            ring_slots=ring,
            window_slots=ring,
            tile_rows=2,
            placement=placement,
            max_context=256,
        )
        times.append(simulate(build(MODEL, options, limits_of(more)), node_of(more)).step_ps)
    assert times[1] <= times[0] * ANOMALY
