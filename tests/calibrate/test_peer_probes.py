"""Probes of several GPUs: proven, run on emulated ones, and never simulated below their bound."""

from __future__ import annotations

import numpy as np
import pytest

from tests.native.test_device_builds import H200
from twin.calibrate.gpu_probes import traced
from twin.calibrate.peer_probes import (
    FENCES,
    SIZES,
    STAGES,
    lane_probes,
    peer_probes,
    reduce_seconds,
)
from twin.calibrate.recipe import link_groups
from twin.engine.cuda_build import compile_cubin
from twin.engine.host import HostEngine
from twin.errors import PlanError, ToolchainError
from twin.hardware.floor import exchange_floor_s
from twin.plan.options import HandOffKind, Limits, Options
from twin.plan.peer_probes import over_gpus
from twin.proof.prove import prove
from twin.schedule.probe import exchange_probe, hop_probe, stream_probe
from twin.sim.run import simulate
from twin.study.hardware import node_on_file

FEW = Limits(blocks=4, dies=1, on_chip_bytes=2**30, memory_bytes=2**40, oversubscribe=True)
OPTIONS = Options(blocks=3, slot_bytes=1024, ring_slots=2, window_slots=2, copies=6)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_probe_over_gpus_is_proven_and_runs_on_emulated_ones(gpus: int) -> None:
    for plan in (
        exchange_probe(OPTIONS, FEW, elements=48, stages=6),
        hop_probe(OPTIONS, FEW, pair=(0, 2), hops=2),
    ):
        made = over_gpus(plan, gpus)
        prove(made)
        assert made.ranks == gpus
        assert all(value.pushed for value in made.values)
        with HostEngine(made, None) as running:
            seconds = running.step_seconds(steps=3, warmup=1)
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()


def test_only_probes_of_one_rank_go_over_gpus() -> None:
    made = over_gpus(exchange_probe(OPTIONS, FEW, elements=48, stages=6), 2)
    for plan, gpus in ((made, 2), (stream_probe(OPTIONS, FEW, rows=8, cols=64), 1)):
        with pytest.raises(PlanError, match="give a probe of one rank"):
            over_gpus(plan, gpus)


@pytest.mark.parametrize("node", ["2xh200", "8xh200", "2xh100"])
def test_no_simulated_all_reduce_is_faster_than_a_remote_store_and_two_round_trips(
    node: str,
) -> None:
    here = node_on_file(node)
    bound = exchange_floor_s(here)
    assert bound > here.link.hop_s.value  # type: ignore[union-attr]
    for elements in (512, 4096):
        plan = exchange_probe(Options(blocks=132), H200, elements=elements, stages=STAGES)
        assert simulate(over_gpus(plan, here.gpus), here).step_s / STAGES >= bound


def test_one_gpu_has_no_exchange_to_bound() -> None:
    assert exchange_floor_s(node_on_file("1xh200")) == 0


def test_an_all_reduce_under_stream_is_what_it_adds_to_the_stream() -> None:
    medians = {"peer-reduce-6K-g2": 30e-6, "peer-reduce-loaded-6K-g2": 360e-6}
    medians |= {"peer-stream-g2": 330e-6}
    assert reduce_seconds(medians, 2, 6, loaded=False) == pytest.approx(2e-6)
    assert reduce_seconds(medians, 2, 6, loaded=True) == pytest.approx(2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 8])
def test_every_probe_is_proven_and_compiles_for_hopper(gpus: int) -> None:
    probes = [*peer_probes(H200, gpus), *lane_probes(H200, gpus)]
    assert len({probe.name for probe in probes}) == len(probes) == 2 * len(SIZES) + 3 + 6 + 4
    for probe in probes:
        prove(probe.plan)
        fenced = probe.plan.options.handoff is not HandOffKind.SENTINEL
        assert fenced == (probe.group == FENCES)
        try:
            report = compile_cubin(probe.plan)
        except ToolchainError as error:
            if "installed" not in str(error) and "loaded" not in str(error):
                raise
            pytest.skip(str(error))
        assert (report.spill_bytes, report.stack_bytes) == (0, 0), probe.name


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_lanes_are_probed_with_their_stages_and_settle_nothing(gpus: int) -> None:
    probes = lane_probes(H200, gpus)
    assert [one.name for one in traced(probes)] == [probe.name for probe in probes]
    assert all(probe.group not in link_groups(2) for probe in probes)
    for probe in probes:
        prove(probe.plan)
        assert (probe.plan.ranks, probe.plan.ranks_per_gpu) == (8, 8 // gpus)
