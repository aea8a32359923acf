"""One law of decoding a vendor: what the engine does not run of a plan changes nothing of how warps
take experts' weights.
"""

from __future__ import annotations

import pytest

from twin.calibrate.node import calibrated_node
from twin.cost.rests import rests_on
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.plan.types import Residual
from twin.study.case import Case

ROUTED = ("routed_up", "routed_down")
ALIKE = 0.12  # of the routed stages: their inputs come from another hand-off
WHOLE = 0.1  # of the step


@pytest.mark.parametrize("node", ["8xmi300x", "1xh200"])
@pytest.mark.parametrize("model", ["gpt-oss-20b"])
def test_a_sliced_residual_leaves_routed_stages_as_they_are(model: str, node: str) -> None:
    spec, where = first_layers(load_model(model), 2), calibrated_node(node)
    default, sliced = (
        Case(spec, where, {"context": 1024, **more}).simulate()
        for more in ({}, {"residual": Residual.SLICED})
    )
    times = [
        sum(stage.seconds for stage in one.stages if stage.kind in ROUTED)
        for one in (default, sliced)
    ]
    assert times[1] == pytest.approx(times[0], rel=ALIKE)
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
