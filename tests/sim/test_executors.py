"""Compiled code and SimPy do the same, to the last picosecond and the last byte of the trace."""

from __future__ import annotations

import ctypes
import json
import marshal
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.sim.machines import (
    FREE,
    LANES,
    MODEL,
    WARP_TIMES,
    ideal,
    limits_of,
    node_of,
    nodes,
    number,
    numbers,
    plan_for,
    plans,
    usual,
    warp_kernel,
    where_exchanged,
)
from tests.sim.test_families import cases as families
from twin.cost import forms, lowering, wiring
from twin.cost.forms import Forms
from twin.cost.lowering import compile_plan
from twin.cost.routing import Routing
from twin.errors import HardwareError, PlanError, ToolchainError
from twin.hardware.kernel import WarpKernel
from twin.hardware.load import load_node
from twin.hardware.number import Number
from twin.hardware.override import apply_fit, with_number
from twin.hardware.override import numbers as numbers_of
from twin.hardware.types import Cache, Device, Link, Node, Sharing
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Options, Sampling
from twin.plan.types import Plan
from twin.schedule.options import plan_for as default_plan
from twin.schedule.plans import build
from twin.schedule.probe import stream_probe
from twin.sim import executor as executors
from twin.sim.batch import planned
from twin.sim.clock import SimulationError
from twin.sim.compiled import library, state
from twin.sim.compiled.lower import Unsupported
from twin.sim.compiled.state import RECORDS, State, header
from twin.sim.executor import Executor
from twin.sim.machine import Machine
from twin.sim.prepare import TIMED_BY_THE_MACHINE, prepare
from twin.sim.run import Result, simulate
from twin.sim.speculation import Speculation
from twin.sim.trace import Event
from twin.units import unit_of

PLAIN = 2  # marshal's version without references, which tell equal objects from the same one


def outcome(
    plan: Plan, node: Node, executor: Executor, **options: Any
) -> tuple[dict[str, Any], tuple[Event, ...]]:
    """Everything that leaves a simulation, but for the name of its executor."""
    result = simulate(plan, node, executor=executor, trace=True, **options)
    assert result.executor == executor.value
    assert result.trace is not None
    return json.loads(result.to_json()) | {"executor": ""}, result.trace.events


def assert_equal(plan: Plan, node: Node, **options: Any) -> None:
    """Of traces their events and the types of these: written as JSON, which takes as long as both
    simulations, they have the same bytes then.
    """
    (result, trace), (other, events) = (
        outcome(plan, node, executor, **options) for executor in Executor
    )
    assert result == other
    assert trace == events
    assert marshal.dumps(trace, PLAIN) == marshal.dumps(events, PLAIN)


@st.composite
def machines(draw: st.DrawFn) -> Node:
    """As in machines.py, and besides machines of round numbers, where much happens at the same
    picosecond.
    """
    node = draw(nodes(caches=True))
    if draw(st.integers(0, 3)) == 0:
        rates = dict.fromkeys(
            ("memory.stream_bytes_per_s", "l2.bytes_per_s", "block.load_bytes_per_s"), number(1e12)
        )
        round_numbers = apply_fit(ideal(dies=2, per_die=draw(st.integers(1, 2))), rates)
        node = replace(node, device=replace(round_numbers, sharing=node.device.sharing))
    return draw(variations(node))


WARP_RATES = {
    "gather_bytes_per_s": 5e10,
    "int8_bytes_per_s": 1e11,
    "fp8_bytes_per_s": 7e10,
    "int4_bytes_per_s": 9e10,
    "fp4_bytes_per_s": 3e10,
}


def of_warps(device: Device, costs: dict[str, float]) -> Device:
    """The device with blocks of warps, what both kinds pay alike as it was."""
    jitter = number(costs.get("jitter_s", 2e-9))
    kernel = warp_kernel(**WARP_RATES, **{n: s for n, s in costs.items() if n != "jitter_s"})
    alike = {name: getattr(device.kernel, name) for name in FREE}
    return replace(
        device,
        kernel=replace(kernel, **alike),
        block=replace(device.block, pair_bytes_per_s=number(3e11)),
        memory=replace(device.memory, jitter_s=jitter),
    )


