"""Chains of stages that no kernel has, made of a plan's program (studies/chains)."""

from __future__ import annotations

import pytest

from studies.chains import variants
from studies.chains.predict import STEPS, seconds
from twin.calibrate.node import calibrated_node
from twin.cost.lowering import compile_plan
from twin.cost.program import Program
from twin.hardware.types import Node
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.plan.catalogue import StageKind
from twin.plan.options import RouterInput
from twin.plan.types import Plan
from twin.schedule.options import plan_for


@pytest.fixture(scope="module")
def case() -> tuple[Plan, Node, Program]:
    node = calibrated_node("1xh200")
    spec = first_layers(load_model("gpt-oss-20b"), 1)
    plan = plan_for(spec, node, context=64, router_input=RouterInput.WHOLE)
    return plan, node, compile_plan(plan, node.device, steps=STEPS)


def test_a_hand_off_fewer_makes_no_step_longer(case: tuple[Plan, Node, Program]) -> None:
    plan, node, program = case
    today = seconds(plan, node, program)
    split = variants.k_split(program, node.device)
    for chain in (split, variants.own_router(program, node.device)):
        assert seconds(plan, node, chain) < today
    both = variants.own_router(split, node.device)
    assert seconds(plan, node, both) < seconds(plan, node, split)


def test_split_experts_stream_the_same_bytes_before_their_owners_add_parts(
    case: tuple[Plan, Node, Program],
) -> None:
    plan, node, program = case
    split = variants.k_split(program, node.device)
    assert split.sizes == program.sizes
    down = next(s for s in plan.stages if s.kind is StageKind.ROUTED_DOWN)
    for before, after in zip(program.stages, split.stages, strict=True):
        assert sum(len(work.slots) for work in after) == sum(len(work.slots) for work in before)
        assert not after[down.index].slots
        assert sum(read.size for read in after[down.index].reads) == 4 * 22 * plan.blocks


def test_a_router_of_own_rows_leaves_the_ring_to_others(case: tuple[Plan, Node, Program]) -> None:
    plan, node, program = case
    own = variants.own_router(program, node.device)
    router = next(s for s in plan.stages if s.kind is StageKind.ROUTER)
    less = 0
    for before, after, old, new in zip(
        program.stages, own.stages, program.sizes, own.sizes, strict=True
    ):
        assert len(old) - len(new) == len(before[router.index].slots)
        assert not after[router.index].slots
        less += sum(old) - sum(new)
    assert less == plan.stage_bytes(router)
