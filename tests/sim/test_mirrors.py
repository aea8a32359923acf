"""Where one GPU stands for all, simulating all of them gives the same, to the last picosecond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.sim.machines import LANES, node_of, nodes, number, plan_for, usual, where_exchanged
from tests.sim.test_executors import machines, shallow, variations
from twin.hardware.load import load_node
from twin.hardware.override import with_number
from twin.hardware.types import Node
from twin.models.spec import Lanes
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Options
from twin.plan.types import Plan
from twin.schedule.options import plan_for as default_plan
from twin.sim.compiled.room import Room
from twin.sim.executor import Executor, run_first_gpu
from twin.sim.executor import run as run_machine
from twin.sim.machine import Machine
from twin.sim.prepare import prepare
from twin.sim.run import simulate


def first_gpu(plan: Plan, node: Node, steps: int) -> Machine | None:
    return run_first_gpu(plan, node, steps, prepare(plan, node.device), Executor.COMPILED, Room())


def assert_every_gpu_does_the_same(plan: Plan, node: Node, *, steps: int = 2) -> bool:
    """Was the first GPU enough? Then each block of the whole machine ends, loads and waits as its
    like on the first GPU, and the results are equal; if it was not, they are equal because the
    whole machine was simulated.
    """
    first = first_gpu(plan, node, steps)
    assert simulate(plan, node, steps=steps) == simulate(plan, node, steps=steps, whole=True)
    if first is None:
        return False
    whole = Machine(plan, node, steps=steps, keep_all=False)
    run_machine(whole, prepare(plan, node.device), Executor.COMPILED)
    for block in whole.blocks:
        like = first.blocks[block.place.index]
        assert block.ended == like.ended
        assert (block.ring.issued, block.ring.freed, block.consumed) == (
            like.ring.issued,
            like.ring.freed,
            like.consumed,
        )
        assert _times(block.log) == _times(like.log)
    return True


def _times(log: Any) -> list[Any]:
    """Without who was waited for."""
    return [[[(end, cause) for end, cause, _ in segments] for segments in stages] for stages in log]


@st.composite
def alike(draw: st.DrawFn) -> tuple[Node, Plan]:
    """Machines of several GPUs, with lanes and without, links quick and slow; also of round
    numbers, where much happens at once.
    """
    node = (
        draw(machines())
        if draw(st.integers(0, 3)) == 0
        else draw(variations(draw(nodes(caches=True, sharing=False))))
    )
    gpus = draw(st.sampled_from((2, 4)))
    topology = draw(st.sampled_from(("mesh", "switch")))
    hop = draw(st.sampled_from((0.0, 5e-7, 2e-6)))
    linked = node_of(
        node.device,
        gpus,
        topology=topology,
        hop_s=hop,
        loaded_hop_s=hop * draw(st.sampled_from((1.0, 3.0))),
    )
    node = replace(linked, device=replace(node.device, sharing=None))
    delay = draw(st.integers(0, 1))
    slots = draw(st.integers(1, 6))
    options = Options(
        gpus=gpus,
        blocks=node.device.blocks,
        slot_bytes=draw(st.sampled_from((256, 512))),
        ring_slots=slots,
        window_slots=draw(st.integers(1, slots)),
        tile_rows=2,
        collective=CollectiveKind.PUSH,
        context=draw(st.sampled_from((1, 40, 128))),
        max_context=256,
        delay=delay,
        late_parts=LateParts.REDUCED if delay and draw(st.booleans()) else None,
    )
    lanes = (
        replace(LANES, count=gpus, delay=1, early_exchange=draw(st.booleans()))
        if delay or draw(st.booleans())
        else None
    )
    return node, plan_for(node, where_exchanged(draw, node.device, options), lanes=lanes)


@drawn(30)
@given(alike(), st.integers(1, 3))
def test_one_gpu_stands_for_all_or_all_are_simulated(case: tuple[Node, Plan], steps: int) -> None:
    node, plan = case
    assert_every_gpu_does_the_same(plan, node, steps=steps)


SHIPPED = {  # (model, node, options); of two layers on few blocks
    "lanes": ("laneformer-2b", "8xh200", {"blocks": 16}),
    "lanes without a delay": ("laneformer-2b", "8xh200", {"blocks": 16, "delay": 0}),
    "lanes over a mesh": ("laneformer-2b", "8xmi300x", {"blocks": 16}),
    "two GPUs": ("qwen2.5-coder-1.5b", "2xh200", {"blocks": 12, "context": 2000}),
    "a long context": (
        "llama-3.1-8b",
        "8xh200",
        {"blocks": 24, "context": 4096, "max_context": 8192},
    ),
    "two dies": ("llama-3.2-1b", "4xb200", {"blocks": 16}),
    "a mesh of two": ("llama-3.2-1b", "2xmi300x", {"blocks": 16}),
    "experts that all ranks slice": ("gpt-oss-20b", "8xh200", {"blocks": 16}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_give_the_same_with_one_gpu_as_with_all(name: str) -> None:
    model, on, chosen = SHIPPED[name]
    node = load_node(on)
    plan = default_plan(shallow(model), node, **chosen)
    assert_every_gpu_does_the_same(plan, node)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "on"),
    [("qwen2.5-coder-1.5b", "2xh200"), ("laneformer-2b", "8xh200"), ("llama-3.2-1b", "8xh200")],
)
def test_one_gpu_is_enough_for_whole_models_and_most_what_ifs(model: str, on: str) -> None:
    """Else the twin would be slow and nobody would know why."""
    node = load_node(on)
    plan = default_plan(shallow(model, layers=4), node)
    factors = (1.0, 0.93, 1.13)
    changed = [with_number(node, "memory.stream_bytes_per_s", f"x{factor}") for factor in factors]
    enough = [assert_every_gpu_does_the_same(plan, other) for other in changed]
    assert sum(enough) >= 2


def small(**chosen: Any) -> tuple[Plan, Node]:
    node = node_of(usual(), 2)
    options = Options(
        gpus=2,
        blocks=4,
        slot_bytes=512,
        tile_rows=2,
        max_context=256,
        collective=CollectiveKind.PUSH,
    )
    return plan_for(node, replace(options, **chosen)), node


def test_a_trace_and_simpy_have_all_gpus() -> None:
    plan, node = small()
    traced = simulate(plan, node, trace=True)
    assert traced.trace is not None
    assert {event["pid"] for event in traced.trace.events} >= {0, 1}
    assert run_first_gpu(plan, node, 2, prepare(plan, node.device), Executor.SIMPY, Room()) is None


@pytest.mark.parametrize(
    "chosen",
    [
        {"handoff": HandOffKind.COUNTER},
        {"handoff": HandOffKind.GRID},
        {"execution": Execution.GRAPH},
    ],
    ids=str,
)
def test_counters_barriers_and_kernels_have_all_gpus(chosen: dict[str, Any]) -> None:
    """Their arrivals queue by GPU, or all GPUs meet."""
    plan, node = small(**chosen)
    assert first_gpu(plan, node, 2) is None


def test_lanes_of_one_gpu_and_emulated_gpus_have_all_their_blocks() -> None:
    """They share a memory."""
    node = node_of(usual(), 2)
    options = Options(
        gpus=2,
        blocks=4,
        slot_bytes=512,
        tile_rows=2,
        max_context=256,
        collective=CollectiveKind.PUSH,
    )
    plan = plan_for(node, options, lanes=Lanes(count=4, delay=1))
    assert first_gpu(plan, node, 2) is None
    shared = node_of(usual(), 2, topology="memory")
    assert first_gpu(plan_for(shared, options), shared, 2) is None


def test_a_clock_that_ends_is_refused_as_with_all_gpus() -> None:
    plan, node = small()
    device = replace(node.device, handoff=replace(node.device.handoff, hop_s=number(4e3)))
    said = []
    for whole in (False, True):
        with pytest.raises(Exception, match="simulated time would be needed") as error:
            simulate(plan, replace(node, device=device), whole=whole)
        said.append(str(error.value))
    assert said[0] == said[1]