@st.composite
def variations(draw: st.DrawFn, node: Node) -> Node:
    """Blocks of warps, loading on demand, fences, caches that keep a share or all, far memory, slow
    links or quick ones.
    """
    device = node.device
    if draw(st.booleans()):
        costs = dict.fromkeys(WARP_TIMES, 2e-9) | {
            "copy_s": draw(st.sampled_from((0.0, 5e-9))),
            "heads_s": 7e-8,
            "reduction_s": 2e-8,
            "item_s": 3e-7,
            "round_s": 1e-7,
            "unit_s": 2e-7,
            "vector_s": 4e-8,
            "prefetch_s": 3e-8,
            "group_s": 2e-8,
            "tile_s": 3e-8,
        }
        device = of_warps(device, costs)
    if draw(st.booleans()):
        device = replace(device, block=replace(device.block, loading="on-demand"))
    if draw(st.booleans()):
        device = replace(device, handoff=replace(device.handoff, fence_s=number(2e-7)))
    if draw(st.integers(0, 3)) == 0:
        llc = Cache(
            **numbers(
                capacity_bytes=draw(st.sampled_from((3e4, 1e5, 1e7))),
                bytes_per_s=2e12,
                latency_s=1e-7,
            ),
            retention="random",
        )
        device = replace(device, llc=llc)
    if draw(st.booleans()):
        slower = number(device.l2.latency_s.value + draw(st.sampled_from((1e-8, 3e-7))))
        device = replace(device, l2=replace(device.l2, loaded_latency_s=slower))
    if draw(st.integers(0, 3)) == 0:
        device = replace(device, memory=replace(device.memory, latency_s=number(5e-6)))
    return replace(node, device=device, link=node.link and draw(links(device, node.link)))


