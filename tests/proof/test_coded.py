"""Low-bit weights: a plan whose matrices are not stored, or not laid out, as the kernel takes them
is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.small_engine import LLAMA, planned
from tests.refusals import refused
from twin.errors import InvalidPlan
from twin.models.formats import DECODED, format_named
from twin.models.quantized import requantized
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan
from twin.proof.prove import prove


def coded(kind: StageKind, **changed: Any) -> Plan:
    """A plan with INT8 weights, in which the matrix of the first stage of a kind is another."""
    plan = planned(requantized(LLAMA, format_named("int8")), slot_bytes=4096)
    at = next(stage for stage in plan.stages if stage.kind is kind)
    assert at.matrix
    other = replace(at, matrix=replace(at.matrix, **changed))
    return replace(plan, stages=tuple(other if stage is at else stage for stage in plan.stages))


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (StageKind.DOWN, {"format": None, "tile_rows": 8}, "is stored as"),
        (StageKind.DOWN, {"format": DECODED["fp8"]}, "is stored as"),
        (StageKind.DOWN, {"format": DECODED["nvfp4"]}, "is stored as"),
        (StageKind.LM_HEAD, {"pack": 0}, "elements of a row to a thread"),
        (StageKind.DOWN, {"pack": 32}, "elements of a row to a thread"),
        (StageKind.DOWN, {"tile_cols": 40}, "multiples of 16"),
        (StageKind.GATE_UP, {"tile_cols": 32}, "of the same input"),
    ],
    ids=str,
)
def test_a_matrix_that_the_kernel_would_read_otherwise_is_refused(
    kind: StageKind, changed: dict[str, Any], message: str
) -> None:
    refused(InvalidPlan, lambda: prove(coded(kind, **changed)), message)
