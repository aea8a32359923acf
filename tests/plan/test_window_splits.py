"""Layers with a window that have their own number of attention splits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.proof.oracle import find_fault, meaning, schedules
from tests.proof.tiny import plan_of, tiny
from twin.calibrate.node import calibrated_node
from twin.engine.host import HostEngine
from twin.errors import EngineError, PlanError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.catalogue import StageKind
from twin.plan.options import HandOffKind
from twin.plan.types import Plan
from twin.proof.prove import prove, violations
from twin.schedule.options import plan_for
from twin.schedule.ring import limits_of
from twin.sim.executor import Executor
from twin.sim.run import simulate

OSS, NODE = "gpt-oss-20b", "8xh200"


def divided(**chosen: Any) -> Plan:
    """Layers 1 and 3 of four have a window of 8 positions."""
    base = {"gpus": 2, "blocks": 3, "attention_splits": 3, "window_splits": 1, "max_context": 128}
    return plan_of(tiny(4), **{**base, **chosen})


def published(plan: Plan) -> list[int]:
    return [
        plan.values[stage.publishes].elements
        for stage in plan.stages
        if stage.kind is StageKind.ATTENTION and stage.publishes is not None
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("handoff", HandOffKind)
@pytest.mark.parametrize("copies", [2, 3])
def test_layers_of_two_divisions_run_without_a_fault(handoff: HandOffKind, copies: int) -> None:
    plan = divided(handoff=handoff, copies=copies)
    prove(plan)
    assert find_fault(plan, schedules(1, plan, 6), meaning(plan)) is None
    assert published(plan)[0] == published(plan)[2] == 3 * published(plan)[1]


def test_both_divisions_hold_all_positions() -> None:
    own = divided(max_context=1000).kernel_attention()
    assert own.splits * own.item_positions >= 1000
    assert own.window_splits * own.window_positions >= 1000
    assert own.window_positions % 16 == 0
    assert divided(window_splits=3).memory_bytes() == divided(window_splits=None).memory_bytes()


@pytest.mark.parametrize(("name", "to"), [("window_splits", 2), ("window_positions", 64)])
def test_the_proof_refuses_another_division_than_the_stages_have(name: str, to: int) -> None:
    plan = divided()
    wrong = replace(plan, attentions=(replace(plan.kernel_attention(), **{name: to}),))
    assert violations(wrong)


def test_without_the_option_all_layers_are_divided_alike() -> None:
    alike = divided(window_splits=None)
    assert len(set(published(alike))) == 1
    assert alike.simulation_only() is None


def test_the_engine_refuses_what_its_kernel_has_one_number_for() -> None:
    plan = divided(gpus=1)
    message = r"window_splits=1 with attention_splits=3 .*; the engine runs window_splits=3"
    with pytest.raises(EngineError, match=message):
        HostEngine(plan, {})
    assert divided(window_splits=3).simulation_only() is None


def test_a_model_without_windows_has_no_window_splits() -> None:
    dense = replace(tiny(2), windows=(0, 0))
    with pytest.raises(PlanError, match="has no layer with a window; use attention_splits"):
        plan_of(dense, blocks=2, window_splits=1)


def test_a_long_context_gathers_few_partial_outputs_of_a_short_window() -> None:
    """Of 128 positions four splits hold all, and 124 more were gathered for nothing."""
    node = calibrated_node(NODE)
    plans = [
        plan_for(load_model(OSS), node, context=16384, window_splits=splits) for splits in (None, 4)
    ]
    prove(plans[1])
    all_alike, few = (simulate(plan, node).step_s for plan in plans)
    assert few < 0.97 * all_alike


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("model", "node", "context", "splits"),
    [
        (OSS, NODE, 32768, 64),
        (OSS, NODE, 1024, 8),  # fewer anyway
        (OSS, "1xh200", 32768, 16),
        (OSS, "8xmi300x", 32768, 256),  # nobody has looked
        ("gemma-3-1b", "1xh200", 16384, 64),
        ("gemma-3-1b", "1xh200", 512, 4),  # no context is longer than the window
        ("llama-3.1-70b", NODE, 32768, 132),
    ],
)
def test_models_with_windows_have_few_splits(
    model: str, node: str, context: int, splits: int
) -> None:
    chosen = {"context": min(context, 512), "max_context": context}
    plan = plan_for(load_model(model), load_node(node), **chosen)
    assert plan.kernel_attention().splits == splits
    plan = plan_for(load_model(model), load_node(node), **chosen, attention_splits=7)
    assert plan.kernel_attention().splits == 7


@pytest.mark.parametrize("node", ["1xh200", "2xmi300x"])
def test_both_executors_agree(node: str) -> None:
    machine = calibrated_node(node)
    plan = divided(gpus=machine.gpus, context=100, limits=limits_of(machine))
    took = {
        simulate(plan, machine, executor=executor).step_s
        for executor in (Executor.COMPILED, Executor.SIMPY)
    }
    assert len(took) == 1
