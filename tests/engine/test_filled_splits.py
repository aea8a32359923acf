"""Splits that hold nothing yet: the reference's numbers, and the same bits, wherever they begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import LLAMA, QWEN3, TOKENS, engine, error, planned
from twin.models.spec import ModelSpec
from twin.plan.types import Execution, HandOffKind


@pytest.mark.parametrize("handoff", list(HandOffKind))
@pytest.mark.parametrize(("splits", "positions", "blocks"), [(6, 2, 3), (8, 1, 13), (7, 3, 20)])
@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda spec: spec.name)
def test_logits_do_not_depend_on_which_splits_hold_what(
    spec: ModelSpec, splits: int, positions: int, blocks: int, handoff: HandOffKind
) -> None:
    plan = planned(
        spec,
        blocks=blocks,
        handoff=handoff,
        kv_page=1,
        attention_splits=splits,
        split_positions=positions,
    )
    assert plan.kernel_attention().first_pages == positions
    assert error(plan) < 1e-5
