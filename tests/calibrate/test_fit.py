"""Fitting finds the numbers that made the samples, says what no probe settles, and refuses what
does not belong together.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.calibrate.pretended import step_s, stored_run
from twin.calibrate import store
from twin.calibrate.fit import REACH, TOGETHER, Fit, fit_node
from twin.calibrate.node import calibrated_node
from twin.calibrate.probes import Probe, footprints, host_probes
from twin.calibrate.reading import quiet, settled
from twin.cost.formats import family
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Node
from twin.models.formats import DECODED
from twin.proof.prove import violations
from twin.schedule.ring import limits_of

TRUE = {
    "kernel.bf16_bytes_per_s": 20e9,
    "kernel.row_s": 3e-9,
    "handoff.hop_s": 4e-7,
    "kernel.element_s": 8e-10,
    "kernel.kv_bytes_per_s": 9e9,
    "launch.graph_edge_s": 2e-6,
    "kernel.sample_element_s": 5e-9,
    "sharing.switch_s": 1.5e-6,
}
# out of the way
RATES = ("memory.stream_bytes_per_s", "llc.bytes_per_s", "l2.bytes_per_s", "block.load_bytes_per_s")
FEW = (
    "stream-bf16-1MB-b1",
    "rows-64",
    "exchange-sentinel-64-b1",
    "exchange-sentinel-64-b2",
    "exchange-sentinel-4096-b2",
    "attention-1024-b1",
    "graph-b2",
    "sample-4096",
    "turns-512x512-b8",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTWIN_CALIBRATION", str(tmp_path))


def two_cores() -> Node:
    """This computer's node, with two cores whatever it has."""
    return apply_fit(
        load_node("1xhost"), {"structure.blocks_per_die": Number(2, Kind.MEASURED, "test")}
    )


def probes(*groups: str) -> list[Probe]:
    """A few, of all groups or of these."""
    node = load_node("1xhost")
    few = [p for p in host_probes(limits_of(node), 2, quick=True) if p.name in FEW]
    return [p for p in few if not groups or p.group in groups]


def truth(node: Node) -> Node:
    return apply_fit(
        node, {path: Number(value, Kind.MEASURED, "test") for path, value in TRUE.items()}
    )


def measured(node: Node, chosen: list[Probe]) -> store.Run:
    random = np.random.default_rng(1)
    made = truth(node)
    samples = {p.name: (step_s(made, p) * (1 + 0.01 * random.random(5))).tolist() for p in chosen}
    return stored_run("host", "test", {"device": "host"}, samples)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """What a run of the few probes leads to."""
    node = two_cores()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOTWIN_CALIBRATION", str(tmp_path_factory.mktemp("calibration")))
        return fit_node(node, probes(), measured(node, probes()), lambda said: None)


def test_every_probe_is_a_valid_plan() -> None:
    node = load_node("1xhost")
    for probe in host_probes(limits_of(node), node.device.blocks, quick=False):
        assert violations(probe.plan) == [], probe.name


def test_the_fit_finds_the_numbers_that_made_the_samples(fitted: Fit) -> None:
    fit = fitted
    assert abs(fit.worst[1]) < 0.05
    for path in ("kernel.kv_bytes_per_s", "kernel.sample_element_s", "launch.graph_edge_s"):
        number = fit.numbers[path]
        assert number.value == pytest.approx(TRUE[path], rel=0.2), path
        assert number.kind is Kind.FITTED
        assert number.low is not None
        assert number.high is not None
        assert number.low <= number.value <= number.high
    assert all(len(factors) == TOGETHER and min(factors) > 0 for factors in fit.together.values())
    assert "launch.graph_edge_s" in fit.together
    assert "kernel.fp32_bytes_per_s" not in fit.together  # no probe knows it


def test_the_cost_of_a_turn_is_found_when_the_rest_is_known() -> None:
    node = apply_fit(
        truth(two_cores()), {path: Number(2e11, Kind.MEASURED, "test") for path in RATES}
    )
    turns = [p for p in probes() if p.group == "turns"]
    samples = {p.name: [step_s(node, p)] * 3 for p in turns}
    begun = apply_fit(node, {"sharing.switch_s": Number(1e-7, Kind.ASSUMED, "test")})
    fit = fit_node(begun, turns, stored_run("host", "test", {}, samples), lambda said: None)
    assert fit.numbers["sharing.switch_s"].value == pytest.approx(
        TRUE["sharing.switch_s"], rel=0.05
    )


