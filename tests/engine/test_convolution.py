"""Gated short convolutions and attention on the CPU engine: the reference's numbers from every
plan, histories that begin anew with each request, and what the proof refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.small_engine import LLAMA, error, planned
from tests.engine.test_prompt_chunks import CHUNK, LENGTHS
from tests.engine.test_prompt_chunks import error as passes_error
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.layers import Layer
from twin.models.mixers import GroupedAttention, ShortConvolution
from twin.models.spec import ModelSpec, Rope
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, Execution
from twin.plan.types import Plan, Stage
from twin.proof.prove import prove, violations

CONVOLUTION = ShortConvolution(channels=64, conv=3)
ATTENTION = GroupedAttention(heads=8, kv_heads=4, head_dim=8, qk_norm=True)


def convolved(
    mixer: ShortConvolution = CONVOLUTION, *, feed: DenseFeed | ExpertFeed | None = None
) -> ModelSpec:
    """Two layers of a convolution, one of attention, one of a convolution."""
    feed = feed or DenseFeed(width=96)
    layers = (*[Layer(mixer, feed)] * 2, Layer(ATTENTION, feed), Layer(mixer, feed))
    return replace(
        LLAMA,
        name="convolved",
        family="lfm2",
        layers=4,
        windows=(0,) * 4,
        qk_norm=True,
        tied=True,
        rope=Rope(1e4),
        layout=layers,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mixer", "feed"),
    [
        (replace(CONVOLUTION, conv=2), None),
        (replace(CONVOLUTION, conv=5), None),
        (CONVOLUTION, ExpertFeed(experts=6, top_k=3, width=40)),
    ],
    ids=("two taps", "five taps", "experts"),
)
def test_other_convolutions_match_the_reference(
    mixer: ShortConvolution, feed: ExpertFeed | None
) -> None:
    assert error(planned(convolved(mixer, feed=feed), blocks=5)) < 1e-5


def test_a_layer_of_a_convolution_hands_over_once_before_its_output_projection() -> None:
    plan = planned(convolved())
    kinds = [stage.kind for stage in plan.stages if stage.layer == 0]
    assert kinds == [
        StageKind.CONV_IN,
        StageKind.O_PROJ,
        StageKind.GATE_UP,
        StageKind.DOWN,
    ]


def test_histories_are_counted_as_memory_and_as_bytes_of_a_step() -> None:
    plan, longer = (
        planned(convolved(replace(CONVOLUTION, conv=conv)), blocks=5) for conv in (3, 4)
    )
    position = 3 * 64 * 4  # bytes of three layers' channels
    assert plan.kernel_state_bytes == 2 * position
    assert longer.memory_bytes() - plan.memory_bytes() == position
    assert longer.kv_bytes() - plan.kv_bytes() == position


def _changed(plan: Plan, kind: StageKind, **fields: Any) -> Plan:
    first = next(stage for stage in plan.stages if stage.kind is kind)
    stages: list[Stage] = list(plan.stages)
    stages[first.index] = replace(first, **fields)
    return replace(plan, stages=tuple(stages))


def test_the_proof_refuses_a_channel_whose_rows_two_blocks_have() -> None:
    """Each would carry on a history of its own of b * x that it does not know."""
    plan = planned(convolved(), blocks=4)
    stage = next(s for s in plan.stages if s.kind is StageKind.CONV_IN)
    assert stage.matrix is not None
    owned = list(stage.matrix.owned)
    (lo, middle), (_, hi) = owned[:2]
    owned[:2] = [(lo, middle + 1), (middle + 1, hi)]
    wrong = _changed(plan, StageKind.CONV_IN, matrix=replace(stage.matrix, owned=tuple(owned)))
    assert any("in units of 3" in violation.message for violation in violations(wrong))


def test_the_proof_refuses_convolutions_of_other_rows() -> None:
    plan = planned(convolved(), blocks=4)
    stage = next(s for s in plan.stages if s.kind is StageKind.CONV_IN)
    assert stage.matrix is not None
    wrong = _changed(plan, StageKind.CONV_IN, matrix=replace(stage.matrix, unit=1))
    assert violations(wrong)


def test_the_engine_opens_no_convolution_that_does_not_look_back() -> None:
    spec = convolved(replace(CONVOLUTION, conv=1))
    assert spec.runnable_reason() is not None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"blocks": 64, "prompt_chunk": 1 + CHUNK},
        {"gpus": 2, "blocks": 3},
        {"execution": Execution.GRAPH, "prompt_chunk": 2},
        {"gpus": 2, "execution": Execution.LAUNCHES, "collective": CollectiveKind.LIBRARY},
    ],
    ids=str,
)
def test_passes_carry_histories_on_as_steps_do(more: dict[str, Any]) -> None:
    plan = planned(convolved(), **({"prompt_chunk": CHUNK} | more))
    prove(plan)
    assert passes_error(plan, LENGTHS) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("conv", [2, 5])
def test_passes_shorter_than_a_history_leave_the_rest_of_it(conv: int) -> None:
    plan = planned(convolved(replace(CONVOLUTION, conv=conv)), prompt_chunk=3)
    assert passes_error(plan, (7, 8, 9)) < 1e-5