@st.composite
def links(draw: st.DrawFn, device: Device, link: Link) -> Link:
    loaded = device.handoff.loaded_hop_s
    if loaded and draw(st.integers(0, 2)) == 0:
        link = replace(link, hop_s=device.handoff.hop_s, loaded_hop_s=loaded)
    return replace(link, bytes_per_s=number(draw(st.sampled_from((5e10, 5e10, 1e8)))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Node, Plan]:
    """Every execution, protocol and collective; lanes, also several on a GPU."""
    node = draw(machines())
    crowd = (
        {"blocks": 4 * node.device.blocks} if node.device.sharing and draw(st.booleans()) else {}
    )
    plan = draw(plans(node, **crowd))
    possible = [
        count
        for count in (2, 4)
        if count % node.gpus == 0 and plan.options.blocks * node.gpus >= count
    ]
    if plan.spec is not None and possible and draw(st.integers(0, 2)) == 0:
        ranks = draw(st.sampled_from(possible))
        lanes = replace(LANES, count=ranks, early_exchange=draw(st.booleans()))
        delay = draw(st.integers(0, 1))
        late = LateParts.REDUCED if delay and draw(st.booleans()) else None
        options = replace(
            plan.options, delay=delay, collective=CollectiveKind.PUSH, late_parts=late
        )
        per_gpu = ranks // node.gpus
        if options.blocks % per_gpu == 0:
            plan = plan_for(node, options, lanes=lanes)
    execution = draw(
        st.sampled_from(
            (Execution.RESIDENT, Execution.RESIDENT, Execution.GRAPH, Execution.LAUNCHES)
        )
    )
    if (
        execution is not Execution.RESIDENT
        and plan.spec is not None
        and not plan.spec.lanes
        and node.gpus > 1
        and draw(st.booleans())
    ):
        return node, plan_for(
            node, replace(plan.options, execution=execution, collective=CollectiveKind.LIBRARY)
        )
    # not by `build`, which has it for NVIDIA alone
    head = draw(st.sampled_from((None, 1, 6)))
    options = where_exchanged(draw, node.device, plan.options)
    return node, replace(
        plan, options=replace(options, execution=execution, head_window_slots=head)
    )


@drawn(20)
@given(cases(), st.integers(1, 3))
def test_both_executors_give_the_same_trace(case: tuple[Node, Plan], steps: int) -> None:
    node, plan = case
    assert_equal(plan, node, steps=steps)


@drawn(12)
@given(
    st.data(), st.integers(1, 3), st.booleans(), st.sampled_from(list(Sampling)), st.integers(1, 3)
)
def test_both_executors_give_the_same_trace_of_sums_made_by_scheduler_warps(
    data: st.DataObject, delay: int, early: bool, sampling: Sampling, steps: int
) -> None:
    """Scheduler warps that are quicker than their blocks, and some that these wait for."""
    node = node_of(usual(per_die=8), data.draw(st.sampled_from((1, 2))))
    node = data.draw(variations(node))
    device = node.device
    if not isinstance(device.kernel, WarpKernel):
        device = of_warps(device, dict.fromkeys(WARP_TIMES, 2e-8))
    stage_s = number(data.draw(st.sampled_from((0.0, 1e-7, 4e-6))))
    node = replace(node, device=apply_fit(device, {"kernel.stage_s": stage_s}))
    spec = replace(
        MODEL,
        layers=2 * delay + 1,
        windows=(0,) * (2 * delay + 1),
        lanes=replace(LANES, delay=delay, early_exchange=early),
    )
    options = Options(
        gpus=node.gpus,
        blocks=8,
        slot_bytes=512,
        sampling=sampling,
        collective=CollectiveKind.PUSH,
        late_parts=LateParts.REDUCED,
    )
    plan = build(spec, options, limits_of(node.device))
    assert Machine(plan, node, steps=1, keep_all=False).has_schedulers
    assert_equal(plan, node, steps=steps)


@drawn(20)
@given(
    st.data(),
    families(),
    st.sampled_from((Execution.RESIDENT, Execution.RESIDENT, Execution.GRAPH)),
    st.integers(1, 3),
)
def test_both_executors_give_the_same_trace_of_experts_and_states(
    data: st.DataObject, case: tuple[Node, Plan, Routing], execution: Execution, steps: int
) -> None:
    """Draws by step and rank, gates, slots requested beyond a gate, caches written."""
    node, plan, routing = case
    node = data.draw(variations(node))
    plan = replace(plan, options=replace(plan.options, execution=execution))
    drafts = Speculation(acceptance=0.5, draft_step_s=0.0) if plan.options.draft else None
    assert_equal(plan, node, steps=steps, routing=routing, speculation=drafts)


@drawn(15)
@given(cases())
def test_both_executors_leave_the_machine_in_the_same_state(case: tuple[Node, Plan]) -> None:
    """Also what no result shows: each pipe's bytes, how far each loader got."""
    node, plan = case
    prepared = prepare(plan, node.device)
    states = []
    for executor in Executor:
        machine = Machine(plan, node, steps=2, keep_all=False)
        executors.run(machine, prepared, executor)
        blocks = [
            (
                b.ended,
                b.ring.issued,
                b.ring.freed,
                b.consumed,
                [[list(s) for s in step] for step in _logs(b.log)],
            )
            for b in machine.blocks
        ]
        states.append(([(pipe.name, pipe.bytes) for pipe in machine.pipes()], blocks))
    assert states[0] == states[1]


def _logs(log: Any) -> list[Any]:
    return [[list(segments) for segments in stages] for stages in log]


WORDS = 8192


def shallow(model: str, layers: int = 2) -> ModelSpec:
    """A shipped model with its first layer and its last ones only, and few words: the head would
    be most of what a step loads.
    """
    spec = load_model(model)
    kept = [0, *range(spec.layers - layers + 1, spec.layers)]
    layout = tuple(spec.layout[layer] for layer in kept) if spec.layout else ()
    lanes = replace(spec.lanes, delay=min(spec.lanes.delay, layers - 1)) if spec.lanes else None
    return replace(
        spec,
        layers=layers,
        vocab=WORDS,
        windows=tuple(spec.windows[layer] for layer in kept),
        layout=layout,
        lanes=lanes,
    )


SHIPPED = {
    "lanes on one GPU": ("laneformer-2b", "1xmi300x", {"blocks": 16, "context": 300}),
    "lanes over eight GPUs": ("laneformer-2b", "8xh200", {"blocks": 16}),
    "counters": (
        "qwen2.5-coder-1.5b",
        "2xh200",
        {"blocks": 12, "handoff": HandOffKind.COUNTER, "context": 2000},
    ),
    "a graph with a library": (
        "llama-3.2-1b",
        "2xmi300x",
        {"blocks": 16, "execution": Execution.GRAPH},
    ),
    "experts": (
        "gpt-oss-20b",
        "2xmi300x",
        {"blocks": 16, "ring_slots": 5, "window_slots": 2, "ahead_slots": 2, "expert_ranks": 2},
    ),
    "low-bit experts": ("qwen3-30b-a3b@int4-g128", "1xh200", {"blocks": 16}),
    "experts too wide for registers": ("mixtral-8x7b@fp8-128x128", "1xh200", {"blocks": 16}),
    "sixteen heads on tensor cores": ("internlm3-8b", "1xh200", {"blocks": 16, "context": 300}),
    "recurrent states": ("qwen3-coder-next", "2xh200", {"blocks": 16, "batch": 2}),
    "barriers": ("llama-3.2-1b", "2xb200", {"blocks": 16, "handoff": HandOffKind.GRID}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHIPPED)
def test_both_executors_agree_on_shipped_models(name: str) -> None:
    """Two layers on few blocks, because SimPy has to do it too; all of them at full size are in
    studies/fast-simulator.
    """
    model, on, chosen = SHIPPED[name]
    node = load_node(on)
    plan = default_plan(shallow(model), node, **chosen)
    results = [
        simulate(plan, node, executor=executor, trace=True, blocks=(0, 7)) for executor in Executor
    ]
    assert results[0] == results[1]
    assert results[0].trace == results[1].trace
    assert [result.executor for result in results] == ["compiled", "simpy"]


# ---- which one runs ------------------------------------------------------------------------------


def small() -> tuple[Plan, Node]:
    node = node_of(usual())
    return plan_for(node, Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256)), node


def test_compiled_code_is_taken_unless_simpy_is_requested() -> None:
    plan, node = small()
    assert simulate(plan, node).executor == "compiled"
    assert simulate(plan, node, executor=Executor.SIMPY).executor == "simpy"
    assert json.loads(simulate(plan, node).to_json())["executor"] == "compiled"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(executors, "_missing", [])
    monkeypatch.setenv("CXX", "/nowhere/c++")
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_simpy_does_it_and_the_result_says_why() -> None:
    plan, node = small()
    result = simulate(plan, node)
    assert result.executor == "simpy"
    assert "CXX=/nowhere/c++" in result.why_simpy
    with pytest.raises(ToolchainError, match="install one"):
        simulate(plan, node, executor=Executor.COMPILED)


def test_more_waits_than_an_event_can_name_are_left_to_simpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, node = small()
    monkeypatch.setattr(state, "TARGET_BITS", 3)
    assert simulate(plan, node).executor == "simpy"
    assert "use the SimPy executor" in simulate(plan, node).why_simpy
    with pytest.raises(Unsupported, match="more than compiled code can number"):
        simulate(plan, node, executor=Executor.COMPILED)


def _with(node: Node, **values: float) -> Node:
    """Numbers put in place past every check of their ranges: `memory__latency_s` is
    memory.latency_s.
    """
    device = node.device
    for path, value in values.items():
        part, leaf = path.split("__")
        device = replace(device, **{part: replace(getattr(device, part), **{leaf: number(value)})})
    return replace(node, device=device)


BEYOND = {  # (numbers, what the refusal says)
    "a rate of which a step takes years": (
        {"memory__stream_bytes_per_s": 1e-6},
        "Memory.*a transfer of .* takes .* more than 4503.6 s",
    ),
    "a slow port": (
        {"block__load_bytes_per_s": 2.0},
        "load: a transfer of .* takes .* more than 4503.6 s",
    ),
    "a stage of days": ({"kernel__stage_s": 1e6}, r"kernel.stage_s takes 1e\+06 s, more than"),
    "a stage of an age": ({"kernel__stage_s": 1e280}, r"kernel.stage_s takes 1e\+280 s"),
    "a hop of days": ({"handoff__hop_s": 1e6}, r"handoff.hop_s takes 1e\+06 s"),
    "an element of minutes": (
        {"kernel__element_s": 1e3},
        "stage .*: a piece of a block's work takes",
    ),
    "an hour in many stages": (
        {"kernel__stage_s": 4e3},
        "simulated time would be needed, and the clock ends at 36028.8 s",
    ),
    "an hour in many hops": ({"handoff__hop_s": 4e3}, "simulated time would be needed"),
    "a wait behind a long queue": (
        {"handoff__loaded_hop_s": 1e3, "memory__stream_bytes_per_s": 1e4},
        "simulated time would be needed",
    ),
    "a load behind a long queue": (
        {"l2__loaded_latency_s": 4e3, "memory__stream_bytes_per_s": 1e3},
        "simulated time would be needed",
    ),
    "a far memory": (
        {"memory__latency_s": 4e3, "memory__stream_bytes_per_s": 1e3},
        "simulated time would be needed",
    ),
    "a pipe that is too fast": (
        {"memory__stream_bytes_per_s": 1e19},
        r"Memory.*: 1e\+19 bytes/s are more than 4.61169e\+18",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_time_that_cannot_be_counted_is_refused_alike(name: str) -> None:
    """By both executors in the same words: the one wrapped round, the other said 1e19 ps or ended
    in an error of Python's.
    """
    _, node = small()
    options = Options(
        blocks=4, slot_bytes=512, tile_rows=2, max_context=256, handoff=HandOffKind.COUNTER
    )
    plan = plan_for(node, options)
    if "transfer" in BEYOND[name][1]:
        plan = stream_probe(
            replace(options, slot_bytes=16384), limits_of(node.device), rows=64, cols=2048
        )
    values, message = BEYOND[name]
    said = []
    for executor in Executor:
        with pytest.raises(HardwareError, match=message) as error:
            simulate(plan, _with(node, **values), executor=executor)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]


SIMULATED_SECONDS = re.compile(r"^[\d.e+]+ s(?= of simulated time)")


@drawn(24)
@given(st.data(), cases())
def test_both_executors_refuse_the_same(data: st.DataObject, case: tuple[Node, Plan]) -> None:
    """Numbers of any size, so that some sum or product leaves the clock here or there, or none
    does.
    """
    node, plan = case
    for path, value in numbers_of(node).items():
        unit = unit_of(path.rsplit(".", 1)[-1])
        if unit in ("s", "B/s") and data.draw(st.integers(0, 5)) == 0:
            factor = 10.0 ** data.draw(st.integers(3, 12))
            node = _put(
                node,
                path.split("."),
                number((value.value or 1e-9) * factor if unit == "s" else value.value / factor),
            )
    said: list[Any] = []
    for executor in Executor:
        try:
            said.append(outcome(plan, node, executor))
        except HardwareError as error:
            # Of several times beyond the clock's end at one instant either may be looked at first:
            # where loads of 256,000 s stand in a queue, the compiled executor sees one, SimPy two.
            said.append(SIMULATED_SECONDS.sub("", str(error)))
    assert said[0] == said[1]


def _put(item: Any, keys: list[str], value: Number) -> Any:
    key, *rest = keys
    return replace(item, **{key: _put(getattr(item, key), rest, value) if rest else value})


@pytest.mark.parametrize("executor", list(Executor))
def test_a_deadlock_is_reported_alike(executor: Executor) -> None:
    """A plan that waits for a value which is published only later; the proof would refuse it."""
    plan, node = small()
    first = next(stage for stage in plan.stages if stage.reads)
    later = plan.values[plan.stages[first.index + 1].publishes or 0]
    spans = tuple(((0, later.elements),) for _ in range(plan.blocks))
    reads = (replace(first.reads[0], value=later.id, spans=spans),)
    broken = replace(
        plan, stages=tuple(replace(s, reads=reads) if s is first else s for s in plan.stages)
    )
    with pytest.raises(SimulationError, match=r"deadlock: Gpu\[0\].Die\[0\].Block\[0\] waits"):
        simulate(broken, node, executor=executor)


# ---- its library ---------------------------------------------------------------------------------


def test_the_header_describes_the_arrays() -> None:
    """One pointer an array, one word a field; a record in a record takes its own words."""
    text = header()
    for field in State._fields:
        assert f" {field};" in text.split("struct State")[1]
    for name, dtype in RECORDS.items():
        if dtype.fields:
            assert dtype.itemsize % ctypes.sizeof(ctypes.c_int64) == 0, name


def test_the_library_is_built_once_and_a_changed_source_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))  # it is not run
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = library.build(tmp_path / "unused")
    stamp = built.stat().st_mtime_ns
    assert library.build(tmp_path / "unused") == built
    assert built.stat().st_mtime_ns == stamp
    monkeypatch.setattr(library, "header", lambda: header() + "// changed\n")
    assert library.target() != built


