"""Hand-offs in closed form, and whose time a wait is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.machines import (
    LANES,
    fitted,
    ideal,
    limits_of,
    node_of,
    number,
    plan_for,
    warped,
)
from twin.hardware.stated import of_a_core
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.options import CollectiveKind, HandOffKind, Options, Sampling
from twin.plan.peer_probes import over_gpus
from twin.schedule.probe import exchange_probe, sample_probe, turns_probe
from twin.sim.machine import Machine
from twin.sim.run import simulate


def exchange_ps(device: Device, handoff: HandOffKind, blocks: int = 4, elements: int = 40) -> int:
    plan = exchange_probe(
        Options(blocks=blocks, handoff=handoff), limits_of(device), elements=elements, stages=6
    )
    return simulate(plan, node_of(device), steps=3).step_ps // 6


def handing(dies: int = 1) -> Device:
    return fitted(
        ideal(dies=dies, per_die=4 // dies),
        handoff__hop_s=3e-7,
        handoff__cross_die_s=1e-7,
        handoff__poll_s=4e-8,
        handoff__atomic_s=5e-9,
        kernel__element_s=1e-9,
        kernel__stage_s=2e-7,
        l2__latency_s=1.5e-7,
    )


def test_a_sentinel_costs_a_hop_half_a_poll_and_the_gather() -> None:
    own = 10_000  # ps: each block publishes 10 elements, and sets as many back, a vector at once
    assert exchange_ps(handing(), HandOffKind.SENTINEL) == pytest.approx(
        300_000 + 20_000 + 40_000 + own + own / of_a_core().reset_elements.value + 200_000, abs=10
    )


def test_another_die_is_further() -> None:
    assert exchange_ps(handing(2), HandOffKind.SENTINEL) - exchange_ps(
        handing(1), HandOffKind.SENTINEL
    ) == pytest.approx(100_000, abs=10)


@pytest.mark.parametrize("handoff", [HandOffKind.COUNTER, HandOffKind.GRID])
def test_a_counter_costs_two_hops_an_atomic_per_block_and_a_load(handoff: HandOffKind) -> None:
    own = 10_000  # each block publishes 10 elements
    expected = 2 * 300_000 + 4 * 5_000 + 20_000 + 150_000 + 40_000 + own + 200_000
    assert exchange_ps(handing(), handoff) == pytest.approx(expected, abs=10)


def test_a_step_begins_with_one_access_to_memory_for_the_token() -> None:
    node, slow = (node_of(fitted(ideal(), memory__latency_s=latency)) for latency in (0, 1e-7))
    plan = plan_for(
        node,
        Options(
            blocks=4, slot_bytes=512, ring_slots=64, window_slots=64, tile_rows=2, max_context=256
        ),
    )
    # the cache is not read ahead either
    reads = 1 + sum(stage.kind is StageKind.ATTENTION for stage in plan.stages)
    assert simulate(plan, slow).step_ps - simulate(plan, node).step_ps <= reads * 100_000
    assert simulate(plan, slow).attribution_ps["other"] >= 100_000


def test_the_sampling_block_looks_at_every_logit() -> None:
    device = fitted(ideal(per_die=1), kernel__sample_element_s=1e-9)
    plan = sample_probe(Options(blocks=1), limits_of(device), vocab=500)
    result = simulate(plan, node_of(device))
    assert result.step_ps == pytest.approx(500_000, abs=10)
    assert result.attribution_ps["sampling"] >= 500_000


def test_a_models_sampling_block_looks_at_one_blocks_logits() -> None:
    """All blocks examine their own at the same time and summarise them in four words each."""
    slow, none = (node_of(fitted(ideal(), kernel__sample_element_s=each)) for each in (1e-5, 0))
    plan = plan_for(
        none,
        Options(
            blocks=4,
            slot_bytes=512,
            ring_slots=64,
            window_slots=64,
            tile_rows=2,
            max_context=256,
            sampling=Sampling.FULL,
        ),
    )
    taken = simulate(plan, slow).step_ps - simulate(plan, none).step_ps
    # some of the weights behind it are streamed meanwhile
    assert taken == pytest.approx(10**7 * -(-plan.shard.vocab // 4), rel=0.05)
    assert plan.values[plan.stages[-1].reads[0].value].elements == 4 * 4


def test_a_gather_is_limited_by_the_cache_that_all_blocks_of_a_die_share() -> None:
    device = fitted(ideal(), l2__bytes_per_s=1e9)
    gathered = 4 * 40 * 4  # bytes: four blocks, 40 elements each
    assert exchange_ps(device, HandOffKind.SENTINEL) == pytest.approx(
        (gathered + 40 * 4) * 1000, rel=0.01
    )


def test_waiting_for_a_slow_block_is_that_blocks_time_not_a_hand_off() -> None:
    """Another block owns all rows in each stage: the others wait long, but the path runs through
    its consumer.
    """
    device = fitted(ideal(), kernel__bf16_bytes_per_s=1e9, handoff__hop_s=3e-7)
    plan = plan_for(
        node_of(device), Options(blocks=4, slot_bytes=512, tile_rows=2, max_context=256)
    )
    stages = []
    for stage in plan.stages:
        if stage.matrix:
            rows, slow = stage.matrix.rows, stage.index % 4
            owned = tuple((0, rows) if block == slow else (rows, rows) for block in range(4))
            stage = replace(stage, matrix=replace(stage.matrix, owned=owned))
        stages.append(stage)
    slow = replace(plan, stages=tuple(stages))
    result = simulate(slow, node_of(device))
    exchanges = sum(1 for stage in plan.stages if stage.reads)
    assert result.attribution_ps["hand_off"] == pytest.approx(exchanges * 300_000, rel=0.01)
    down = [stage for stage in result.stages if stage.kind == "down"]
    assert all(
        stage.causes_ps["consumer"] + stage.causes_ps["streaming"] >= 64 * 128 * 2 * 1000
        for stage in down
    )


def test_a_barrier_after_a_push_waits_for_the_other_gpu() -> None:
    device = fitted(ideal(), handoff__hop_s=3e-7)
    plans = [
        Options(
            gpus=2,
            blocks=4,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
            handoff=HandOffKind.GRID,
        )
    ]
    node = node_of(device, 2, hop_s=5e-6)
    plan = plan_for(node, plans[0])
    pushed = sum(plan.values[s.publishes].pushed for s in plan.stages if s.publishes is not None)
    result = simulate(plan, node)
    link_hops = result.step_ps - simulate(plan, node_of(device, 2, hop_s=0)).step_ps
    # instead of the local hop
    assert link_hops == pytest.approx(pushed * (5_000_000 - 300_000), rel=0.01)


def test_a_look_at_exchanged_elements_takes_a_load_even_if_they_are_there() -> None:
    """Turns long enough to hide the hand-off: the look is all that is left of it."""
    device = replace(warped(reduction_s=1e-6), l2=replace(warped().l2, latency_s=number(3e-7)))
    options = Options(blocks=2, slot_bytes=16384, ring_slots=4, window_slots=4)
    plan = turns_probe(options, limits_of(device), elements=2, rows=64, cols=2048, stages=3)
    quick = replace(device, l2=replace(device.l2, latency_s=number(0)))
    assert simulate(plan, node_of(device)).step_s - simulate(
        plan, node_of(quick)
    ).step_s == pytest.approx(3 * 3e-7, rel=0.4)


def test_a_fence_is_paid_where_arrivals_are_counted() -> None:
    device = replace(ideal(), handoff=replace(ideal().handoff, fence_s=number(1e-6)))
    times = {}
    for kind in HandOffKind:
        plan = exchange_probe(
            Options(blocks=4, handoff=kind), limits_of(device), elements=4, stages=3
        )
        times[kind] = simulate(plan, node_of(device)).step_s
    assert times[HandOffKind.SENTINEL] == pytest.approx(0, abs=1e-7)
    assert times[HandOffKind.COUNTER] == times[HandOffKind.GRID] == pytest.approx(3e-6, rel=0.05)


def test_a_fence_waits_among_what_is_in_flight_behind_the_work() -> None:
    """What was in flight when the work began has long arrived: prefetched tiles make room
    for others, whose requests a long stage outlasts.
    """

    def step(stage_s: float, loaded_hop_s: float) -> float:
        device = replace(
            fitted(warped(), kernel__stage_s=stage_s),
            memory=ideal(stream=2e11).memory,
            handoff=replace(
                ideal().handoff, fence_s=number(1e-6), loaded_hop_s=number(loaded_hop_s)
            ),
        )
        plan = turns_probe(
            Options(blocks=2, ring_slots=8, window_slots=4, handoff=HandOffKind.COUNTER),
            limits_of(device),
            elements=2,
            rows=96,
            cols=2048,
            stages=3,
        )
        return simulate(plan, node_of(device), steps=3).step_s

    assert step(1e-3, 5e-6) == pytest.approx(step(1e-3, 0.0), abs=1e-9)
    assert step(0.0, 5e-6) > step(0.0, 0.0) + 1e-6


def test_the_last_of_many_blocks_words_comes_later_than_one_words_hop_says() -> None:
    """From another GPU: half of the spread with a sector of eight words a block, half of the rest
    with each further one. One block alone has no spread.
    """
    device = ideal(per_die=4)
    for owners, elements, later in (
        (4, 32, 100_000),
        (4, 64, 150_000),
        (4, 96, 175_000),
        (4, 40, 150_000),
        (1, 40, 0),
    ):
        plan = exchange_probe(
            Options(blocks=owners), limits_of(device), elements=elements, stages=6
        )
        plan = over_gpus(plan, 2)
        near, far = (
            simulate(plan, node_of(device, 2, topology="switch", spread_s=spread), steps=3).step_ps
            for spread in (0.0, 2e-7)
        )
        assert (far - near) // 6 == later


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("topology", ["switch", "mesh"])
def test_each_further_rank_costs_who_pushes_to_it_time_of_its_own(topology: str, gpus: int) -> None:
    """With sentinels alone: arrivals at counters and barriers wait for fences instead."""
    for kind in HandOffKind:
        plan = exchange_probe(Options(handoff=kind), limits_of(ideal()), elements=32, stages=6)
        plan = over_gpus(plan, gpus)
        without, with_it = (
            simulate(plan, node_of(ideal(), gpus, topology=topology, peer_s=peer), steps=3)
            for peer in (0.0, 2e-7)
        )
        further = gpus - 2 if kind is HandOffKind.SENTINEL else 0
        cost = pytest.approx(6 * further * 200_000, abs=100)
        assert with_it.step_ps - without.step_ps == cost
        assert with_it.attribution_ps["collective"] - without.attribution_ps["collective"] == cost


@pytest.mark.parametrize(("gpus", "further"), [(1, 0), (2, 1), (4, 2)])
def test_a_lane_pays_for_the_ranks_of_other_gpus_beyond_the_first(gpus: int, further: int) -> None:
    """Of four. One GPU has no link."""
    options = Options(
        gpus=gpus,
        blocks=4,
        slot_bytes=512,
        tile_rows=2,
        max_context=256,
        delay=1,
        collective=CollectiveKind.PUSH,
    )
    node = node_of(ideal(per_die=16), gpus, peer_s=2e-7)
    machine = Machine(plan_for(node, options, lanes=LANES), node, steps=1, keep_all=False)
    assert machine.further == further * 200_000


def test_a_push_waits_for_a_fence_of_all_gpus_and_for_each_ranks_arrival_behind_it() -> None:
    """Instead of its own GPU's fence; a sentinel waits for none."""
    device = replace(ideal(), handoff=replace(ideal().handoff, fence_s=number(5e-6)))
    for gpus in (2, 4):
        for kind in HandOffKind:
            plan = exchange_probe(Options(handoff=kind), limits_of(device), elements=32, stages=6)
            plan = over_gpus(plan, gpus)
            without, with_it = (
                simulate(plan, node_of(device, gpus, fence_s=fence), steps=3).step_ps
                for fence in (0.0, 2e-7)
            )
            fences = 0 if kind is HandOffKind.SENTINEL else 1 + gpus
            assert with_it - without == pytest.approx(6 * fences * 200_000, abs=100)
            assert without < 6 * 5_000_000  # none of the device's fences
