"""One GPU that stands for all, where they may differ in their order or in their experts: as close
to the whole machine as the docstring of `simulate` says, where both can be run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from twin.calibrate.node import calibrated_node
from twin.cost.routing import Draws, Routing, most_used
from twin.errors import PlanError
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.schedule.options import plan_for
from twin.sim.executor import Executor
from twin.sim.prepare import prepare
from twin.sim.run import simulate

ALIKE, DEALT = 0.005, 0.02  # of a step: ranks with the same work; experts dealt to ranks
LAYERS, STEPS = 4, 5


def plan_of(model: str, node: str, **chosen: Any) -> Plan:
    spec = first_layers(load_model(model), LAYERS)
    return plan_for(spec, calibrated_node(node), context=1024, **chosen)


def represented_ps(plan: Plan, node: str, steps: int) -> int:
    """The last step, or where steps differ the median of those after the first."""
    return simulate(plan, calibrated_node(node), steps=steps, representative=True).step_ps


@pytest.mark.few(2)
@pytest.mark.parametrize("node", ["2xh200", "4xh200", "8xh200", "4xb200", "8xb200", "8xmi300x"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_a_representative_of_equal_ranks_takes_as_long_as_all(model: str, node: str) -> None:
    plan = plan_of(model, node)
    whole = simulate(plan, calibrated_node(node))
    assert represented_ps(plan, node, 2) == pytest.approx(whole.step_ps, rel=ALIKE)


@pytest.mark.few(1)
@pytest.mark.parametrize("node", ["4xh200", "8xh200", "8xb200"])
def test_the_busiest_rank_stands_for_all_where_experts_are_dealt(node: str) -> None:
    plan = plan_of("gpt-oss-20b", node, expert_ranks=int(node[0]))
    whole = simulate(plan, calibrated_node(node), steps=STEPS)
    assert represented_ps(plan, node, STEPS) == pytest.approx(whole.step_ps, rel=DEALT)
    program = prepare(plan, calibrated_node(node).device, None, STEPS, busiest=True).program
    assert program.step_bytes(STEPS - 1) == whole.bytes_per_step


def test_the_busiest_of_a_layer_reads_the_most_experts() -> None:
    plan = plan_of("gpt-oss-20b", "8xh200", expert_ranks=8)
    ranks = Draws(plan, Routing()).step(0)
    for layer, used in enumerate(most_used(ranks)):
        assert len(used) == max(len(rank[layer]) for rank in ranks)


def test_a_rack_is_simulated_by_one_gpu_and_takes_the_most_that_the_model_divides_over() -> None:
    node = calibrated_node("72xgb200")
    plan = plan_of("llama-3.1-8b", "72xgb200")
    assert plan.options.gpus == 32
    assert "engine runs at most 8" in (plan.simulation_only() or "")
    found = simulate(plan, node)
    eight = simulate(plan_of("llama-3.1-8b", "8xgb200"), calibrated_node("8xgb200"))
    assert found.floor_s < eight.floor_s
    assert found.attribution["collective"] > eight.attribution["collective"]


@pytest.mark.parametrize(
    ("chosen", "run", "message"),
    [
        ({}, {"executor": Executor.SIMPY}, "in compiled code"),
        ({}, {"trace": True}, "at most 8 GPUs"),
        ({"handoff": "counter"}, {}, "take sentinels in a resident kernel"),
    ],
)
def test_what_a_representative_cannot_show_is_refused(
    chosen: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    plan = plan_of("llama-3.1-8b", "16xgb200")
    if "handoff" in chosen:
        kind = type(plan.options.handoff)(chosen["handoff"])
        plan = plan_of("llama-3.1-8b", "16xgb200", handoff=kind)
    with pytest.raises(PlanError, match=message):
        simulate(plan, calibrated_node("16xgb200"), **run)


def test_a_plan_of_a_board_keeps_all_its_gpus() -> None:
    plan = plan_of("llama-3.1-8b", "8xgb200")
    assert plan.options.gpus == 8
    spec = replace(first_layers(load_model("llama-3.1-8b"), 2), heads=6, kv_heads=2)
    with pytest.raises(PlanError, match="6 attention heads do not divide"):
        plan_for(spec, calibrated_node("8xgb200"))