def test_a_number_that_no_probe_binds_keeps_what_its_file_says(fitted: Fit) -> None:
    node, fit = two_cores(), fitted
    # no FP32 probe among the few
    assert fit.binding["kernel.fp32_bytes_per_s"] < 1 <= fit.binding["kernel.kv_bytes_per_s"]
    assert {path for path, number in fit.numbers.items() if number.kind is Kind.FITTED} == {
        p for p, strength in fit.binding.items() if strength >= 1
    }
    known = apply_fit(node, fit.numbers)
    assert known.device.kernel.fp32_bytes_per_s == node.device.kernel.fp32_bytes_per_s


def test_an_interval_ends_where_the_fit_does_however_noisy_a_probe_is() -> None:
    """`make demo` once ended with a memory of 70.8 B/s at least, which no device may have."""
    node, chosen = two_cores(), probes("stream")
    run = measured(node, chosen)
    run.samples["stream-bf16-1MB-b1"] = [
        run.samples["stream-bf16-1MB-b1"][0] * factor for factor in (1e-12, 1e-6, 1.0, 1e6, 1e12)
    ]
    fit = fit_node(node, chosen, run, lambda said: None)
    widest = math.exp(2 * REACH)  # from one end of the reach to the other
    for path, number in fit.numbers.items():
        assert number.low is not None
        assert number.high is not None
        assert (
            number.value / widest
            <= number.low
            <= number.value
            <= number.high
            <= number.value * widest
        ), path
    apply_fit(node, fit.numbers)


def test_a_run_without_a_probe_is_refused() -> None:
    node = two_cores()
    with pytest.raises(CalibrationError, match=r"lacks the probe .*probe again"):
        fit_node(node, probes(), measured(node, probes()[1:]), lambda said: None)


def test_a_run_older_than_a_probe_is_fitted_without_it() -> None:
    node, some = two_cores(), probes("launch", "sample", "turns")
    *rest, newest = some
    found = measured(node, rest)
    run = stored_run("host", "older", {"steps": dict.fromkeys(found.samples, 1)}, found.samples)
    said: list[str] = []
    fit = fit_node(node, some, run, said.append)
    assert set(fit.residuals) == {probe.name for probe in rest}
    assert any(newest.name in line for line in said)


def test_a_run_comes_back_as_it_was_stored() -> None:
    run = stored_run(
        "host", "test", {"device": "host", "quick": True}, {"a": [1e-3, 2e-3], "b": [3.5e-6]}
    )
    again = store.read_run(run.folder)
    assert (again.id, again.meta, again.samples) == (run.id, run.meta, run.samples)


def test_a_folder_without_samples_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="is not a run"):
        store.read_run(tmp_path / "nothing")


def test_a_fit_serves_only_the_processor_that_made_it() -> None:
    fitted = {"handoff.hop_s": Number(7e-7, Kind.FITTED, "test", 6e-7, 8e-7)}
    store.write_fit("host", fitted, {"cpu": store.cpu_name(), "run": "test"})
    assert calibrated_node("2xhost").device.handoff.hop_s == fitted["handoff.hop_s"]
    other = (
        {"cpu": "another", "run": "test"},
        {"cpu": store.cpu_name(), "cores": 0.5, "run": "of a part of the cores"},
    )
    for meta in other:
        store.write_fit("host", fitted, meta)
        assert calibrated_node("2xhost").device.handoff.hop_s.kind is not Kind.FITTED


def test_quiet_ignores_what_other_processes_added() -> None:
    assert quiet(np.array([1.0, 1.0, 1.0, 9.0])) == 1.0


def test_the_middle_repeat_counts(tmp_path: Path) -> None:
    assert settled(store.Run(tmp_path, {}, {"a": [2.0, 1.0, 5.0, 3.0, 1.0]})) == {"a": 2.0}


GB, MB = 1e9, 10**6
# (what the system says of the L3, what it keeps, what one core keeps of it)
CACHES = [(480 * 2**20, 40 * MB, 40 * MB), (480 * 2**20, 300 * MB, 16 * MB), (2**20, 24 * MB, 1e9)]


