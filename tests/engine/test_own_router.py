"""Routers that each block multiplies with what it makes of the residual: the same choices, in plans
that nobody may change unnoticed. What a GPU makes of them is in test_cuda_codes.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.small_engine import LIMITS, SEED, TOKENS, planned
from tests.engine.test_experts import SHARED, routed
from tests.engine.test_gpt_oss import model
from twin.engine.weights import random_weights
from twin.errors import PlanError
from twin.kernel.scores import columns_of
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.matrices import stage_matrix
from twin.plan.options import HandOffKind, RouterInput
from twin.plan.types import Plan, Reset
from twin.proof.prove import prove, violations
from twin.reference.step import Reference
from twin.schedule.plans import build
from twin.schedule.scores import THREADS, own_rows, scores_of

GPU = replace(LIMITS, teams=True)


def of_own_rows(spec: ModelSpec, blocks: int = 5) -> Plan:
    options = planned(spec, blocks=blocks, weight_dtype=DType.BF16).options
    return build(spec, replace(options, router_input=RouterInput.OWN), GPU)


@pytest.mark.parametrize("spec", [model(), routed()], ids=["biased", "plain"])
def test_sums_of_all_blocks_choose_as_whole_rows_do(spec: ModelSpec) -> None:
    own = of_own_rows(spec)
    prove(own)
    whole = build(spec, replace(own.options, router_input=RouterInput.WHOLE), GPU)
    weights = random_weights(spec, SEED, DType.BF16)
    made = [
        np.stack([reference.step(token) for token in TOKENS[:6]])
        for reference in (Reference(plan, weights) for plan in (own, whole))
    ]
    assert np.abs(made[0] - made[1]).max() < 1e-5 * np.abs(made[1]).max()


def test_a_block_has_the_columns_of_its_rows() -> None:
    """Number of a logit, of a pair and of a thread, as scores.cuh finds them."""
    plan = of_own_rows(routed(), blocks=3)
    weights = random_weights(routed(), SEED, DType.BF16)
    made = scores_of(plan)
    assert made is not None
    stage = next(s for s in plan.stages if s.kind is StageKind.ROUTER)
    router = np.asarray(stage_matrix(plan, stage, 0, weights))
    words = columns_of(plan, stage, weights).view(np.uint32)
    for block, (lo, hi) in enumerate(own_rows(plan, stage)):
        for number in range(made.sums):
            item = number * made.parts
            mine = [
                words[block, (item + part) // THREADS, pair, (item + part) % THREADS]
                for part in range(made.parts)
                for pair in range(made.pairs)
            ]
            seen = np.array(mine, np.uint32).view(router.dtype)
            assert (seen[: hi - lo] == router[number, lo:hi]).all()
            assert not seen[hi - lo :].any()


def test_planted_faults_are_found() -> None:
    plan = of_own_rows(routed())
    router, route = (
        next(s for s in plan.stages if s.kind is kind)
        for kind in (StageKind.ROUTER, StageKind.ROUTE)
    )
    sums = plan.values[router.publishes or 0]

    def found(*stages: object, value: object = None) -> list[str]:
        changed = {s.index: s for s in stages}  # type: ignore[attr-defined]
        values = tuple(value if v.id == sums.id and value else v for v in plan.values)
        stages_ = tuple(changed.get(s.index, s) for s in plan.stages)
        made = replace(plan, stages=stages_, values=values)  # type: ignore[arg-type]
        return [str(one) for one in violations(made)]

    # each block would write its own words alone
    assert any("read as a sum" in one for one in found(value=replace(sums, summed=False)))
    # the residual is not read before what follows norms it
    assert any(
        "does not read o_proj" in one for one in found(replace(route, reads=route.reads[1:]))
    )
    # sums are set back while others read them
    home = next(s for s in plan.stages if any(r.value == sums.id for r in s.resets))
    (reset,) = (r for r in home.resets if r.value == sums.id)
    early = replace(route, resets=(*route.resets, reset))
    rest = replace(home, resets=tuple(r for r in home.resets if r.value != sums.id))
    assert any("resets" in one and sums.name in one for one in found(early, rest))


def test_whoever_adds_knows_that_all_owners_have_reset() -> None:
    """With one copy, where the next layer's output projection still resets what the stage behind
    it adds to: a block knows of its own resets alone.
    """
    plan = build(routed(), replace(of_own_rows(routed()).options, copies=1), GPU)
    assert not violations(plan)
    first = next(v for v in plan.values if v.summed)
    late = next(s for s in plan.stages if s.kind is StageKind.O_PROJ and s.layer == 1)
    stages = []
    for stage in plan.stages:
        resets = tuple(r for r in stage.resets if r.value != first.id)
        more = (Reset(first.id),) if stage is late else ()
        stages.append(replace(stage, resets=(*resets, *more)))
    said = [str(one) for one in violations(replace(plan, stages=tuple(stages)))]
    assert any("writes logits_summed[1]" in one and "reset logits_summed[0]" in one for one in said)


@pytest.mark.parametrize(
    ("spec", "more", "says"),
    [
        (routed(SHARED), {}, "shared experts next to its router"),
        (routed(), {"handoff": HandOffKind.COUNTER}, "only where blocks poll"),
        (routed(), {"weight_dtype": DType.FP32}, "two to a word"),
        (routed(), {"blocks": 300}, "a sum counts up to"),
    ],
    ids=["shared", "counters", "fp32", "blocks"],
)
def test_others_are_refused_with_the_reason(
    spec: ModelSpec, more: dict[str, object], says: str
) -> None:
    options = planned(spec, weight_dtype=DType.BF16).options
    wanted = replace(options, router_input=RouterInput.OWN, **more)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=says):
        build(spec, wanted, GPU)
    with pytest.raises(PlanError, match="only NVIDIA"):
        build(routed(), replace(options, router_input=RouterInput.OWN), LIMITS)