def test_a_home_that_cannot_be_written_is_no_reason_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O0"))
    library.load.cache_clear()
    plan, node = small()
    assert simulate(plan, node, executor=Executor.COMPILED).executor == "compiled"
    library.load.cache_clear()


# ---- what is kept between simulations ------------------------------------------------------------


def test_equal_points_share_a_plan_and_its_program() -> None:
    node = load_node("1xh200")
    spec = shallow("llama-3.2-1b", layers=1)
    first = planned(spec, node, blocks=8)
    faster = with_number(node, "memory.stream_bytes_per_s", "+10%")
    assert planned(spec, faster, blocks=8) is first
    assert planned(spec, node, blocks=16) is not first
    assert prepare(first, faster.device) is prepare(first, node.device)
    assert prepare(first, with_number(node, "kernel.stage_s", "+10%").device) is not prepare(
        first, node.device
    )


def test_refusals_are_not_remembered() -> None:
    spec = load_model("llama-3.2-1b")
    for _ in range(2):
        with pytest.raises(PlanError, match="context"):
            planned(spec, load_node("1xh200"), context=10**9)


@pytest.mark.parametrize("name", ["1xh200", "2xmi300x"])
def test_no_program_depends_on_what_the_machine_times(name: str) -> None:
    """Else two machines would share a program that suits only one of them."""
    node = load_node(name)
    device = replace(node.device, sharing=Sharing(**numbers(switch_s=1e-6)))
    spec = shallow("llama-3.2-1b", layers=1)
    for options in ({"handoff": HandOffKind.COUNTER}, {"execution": Execution.LAUNCHES}):
        plan = default_plan(spec, node, blocks=8, **options)
        before = compile_plan(plan, device)
        paths = [path for path in numbers_of(device) if path.startswith(TIMED_BY_THE_MACHINE)]
        changed = apply_fit(
            device, {path: number(3 * numbers_of(device)[path].value) for path in paths}
        )
        assert len(paths) > 12
        assert compile_plan(plan, changed) == before


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SHIPPED)
def test_blocks_and_layers_share_work_only_where_each_would_do_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a program in which the work of every block in every stage is found for
    itself.
    """
    model, on, chosen = SHIPPED[name]
    node = load_node(on)
    plan = default_plan(shallow(model), node, **chosen)
    shared = compile_plan(plan, node.device)
    monkeypatch.setattr(Forms, "_form", lambda _, stage: stage.index)
    for module in (forms, lowering):
        monkeypatch.setattr(module, "first_alike", lambda traits: list(range(len(traits))))
    monkeypatch.setattr(lowering, "wire", wiring.wire.__wrapped__)
    alone = compile_plan(plan, node.device)
    assert len({id(work) for stages in shared.stages for work in stages}) < len(
        {id(work) for stages in alone.stages for work in stages}
    )
    assert shared == alone


def test_a_batch_gives_what_single_simulations_give() -> None:
    plan, node = small()
    points = [
        (plan, with_number(node, "handoff.hop_s", f"x{factor}")) for factor in (1.0, 2.0, 3.0)
    ]
    alone = [simulate(p, n, executor=Executor.SIMPY) for p, n in points]
    together: list[Result] = [simulate(plan, node) for plan, node in points]
    assert together == alone
    assert len({result.step_ps for result in together}) == 3


def test_a_probe_runs_in_compiled_code_too() -> None:
    device: Device = ideal()
    plan = stream_probe(
        Options(blocks=4, slot_bytes=512, tile_rows=2),
        limits_of(device),
        rows=64,
        cols=64,
        stages=2,
    )
    assert_equal(plan, node_of(device))
