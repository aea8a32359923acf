"""One law of decoding a vendor: what the engine does not run of a plan changes nothing of how warps
take experts' weights.
"""

from __future__ import annotations

import pytest

from twin.calibrate.node import calibrated_node
from twin.cost.rests import rests_on
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.plan.matrix import expected_experts
from twin.plan.options import Residual
from twin.sim.run import Result
from twin.study.case import Case

ROUTED = ("routed_up", "routed_down")
ALIKE = 0.12  # of the routed stages: their inputs come from another hand-off
WHOLE = 0.1  # of the step


def routed_s(result: Result) -> float:
    return sum(stage.seconds for stage in result.stages if stage.kind in ROUTED)


@pytest.mark.parametrize("node", ["8xmi300x", "1xh200"])
@pytest.mark.parametrize("model", ["gpt-oss-20b"])
def test_a_sliced_residual_leaves_routed_stages_as_they_are(model: str, node: str) -> None:
    spec, where = first_layers(load_model(model), 2), calibrated_node(node)
    default, sliced = (
        Case(spec, where, {"context": 1024, **more}).simulate()
        for more in ({}, {"residual": Residual.SLICED})
    )
    assert routed_s(sliced) == pytest.approx(routed_s(default), rel=ALIKE)
    assert sliced.step_s == pytest.approx(default.step_s, rel=WHOLE)


@pytest.mark.parametrize("node", ["1xmi300x", "8xmi455x", "1xb200"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.2-1b@nvfp4"])
def test_no_device_with_warps_decodes_by_a_judged_law(model: str, node: str) -> None:
    where = calibrated_node(node)
    case = Case(first_layers(load_model(model), 2), where, {"context": 1024})
    assert not [one for one in rests_on(case.plan(), where) if "unpacking" in one]


@pytest.mark.parametrize("more", [{"batch": 8}, {"draft": 3}, {"expert_ranks": 2}])
def test_plans_of_several_tokens_or_expert_ranks_are_sound(more: dict[str, int]) -> None:
    """Experts of eight sequences are more than four row groups of coded tiles could be dealt to."""
    where = calibrated_node("8xh200")
    Case(first_layers(load_model("gpt-oss-20b"), 1), where, {"context": 1024, **more}).plan()


def test_experts_of_eight_tokens_take_no_longer_each_than_those_of_one() -> None:
    """Tensor cores that multiply an expert's weights for one token have columns for the others."""
    spec, where = first_layers(load_model("gpt-oss-20b"), 1), calibrated_node("1xh200")
    one, eight = (
        Case(spec, where, {"context": 1024, "batch": batch}).simulate() for batch in (1, 8)
    )
    plan = Case(spec, where, {"context": 1024}).plan()
    routed = next(stage.routed for stage in plan.stages if stage.routed)
    more = expected_experts(routed, 8) / routed.top_k
    assert routed_s(eight) <= (1 + ALIKE) * more * routed_s(one)
