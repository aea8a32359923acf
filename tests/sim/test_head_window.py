"""More or fewer slots are under way in the LM head than elsewhere, to both executors alike."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.test_executors import assert_equal
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.schedule.options import plan_for
from twin.sim.run import simulate

NODE = load_node("1xh200")
BLOCKS = 12


def planned(head: int | None) -> Plan:
    base = load_model("llama-3.2-1b")
    spec = replace(base, layers=1, windows=base.windows[:1], vocab=BLOCKS * 256)
    plan = plan_for(spec, NODE, blocks=BLOCKS, context=64, max_context=128, window_slots=3)
    return replace(plan, options=replace(plan.options, head_window_slots=head))


def test_a_window_counts_in_the_head_alone() -> None:
    plans = {head: planned(head) for head in (None, 1, 3, 8)}
    assert plans[8].head_rows == 56
    assert plans[3].head_rows == 0
    took = {head: simulate(plan, NODE).step_s for head, plan in plans.items()}
    assert took[3] == took[None]
    assert took[8] < took[None] < took[1]
    for head in (1, 8):
        assert_equal(plans[head], NODE)
