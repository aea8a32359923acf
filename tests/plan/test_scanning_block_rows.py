"""Blocks that scan the cache own fewer rows of the output projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proof.tiny import tiny
from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import HandOffKind, Sampling
from twin.plan.spans import scatter, spread_unevenly
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for

H200 = load_node("1xh200")
LLAMA = load_model("llama-3.2-1b")
NARROW = replace(LLAMA, name="narrow", hidden=896, heads=14, kv_heads=2, ffn=4864)


def shares(plan: Plan) -> list[tuple[bool, int]]:
    """Of each block, in a layer: does it scan, and its rows of the output projection."""
    scan = next(stage for stage in plan.stages if stage.kind is StageKind.ATTENTION)
    out = next(stage for stage in plan.stages if stage.kind is StageKind.O_PROJ)
    assert out.matrix
    return [
        (lo < hi, last - first)
        for (lo, hi), (first, last) in zip(scan.items, out.matrix.owned, strict=True)
    ]


@given(
    items=st.integers(1, 40),
    free=st.integers(1, 60),
    rows=st.integers(0, 9),
    more=st.integers(0, 500),
    shift=st.integers(0, 99),
)
def test_the_others_share_what_is_left(
    items: int, free: int, rows: int, more: int, shift: int
) -> None:
    blocks, count = items + free, rows * items + more
    own: tuple[Span, ...] = scatter(items, blocks)
    spans = spread_unevenly(count, own, rows, shift)
    assert [spans[0][0], *(hi for _, hi in spans)] == [*(lo for lo, _ in spans), count]
    sizes = [(lo < hi, last - first) for (lo, hi), (first, last) in zip(own, spans, strict=True)]
    assert {size for scans, size in sizes if scans} == {rows}
    others = [size for scans, size in sizes if not scans]
    assert max(others) - min(others) <= 1


@pytest.mark.parametrize("rows", [0, 3])
def test_a_plan_with_such_rows_is_proven(rows: int) -> None:
    plan = plan_for(LLAMA, H200, context=96, max_context=168, scanning_block_rows=rows)
    assert {own for scans, own in shares(plan) if scans} == {rows}
    prove(plan)


def test_narrow_projections_leave_out_who_scans_by_default() -> None:
    """Two teams of a block take 16 rows of 896 columns at once, of which an equal share has 7;
    all teams share each row of Llama-3.2-1B.
    """
    narrow = plan_for(NARROW, H200, context=96, max_context=168)
    assert narrow.options.scanning_block_rows == 0
    assert {own for scans, own in shares(narrow) if scans} == {0}
    assert {own for scans, own in shares(narrow) if not scans} == {7, 8}
    prove(narrow)
    wide = plan_for(LLAMA, H200, context=96, max_context=168)
    assert wide.options.scanning_block_rows is None
    chosen = plan_for(NARROW, H200, context=96, scanning_block_rows=None)
    assert chosen.options.scanning_block_rows is None


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("handoff", list(HandOffKind))
@pytest.mark.parametrize("sampling", list(Sampling))
def test_default_plans_of_few_layers_are_proven(
    layers: int, handoff: HandOffKind, sampling: Sampling
) -> None:
    spec = replace(NARROW, layers=layers, windows=(0,) * layers)
    plan = plan_for(spec, H200, context=96, handoff=handoff, sampling=sampling)
    assert plan.options.scanning_block_rows == 0
    last = [stage for stage in plan.stages if stage.kind is StageKind.O_PROJ][-1]
    assert last.matrix
    assert all(lo < hi for lo, hi in last.matrix.owned)
    prove(plan)


def test_blocks_of_later_splits_are_not_left_out() -> None:
    """Of 32 splits four hold a short context."""
    plan = plan_for(NARROW, H200, context=96, max_context=8192)
    assert plan.kernel_attention().splits > 4
    own = [rows for scans, rows in shares(plan) if scans]
    assert own.count(0) == 4 * plan.kernel_attention().kv_heads
    prove(plan)


def test_a_plan_whose_blocks_all_scan_is_refused() -> None:
    with pytest.raises(PlanError, match="all 2 blocks scan"):
        plan_for(tiny(2), load_node("host"), blocks=2, attention_splits=4, scanning_block_rows=0)
