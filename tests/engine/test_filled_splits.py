"""Splits that fill before others take any: the reference's numbers wherever pages begin, and none
of an item without positions.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.small_engine import LLAMA, QWEN3, TOKENS, engine, error, planned
from twin.models.spec import DType, ModelSpec
from twin.plan.options import HandOffKind


@pytest.mark.few(2)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", [DType.FP16, DType.FP32])
def test_prompts_in_passes_and_steps_find_the_same_cache(kv: DType) -> None:
    def logits(chunk: int) -> np.ndarray:
        plan = planned(
            blocks=5,
            kv_page=2,
            attention_splits=7,
            split_positions=4,
            prompt_chunk=chunk,
            kv_dtype=kv,
        )
        with engine(plan) as running:
            made = running.generate(TOKENS, max_tokens=30)
            return np.array([*made.tokens, *running.logits(TOKENS).argmax(axis=1)])

    assert np.array_equal(logits(1), logits(4))


@pytest.mark.parametrize("rows", [0, 2])
def test_blocks_that_scan_own_fewer_rows_of_the_output_projection(rows: int) -> None:
    assert error(planned(LLAMA, blocks=12, attention_splits=2, scanning_block_rows=rows)) < 1e-5
