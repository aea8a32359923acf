"""Few bytes under way do not keep a memory busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.machines import FAST, ideal, limits_of, node_of, number
from tests.sim.test_executors import assert_equal
from twin.cost.under_way import delivered_share, enough_under_way
from twin.hardware.load import load_node
from twin.hardware.types import Device
from twin.models.load import load_model
from twin.plan.catalogue import StageKind
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.schedule.options import plan_for
from twin.schedule.probe import stream_probe
from twin.sim.executor import Executor
from twin.sim.run import simulate

RATE, SLOT = 1e12, 16384
SHORTFALL = 0.27
NEEDED_S = 6 * SLOT / RATE  # six slots of one block


def device(needed_s: float | None = NEEDED_S) -> Device:
    found = ideal(stream=RATE)
    needed = None if needed_s is None else number(needed_s)
    lost = number(SHORTFALL)
    return replace(found, memory=replace(found.memory, under_way_s=needed, shortfall_ratio=lost))


def plan(window: int, blocks: int = 1) -> Plan:
    options = Options(blocks=blocks, slot_bytes=SLOT, ring_slots=8, window_slots=window)
    return stream_probe(options, limits_of(device()), rows=512, cols=2048)


@pytest.mark.parametrize("window", [1, 3, 5, 6, 8])
def test_what_is_missing_costs_a_share_of_the_rate(window: int) -> None:
    missing = max(0.0, 1 - window / 6)
    assert delivered_share(plan(window), device()) == pytest.approx(1 - SHORTFALL * missing)
    assert enough_under_way(plan(window), device()) == (window >= 6)


def test_a_slot_has_the_bytes_of_its_tile() -> None:
    """Tiles of 8 x 1,024 weights of 16 bits, in slots of that size and in larger ones."""
    roomy = plan(3)
    roomy = stream_probe(
        replace(roomy.options, slot_bytes=SLOT * 3 // 2), limits_of(device()), rows=512, cols=2048
    )
    assert roomy.stages[0].matrices[0].tile_cols == plan(3).stages[0].matrices[0].tile_cols
    assert delivered_share(roomy, device()) == delivered_share(plan(3), device())


def test_blocks_count_together_and_other_memories_deliver_all() -> None:
    assert delivered_share(plan(3, blocks=2), device()) == 1
    assert delivered_share(plan(1), device(None)) == 1


def test_a_window_of_the_lm_head_counts_for_its_bytes() -> None:
    """Of a layer with two slots under way and a head with five."""
    node = load_node("1xh200")
    base = load_model("llama-3.2-1b")
    spec = replace(base, layers=1, windows=base.windows[:1])
    found = plan_for(spec, node, context=64, window_slots=2, head_window_slots=5)
    assert node.device.memory.under_way_s is not None
    narrow = replace(found, options=replace(found.options, head_window_slots=None))
    all_wide = replace(found, options=replace(found.options, window_slots=5))
    few, mixed, enough = (delivered_share(one, node.device) for one in (narrow, found, all_wide))
    assert few == pytest.approx(0.91, abs=0.01)
    assert enough == 1
    weights = [(s.kind, m.rows * m.cols) for s in found.stages for m in s.matrices]
    head = sum(size for kind, size in weights if kind is StageKind.LM_HEAD)
    rest = sum(size for kind, size in weights if kind is not StageKind.LM_HEAD)
    assert (head + rest) / mixed == pytest.approx(head + rest / few)


@pytest.mark.parametrize("executor", list(Executor))
def test_streams_take_longer_in_both_executors(executor: Executor) -> None:
    """A stream of which nothing but the memory takes time."""
    free = replace(device(), l2=replace(device().l2, bytes_per_s=number(FAST)))
    few, enough = (
        simulate(plan(window), node_of(free), steps=3, executor=executor).step_s
        for window in (3, 6)
    )
    assert_equal(plan(3), node_of(free))
    assert few / enough == pytest.approx(1 / (1 - SHORTFALL / 2), rel=1e-3)
