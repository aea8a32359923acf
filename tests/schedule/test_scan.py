"""Which heads tensor cores scan, how many a warp takes, and what that costs in shared memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.proof.prove import violations
from twin.schedule import scan, warps
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for


def grouped(group: int, *, head_dim: int = 128, max_context: int = 512) -> Plan:
    base = load_model("llama-3.1-8b")
    spec = replace(base, layers=2, windows=base.windows[:2], heads=2 * group, kv_heads=2)
    return plan_for(
        replace(spec, head_dim=head_dim), load_node("1xh200"), context=64, max_context=max_context
    )


@pytest.mark.parametrize(
    ("group", "head_dim", "heads", "partials", "met"),
    [
        (3, 128, 3, 12, 0),
        (8, 128, 4, 32, 0),
        (9, 128, 8, 9, 3),
        (12, 64, 8, 12, 3),
        (16, 128, 8, 16, 3),
        (4, 256, 4, 16, 0),
    ],
)
def test_a_warp_takes_eight_heads_of_groups_that_have_more(
    group: int, head_dim: int, heads: int, partials: int, met: int
) -> None:
    made = schedule_of(grouped(group, head_dim=head_dim)).scan
    assert made.tensor
    assert (made.heads, made.partials, made.meetings) == (heads, partials, met)


@pytest.mark.parametrize(("group", "head_dim"), [(17, 128), (32, 64), (5, 256), (4, 96)])
def test_other_groups_are_scanned_without_tensor_cores(group: int, head_dim: int) -> None:
    made = schedule_of(grouped(group, head_dim=head_dim)).scan
    assert not made.tensor
    assert made.meetings == 0


def test_groups_of_sixteen_have_the_splits_of_tensor_cores() -> None:
    splits = [grouped(16, max_context=most).kernel_attention().splits for most in (232, 4096)]
    assert splits == [4, 24]


def test_wide_sets_take_no_slot_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """InternLM-3's ring without tensor cores had 13 slots; partial results of all warps of a set
    would leave 11.
    """
    node, spec = load_node("1xh200"), load_model("internlm3-8b")
    slots = []
    for partials in (1, 2, 4):
        monkeypatch.setattr(scan, "WIDE_PARTIALS", partials)
        warps._schedule.cache_clear()
        slots.append(plan_for(spec, node).options.ring_slots)
    warps._schedule.cache_clear()
    assert slots == [13, 12, 11]


def test_plans_of_wide_groups_are_proven() -> None:
    for group in (9, 12, 16):
        assert not violations(grouped(group))
