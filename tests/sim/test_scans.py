"""Cached keys and values, as a block of warps looks at them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.proof.tiny import plan_of, tiny
from tests.sim.machines import limits_of, node_of, warped, warps_of
from twin.cost.attention import cache_tiles
from twin.cost.lowering import compile_plan
from twin.plan.options import Options
from twin.schedule.choose import schedule_of
from twin.schedule.probe import attention_probe
from twin.sim.run import simulate


def test_an_item_is_scanned_in_rounds() -> None:
    """64 elements, 4 query heads: 2 warps a head, 4 positions a warp and load, 4 loads: 32
    positions a round.
    """
    device = warped(item_s=3e-6, round_s=1e-6)
    options = Options(blocks=1, context=256, max_context=256, attention_splits=1)
    plan = attention_probe(options, limits_of(device), heads=4, kv_heads=1, head_dim=64)
    assert simulate(plan, node_of(device)).step_s == pytest.approx(3e-6 + 8e-6, rel=0.01)


def test_cached_keys_come_through_the_ring() -> None:
    """One item of 128 positions, 64 x 2 bytes each for key and value: two slots of 16 KiB, in each
    a round of one query head.
    """
    options = Options(
        blocks=1,
        slot_bytes=16384,
        ring_slots=4,
        window_slots=4,
        context=128,
        max_context=128,
        attention_splits=1,
    )
    device = warped(round_s=1e-6, item_s=5e-6)
    plan = attention_probe(options, limits_of(device), heads=1, kv_heads=1, head_dim=64, stages=1)
    work = compile_plan(plan, device).stages[0][0]
    assert (work.kv, [round(ps / 1e6, 6) for ps in work.slots]) == ((), [6.0, 1.0])
    assert simulate(plan, node_of(device)).step_s == pytest.approx(7e-6, rel=0.01)
    waiting = compile_plan(plan, warped(slice_s=1e-6)).stages[0][0]
    assert [round(ps / 1e6, 6) for ps in waiting.slots] == [1.0, 1.0]  # each tile is awaited


def test_a_round_takes_by_positions_a_thread_and_threads_a_position() -> None:
    """Heads of 96 hold one position a thread; of 128 on sixteen threads, so that sums over them
    take a step more.
    """
    device, took = warped(round_s=1e-6), {}
    for head_dim in (64, 96, 128):
        plan = attention_probe(
            Options(blocks=1, context=16, max_context=16),
            limits_of(device),
            heads=1,
            kv_heads=1,
            head_dim=head_dim,
        )
        took[head_dim] = sum(compile_plan(plan, device).stages[0][0].slots) / 1e6
    assert took == pytest.approx({64: 1.0, 96: 17 / 32, 128: 10 / 9})


def scanned(
    context: int, head_dim: int, *, group: int = 4, slot_bytes: int = 16384, **times: float
) -> list[float]:
    """Microseconds of the cached tiles of one item on tensor cores."""
    options = Options(
        blocks=1, slot_bytes=slot_bytes, context=context, max_context=context, attention_splits=1
    )
    limits = replace(limits_of(warped()), teams=True)
    plan = attention_probe(options, limits, heads=group, kv_heads=1, head_dim=head_dim, stages=1)
    assert schedule_of(plan).scan.tensor
    return [round(ps / 1e6, 6) for ps in compile_plan(plan, warped(**times)).stages[0][0].slots]


def test_on_tensor_cores_four_warps_take_sixteen_positions_each() -> None:
    """Tiles of 16 KiB hold 64 positions of 64 elements, 32 of 128: two of these are looked at side
    by side, and the last one shows.
    """
    assert scanned(128, 128, unit_s=1e-6) == [0.0, 1.0, 0.0, 1.0]
    assert scanned(160, 128, unit_s=1e-6) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert scanned(80, 128, unit_s=1e-6, slot_bytes=32768) == [1.0, 1.0]
    # 9 steps of 13: half the products, the same softmax
    assert scanned(128, 64, unit_s=1e-6) == pytest.approx([9 / 13, 9 / 13], abs=1e-6)
    assert scanned(16, 128, unit_s=1e-6) == [1.0]
    # each set of heads has warps of its own, which take a quarter longer for it
    assert scanned(64, 128, unit_s=1e-6, group=7) == [0.0, 1.25]
    # of more than eight, each warp makes the products of two sets
    assert scanned(64, 128, unit_s=1e-6, group=9) == [0.0, 1.75]
    assert scanned(64, 128, unit_s=1e-6, group=16) == [0.0, 1.75]
    # each tile is awaited; there are no rounds
    assert scanned(64, 128, slice_s=1e-6, round_s=1e-6) == [1.0, 1.0]


def test_warps_of_eight_heads_await_each_other_three_times() -> None:
    """Before an item's end, of which the first tile tells."""
    assert scanned(64, 128, slice_s=1e-6, group=8) == [1.0, 1.0]
    assert scanned(64, 128, slice_s=1e-6, group=12) == [4.0, 1.0]


def test_a_turn_on_tensor_cores_takes_longer_in_layers() -> None:
    """Four tiles of 16 KiB, each of two units: two turns, by the second and the fourth tile."""
    layer = plan_of(
        replace(tiny(heads=4, kv_heads=1), head_dim=128),
        blocks=4,
        slot_bytes=16384,
        max_context=256,
    )
    layer = replace(layer, limits=replace(layer.limits, teams=True))
    assert schedule_of(layer).scan.tensor
    warps = warps_of(warped(unit_s=1e-6))
    own, scan = layer.kernel_attention(), schedule_of(layer).scan
    turns = [ps / 1e6 for _, ps in cache_tiles(warps, layer, own, scan, 64 << 10)]
    longer = warps.attention.in_layers_ratio.value
    assert turns == [0.0, longer, 0.0, longer]


def test_an_items_start_and_end_grow_with_its_outputs() -> None:
    """A probe puts down a query for each of 256 threads at once; a layer publishes two outputs a
    thread, or four where tensor cores scan and there are more than 512.
    """
    assert [
        scanned(64, dim, group=group, item_s=2e-6)[0] for dim, group in ((64, 4), (128, 4), (64, 7))
    ] == [2.0, 2.5, 2.5]
    warps = warps_of(warped(item_s=2e-6))
    starts: dict[bool, list[float]] = {False: [], True: []}
    for heads, teams in itertools.product((4, 8, 16), starts):  # of one key head: 128 outputs each
        layer = plan_of(
            replace(tiny(heads=heads, kv_heads=1), head_dim=128),
            blocks=4,
            slot_bytes=16384,
            max_context=256,
        )
        layer = replace(layer, limits=replace(layer.limits, teams=teams))
        own, scan = layer.kernel_attention(), schedule_of(layer).scan
        assert scan.tensor is teams
        starts[teams].append(next(cache_tiles(warps, layer, own, scan, 64 << 10))[1] / 1e6)
    assert starts == {False: [2.0, 2.5, 3.5], True: [2.0, 2.0, 2.5]}