@pytest.mark.slow  # of the curve alone: test_knee.py
@pytest.mark.parametrize(("said", "kept", "by_one"), CACHES)
def test_streams_find_the_cache_and_what_lies_behind_whatever_the_system_says(
    said: float, kept: float, by_one: float
) -> None:
    """The system of a virtual machine said 480 MiB: all probes lay below, and none reached
    memory.
    """
    node = apply_fit(
        two_cores(),
        {
            "llc.capacity_bytes": Number(said, Kind.DATASHEET, "the system"),
            "llc.block_bytes": Number(said, Kind.ASSUMED, "the system"),
            "block.on_chip_bytes": Number(2 * 2**20, Kind.DATASHEET, "test"),
            "l2.block_bytes": Number(2 * 2**20, Kind.DATASHEET, "test"),
            "l2.capacity_bytes": Number(4 * 2**20, Kind.DATASHEET, "test"),
        },
    )
    true = {
        "llc.capacity_bytes": kept,
        "llc.block_bytes": by_one,
        "llc.block_bytes_per_s": 18 * GB,
        "llc.bytes_per_s": 80 * GB,
        "block.load_bytes_per_s": 9 * GB,
        "memory.stream_bytes_per_s": 15 * GB,
        "kernel.bf16_bytes_per_s": 30 * GB,
        "kernel.row_s": 3e-9,
        "l2.bytes_per_s": 200 * GB,
    }
    made = apply_fit(
        node, {path: Number(value, Kind.MEASURED, "test") for path, value in true.items()}
    )
    chosen = [
        p
        for p in host_probes(limits_of(node), 2, node.device, quick=True)
        if p.name.startswith(("stream-bf16", "rows"))
    ]
    random = np.random.default_rng(3)
    samples = {
        p.name: (step_s(made, p) * np.exp(0.02 * random.standard_normal(5))).tolist()
        for p in chosen
    }
    run = stored_run("host", "test", {"device": "host"}, samples)
    known = apply_fit(node, fit_node(node, chosen, run, lambda said: None).numbers)
    for probe in chosen:
        for path in ("block.load_bytes_per_s", "memory.stream_bytes_per_s"):
            assert _value(known, path) == pytest.approx(true[path], rel=0.1), path
        assert step_s(known, probe) == pytest.approx(step_s(made, probe), rel=0.15), probe.name


def _value(node: Node, path: str) -> float:
    return numbers(node)[f"device.{path}"].value


@pytest.mark.parametrize("said", [0.0, 2**20, 105 * 2**20, 480 * 2**20, 4 * 2**30])
@pytest.mark.parametrize("memory", [1e9, 8e9, 512e9])
def test_streams_reach_beyond_the_last_cache_within_a_part_of_the_memory(
    said: float, memory: float
) -> None:
    device = apply_fit(
        two_cores(),
        {
            "llc.capacity_bytes": Number(max(1.0, said), Kind.DATASHEET, "test"),
            "memory.capacity_bytes": Number(memory, Kind.DATASHEET, "test"),
        },
    ).device
    sizes = footprints(device, quick=False, engines=2)
    assert sizes == sorted(set(sizes))
    assert sum(sizes) * 2 <= memory
    if memory > 16 * max(3 * said, 384 * MB):
        assert sizes[-1] >= 3 * said - MB
        assert sizes[-1] >= 384 * MB


@pytest.mark.slow
def test_each_kind_of_code_that_a_core_decodes_has_a_probe_that_finds_its_rate() -> None:
    node = two_cores()
    chosen = [
        p for p in host_probes(limits_of(node), 2, node.device, quick=True) if p.group == "codes"
    ]
    kinds = {family(form.name) for form in DECODED.values()}
    assert {p.name for p in chosen} == {f"codes-{kind}" for kind in kinds}
    rates = {f"kernel.{kind}_bytes_per_s": 1e8 * (2 + at) for at, kind in enumerate(sorted(kinds))}
    made = apply_fit(
        node, {path: Number(value, Kind.MEASURED, "test") for path, value in rates.items()}
    )
    samples = {p.name: [step_s(made, p)] * 3 for p in chosen}
    fit = fit_node(node, chosen, stored_run("host", "test", {}, samples), lambda said: None)
    for path, rate in rates.items():
        assert fit.numbers[path].value == pytest.approx(rate, rel=0.02), path
