"""Pipes, rings and links, tight on both sides: not at t - 1, at t; and what they have under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.machines import FAST, ideal, limits_of, node_of, number, plan_for, usual, warped
from twin.cost.causes import HAND_OFF, STREAMING
from twin.errors import HardwareError
from twin.hardware.override import apply_fit
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.options import Options, Placement
from twin.schedule.probe import exchange_probe, turns_probe
from twin.sim.attribution import critical_path
from twin.sim.clock import SimulationError
from twin.sim.events import Clock
from twin.sim.links import Links
from twin.sim.machine import Machine
from twin.sim.memory import Package, Path, Pipe
from twin.sim.ring import Ring
from twin.sim.run import simulate
from twin.sim.times import Times


def package_of(device: Device, placement: Placement = Placement.FLAT) -> Package:
    return Package(device, Times.of(device), placement, 0)


# ---- pipes ---------------------------------------------------------------------------------------


def test_second_request_waits_for_the_pipe() -> None:
    pipe = Pipe("p", 1e12)  # a byte per picosecond
    assert [pipe.reserve(0, 100), pipe.reserve(40, 100), pipe.reserve(500, 1)] == [100, 200, 501]


def test_a_pipe_rounds_up() -> None:
    assert Pipe("p", 3e12).reserve(0, 1) == 1
    assert Pipe("p", 1e12, share=3).reserve(0, 100) == 300


def test_a_path_takes_as_long_as_its_slowest_pipe_and_its_latency() -> None:
    path = Path((Pipe("a", 1e12), Pipe("b", 5e11)), latency=7)
    assert path.request(0, 100) == 207


def test_small_transfers_get_half_of_a_pipe_that_streams_and_take_that_from_the_stream() -> None:
    pipe = Pipe("p", 1e12)
    pipe.reserve(0, 30)
    assert pipe.share(0, 100) == 130  # at half rate while the 30 last, at full rate after
    assert pipe.free == 130
    assert Pipe("p", 1e12).share(0, 100) == 100


def test_the_load_of_a_package_is_the_share_of_the_last_window() -> None:
    package = package_of(ideal())  # a byte per picosecond
    package.domains[0].reserve(0, 250)
    assert package.load(999, 1000) == 0  # the first window is not over
    assert package.load(1000, 1000) == 250
    assert package.load(2000, 1000) == 0


def test_interleaved_memory_passes_the_fabric_and_local_memory_does_not() -> None:
    device = usual(dies=4, io_dies=4)
    port = Pipe("block", FAST)
    flat, local = (
        package_of(device, placement).memory_path(0, port)
        for placement in (Placement.FLAT, Placement.DIE_AWARE)
    )
    die = ["Gpu[0].Die[0].port", "Gpu[0].Die[0].l2", "block"]
    assert [pipe.name for pipe in flat.pipes] == ["Gpu[0].Memory[0]", "Gpu[0].Io[0].ingress", *die]
    assert [pipe.name for pipe in local.pipes] == ["Gpu[0].Memory[0]", *die]
    assert flat.latency - local.latency == 60_000  # ring of four: 0, 1, 1 and 2 hops of 60 ns
    assert local.pipes[0].cost(1000) == 4 * flat.pipes[0].cost(1000)


# ---- ring ----------------------------------------------------------------------------------------


def ring_of(capacity: int, window: int, latency: int = 0) -> tuple[Clock, Ring]:
    clock = Clock()
    path = Path((Pipe("p", 1e12),), latency)
    ring = Ring([10] * 100, capacity=capacity, window=window, memory=path, cached=None, limit=100)
    ring.env = clock
    return clock, ring


def test_the_ring_is_filled_and_no_further() -> None:
    clock, ring = ring_of(4, 4)
    ring.pump()
    clock.run(until=1000)
    assert ring.issued == 4
    ring.free()
    clock.run(until=1001)
    assert ring.issued == 5


def test_the_window_limits_slots_in_flight() -> None:
    clock, ring = ring_of(8, 2, latency=100)
    ring.history = []
    ring.pump()
    clock.run(until=10_000)
    assert ring.history[:4] == [(0, 110), (0, 120), (110, 220), (120, 230)]


def test_a_closed_ring_requests_nothing_before_its_kernel_starts() -> None:
    clock, ring = ring_of(4, 4)
    ring.open(2, at=50)
    clock.run(until=50)
    assert ring.issued == 0
    clock.run(until=51)
    assert ring.issued == 2


def test_a_slot_that_is_never_streamed_is_an_error() -> None:
    _, ring = ring_of(4, 4)
    ring.limit = 0
    with pytest.raises(SimulationError, match="never be requested"):
        ring.wait_ps()


def test_a_full_ring_requests_nothing_however_often_it_is_called() -> None:
    clock, ring = ring_of(4, 4)
    ring.pump()
    clock.run(until=1000)
    ring.pump()
    assert ring.issued == 4


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "second"), [("mesh", 1_020_000), ("switch", 1_040_000)])
def test_two_peers_have_a_link_each_in_a_mesh_and_share_one_behind_a_switch(
    topology: str, second: int
) -> None:
    packages = [package_of(ideal()) for _ in range(3)]
    link = node_of(ideal(), 4, topology=topology).link
    assert link is not None
    links = Links(link, packages)
    assert links.send(0, 1, 0, 1000) == 1_020_000  # 1,000 B at 50 GB/s, 1 us
    assert links.send(0, 2, 0, 1000) == second


def test_an_unknown_topology_is_refused() -> None:
    link = node_of(ideal(), 2, topology="torus").link
    assert link is not None
    with pytest.raises(HardwareError, match="torus"):
        Links(link, [])


# ---- what is under way when a stage begins or a hand-off is made ---------------------------------


def test_a_stage_waits_for_its_first_tiles_before_its_inputs() -> None:
    """From a slow memory they come later than a quick hand-off, which is then no part of the wait;
    a slow one begins before they are there and ends as late as without them.
    """
    options, logs = (
        Options(blocks=4, slot_bytes=512, ring_slots=7, tile_rows=2, max_context=256),
        [],
    )
    for hop_s in (0.0, 1.0):
        device = apply_fit(
            warped(), {"memory.stream_bytes_per_s": number(1e9), "handoff.hop_s": number(hop_s)}
        )
        machine = Machine(
            plan_for(node_of(device), options), node_of(device), steps=2, keep_all=True
        )
        machine.run()
        block = machine.blocks[0]
        at = next(index for index, work in enumerate(block.program) if work.kind is StageKind.DOWN)
        assert len(block.program[at].ahead) > block.ring.capacity
        logs.append([(round(end / 1e6), cause, binder) for end, cause, binder in block.log[1][at]])
        pieces = critical_path(machine.blocks, 1, len(machine.plan.stages))
        assert (
            sum(piece.end - piece.start for piece in pieces)
            == machine.blocks[0].ended[1] - machine.blocks[0].ended[0]
        )
    quick, slow = logs
    assert quick[0][1] == STREAMING
    assert {end for end, _, _ in quick} == {quick[0][0]}
    assert not any(binder for _, _, binder in quick)
    assert [cause for _, cause, _ in slow[:2]] == [STREAMING, HAND_OFF]
    assert slow[1][2] is not None
    assert slow[1][0] == pytest.approx(slow[1][2][2] / 1e6 + 1e6)


def behind_a_queue(pipe_s: float, **times: float) -> Package:
    """A package whose memory is busy for `pipe_s` from time 0 on."""
    device = apply_fit(usual(), {"handoff.hop_s": number(1e-6)})
    handoff = replace(device.handoff, loaded_hop_s=number(times.get("hop_s", 1e-6)))
    l2 = replace(
        device.l2, latency_s=number(1e-7), loaded_latency_s=number(times.get("latency_s", 1e-7))
    )
    device = replace(device, handoff=handoff, l2=l2)
    package = package_of(device)
    package.domains[0].reserve(0, int(pipe_s * device.memory.stream_bytes_per_s.value))
    return package


def test_a_hop_and_a_load_grow_with_the_bytes_in_flight() -> None:
    """Loaded times are those behind a queue of one microsecond."""
    for queue_us in (0, 1, 4):
        package = behind_a_queue(queue_us * 1e-6, hop_s=3e-6, latency_s=6e-7)
        assert package.queueing(0) == pytest.approx(queue_us * 2_000_000, rel=1e-3)
        assert package.fetching(0) == pytest.approx(queue_us * 500_000, rel=1e-3)
        assert package.queueing(queue_us * 1_000_000 + 1000) == 0  # all requests are served


def test_hops_without_a_loaded_time_do_not_grow() -> None:
    package = behind_a_queue(5e-6)
    assert package.queueing(0) == package.fetching(0) == 0


def test_a_hand_off_pays_for_the_stream_that_is_in_flight_when_it_is_made() -> None:
    idle = apply_fit(ideal(stream=1e11), {"handoff.hop_s": number(1e-6)})
    loaded = replace(idle, handoff=replace(idle.handoff, loaded_hop_s=number(1.5e-6)))
    options = Options(blocks=4, slot_bytes=2048, ring_slots=4, window_slots=4)
    quiet = exchange_probe(options, limits_of(idle), elements=4, stages=3)
    assert simulate(quiet, node_of(loaded)).step_s == simulate(quiet, node_of(idle)).step_s
    busy = turns_probe(options, limits_of(idle), elements=4, rows=96, cols=512, stages=3)
    assert simulate(busy, node_of(loaded)).step_s > simulate(busy, node_of(idle)).step_s
