"""Slices of a cache where blocks exchange words: polls and gathers occupy them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.machines import ideal, limits_of, node_of, numbers
from twin.errors import HardwareError
from twin.hardware.override import apply_fit
from twin.hardware.types import Cache, Device, Fabric, Slices
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.plan.options import Exchanged, Options
from twin.schedule.options import plan_for
from twin.schedule.probe import exchange_probe
from twin.sim.executor import Executor
from twin.sim.run import simulate
from twin.sim.slices import Slice, polled_bytes
from twin.study.hardware import node_on_file

COPIED = Exchanged.PER_IO_DIE
ROUND_PS = 250_000  # of a poll that nothing holds up


def of_io_dies(*, slices: float = 1e15, near_s: float = 1e-7) -> Device:
    """Two I/O dies with two dies each; only words and the way to them take time."""
    way = numbers(die_port_bytes_per_s=1e18, io_ingress_bytes_per_s=1e18, hop_s=1e-7)
    device = replace(
        ideal(dies=4, per_die=1, io_dies=2),
        fabric=Fabric(**way),
        llc=Cache(**numbers(capacity_bytes=1e6, bytes_per_s=1e18, latency_s=1.5e-7)),
        slices=Slices(**numbers(bytes_per_s=slices, near_s=near_s)),
    )
    times = numbers(hop_s=6e-7, cross_die_s=2e-7, poll_s=2e-7)
    return apply_fit(device, {f"handoff.{name}": value for name, value in times.items()})


def exchange_ps(device: Device, exchanged: Exchanged = Exchanged.ONCE, elements: int = 64) -> int:
    """Of a vector of all blocks, from one to the next; both executors say the same."""
    options = Options(blocks=4, exchanged=exchanged)
    plan = exchange_probe(options, limits_of(device), elements=elements, stages=6)
    one, other = (
        simulate(plan, node_of(device), steps=3, executor=executor).step_ps for executor in Executor
    )
    assert one == other
    return one // 6


def test_a_poll_is_late_only_when_a_round_takes_longer_than_a_load() -> None:
    slices = Slice("slices", 1e12, ROUND_PS)  # a byte a picosecond
    slices.waiting = ROUND_PS
    assert slices.crowding() == 0
    slices.waiting += 100  # a store waits behind these, and is found half of that later
    assert slices.crowding() == 150


def test_a_block_polls_what_its_threads_have_under_way() -> None:
    assert polled_bytes(100, counted=False) == 100
    assert polled_bytes(12_288, counted=False) == 8_192
    assert polled_bytes(12_288, counted=True) == 64


def test_gathers_pass_the_slices_one_after_the_other() -> None:
    """Four blocks gather 64 words each, through slices of two I/O dies."""
    slow = exchange_ps(of_io_dies(slices=1e9)) - exchange_ps(of_io_dies())
    gathered = 4 * 64 * 4 * 1000 // 2  # ps, at 2 GB/s
    assert slow >= gathered
    assert slow <= 4 * gathered  # polls wait for as many bytes, and are found half a round later


def test_a_copy_on_each_io_die_saves_the_way_there() -> None:
    """The farthest writer is one hop of 100 ns away instead of one on average, there and back; half
    a poll is as much shorter as half of the way.
    """
    device = of_io_dies()
    once, each = (exchange_ps(device, exchanged) for exchanged in Exchanged)
    # two I/O dies: words that lie anywhere travel a hop (half there, half back), copies one at most
    assert once - each == pytest.approx(25_000, abs=10)


def test_a_far_load_is_no_nearer_than_its_own_cache_says() -> None:
    same = of_io_dies(near_s=1.5e-7)
    assert exchange_ps(same) == exchange_ps(of_io_dies())  # words lie once: nothing is near


def test_copies_are_refused_where_there_are_no_io_dies_with_slices() -> None:
    node = node_on_file("1xh200")
    plan = plan_for(first_layers(load_model("llama-3.2-1b"), 1), node, exchanged=COPIED)
    assert "exchanged=once" in str(plan.simulation_only())
    with pytest.raises(HardwareError, match="exchanged=per-io-die: h200-sxm has no I/O dies"):
        simulate(plan, node)
