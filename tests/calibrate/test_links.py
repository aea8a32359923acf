"""Links: what probes of several GPUs settle, and who else's links are assumed to be like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calibrate.pretended import step_s
from twin.calibrate import store
from twin.calibrate.fit import fit_node
from twin.calibrate.node import calibrated_node, fits_of, other_links, uncalibrated_node
from twin.calibrate.peer_probes import peer_probes
from twin.calibrate.recipe import link_groups, recipe_of
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.schedule.ring import limits_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path / "calibration"))


def fitted(value: float) -> Number:
    return Number(value, Kind.FITTED, "test", value / 2, value * 2)


@pytest.mark.slow
def test_probes_of_two_gpus_settle_their_links_numbers(tmp_path: Path) -> None:
    node = uncalibrated_node("2xh100")
    hidden = {"link.hop_s": 0.8e-6, "link.spread_s": 0.5e-6, "link.fence_s": 2.2e-6}
    real = apply_fit(node, {path: fitted(value) for path, value in hidden.items()})
    wanted = ("hop-g2", "reduce-2K-g2", "reduce-8K-g2", "reduce-16K-g2", "reduce-counter-2K-g2")
    probes = [p for p in peer_probes(limits_of(node), 2) if p.name.removeprefix("peer-") in wanted]
    assert len(probes) == len(wanted)
    samples = {probe.name: [step_s(real, probe)] * 3 for probe in probes}
    meta = {"node": node.name, "steps": {probe.name: probe.steps for probe in probes}}
    run = store.save_run(tmp_path / "run", meta, samples)
    fit = fit_node(node, probes, run, lambda text: None)
    for path, value in hidden.items():
        assert fit.numbers[path].value == pytest.approx(value, rel=0.05), path
    assert "link.loaded_hop_s" not in fit.numbers  # nothing streamed


@pytest.mark.slow
def test_probes_of_four_gpus_settle_what_two_cannot_on_top_of_what_they_did(tmp_path: Path) -> None:
    store.write_fit("2xh100-sxm", {"link.hop_s": fitted(9e-7), "link.spread_s": fitted(5e-7)}, {})
    node = uncalibrated_node("4xh100")
    hidden = {"link.peer_s": 0.2e-6, "link.fence_s": 2.2e-6}
    real = apply_fit(node, {path: fitted(value) for path, value in hidden.items()})
    wanted = ("hop-g4", "reduce-2K-g4", "reduce-16K-g4", "reduce-counter-2K-g4")
    probes = [p for p in peer_probes(limits_of(node), 4) if p.name.removeprefix("peer-") in wanted]
    assert len(probes) == len(wanted)
    samples = {probe.name: [step_s(real, probe)] * 3 for probe in probes}
    meta = {"node": node.name, "steps": {probe.name: probe.steps for probe in probes}}
    run = store.save_run(tmp_path / "run", meta, samples)
    fit = fit_node(node, probes, run, lambda text: None)
    assert set(fit.numbers) == set(hidden)
    for path, value in hidden.items():
        assert fit.numbers[path].value == pytest.approx(value, rel=0.05), path


def test_links_that_nobody_probed_are_as_those_that_somebody_did() -> None:
    store.write_fit("2xh100-sxm", {"link.hop_s": fitted(9e-7), "link.spread_s": fitted(4e-7)}, {})
    eight, other = calibrated_node("8xh100"), calibrated_node("4xh200")
    assert eight.link is not None
    assert other.link is not None
    assert (eight.link.hop_s.value, eight.link.hop_s.kind) == (9e-7, Kind.ASSUMED)
    assert eight.link.hop_s.source.startswith("derived: as 2xh100-sxm")
    # measured there: it stays
    assert other.link.hop_s == load_node("4xh200").link.hop_s  # type: ignore[union-attr]
    assert other.link.spread_s.value == 4e-7
    assert other_links(eight) == other_links(other) == "2xh100-sxm"
    assert other_links(calibrated_node("2xh100")) is other_links(calibrated_node("1xh100")) is None
    assert fits_of(other) == {"2xh100-sxm": {"link.spread_s"}}


def test_on_another_link_the_same_kernel_pushes_alike_and_hops_are_its_own() -> None:
    store.write_fit("2xh200-sxm", {"link.hop_s": fitted(7e-7), "link.spread_s": fitted(9e-7)}, {})
    before, link = load_node("8xb200").link, calibrated_node("8xb200").link
    assert before
    assert link
    assert link.hop_s == before.hop_s
    assert link.spread_s.value == 9e-7
    assert link.spread_s.source == "derived: as 2xh200-sxm (test)"


def test_a_fit_of_its_own_holds_where_there_is_one() -> None:
    store.write_fit("2xh100-sxm", {"link.spread_s": fitted(4e-7)}, {})
    store.write_fit("4xh100-sxm", {"link.spread_s": fitted(5e-7)}, {})
    assert calibrated_node("4xh100").link.spread_s == fitted(5e-7)  # type: ignore[union-attr]
    assert other_links(calibrated_node("8xh100")) == "4xh100-sxm"


def test_a_larger_nodes_fit_comes_on_top_of_a_smaller_ones() -> None:
    two = {"link.spread_s": fitted(4e-7), "link.fence_s": fitted(2e-6)}
    store.write_fit("2xh100-sxm", two, {})
    store.write_fit("4xh100-sxm", {"link.peer_s": fitted(3e-7), "link.fence_s": fitted(3e-6)}, {})
    pair, four, eight = (calibrated_node(f"{gpus}xh100") for gpus in (2, 4, 8))
    for node in (four, eight):
        assert node.link is not None
        assert (node.link.spread_s.value, node.link.spread_s.kind) == (4e-7, Kind.ASSUMED)
        assert (node.link.peer_s.value, node.link.fence_s.value) == (3e-7, 3e-6)
    assert (four.link.peer_s.kind, eight.link.peer_s.kind) == (Kind.FITTED, Kind.ASSUMED)  # type: ignore[union-attr]
    # what the larger one says of a rank comes from its own probes, not to the smaller one
    assert pair.link.peer_s == load_node("2xh100").link.peer_s  # type: ignore[union-attr]
    assert list(fits_of(pair)) == ["2xh100-sxm"]
    assert list(fits_of(four)) == list(fits_of(eight)) == ["2xh100-sxm", "4xh100-sxm"]
    assert other_links(eight) == "4xh100-sxm"
    assert other_links(four) is None
    # a fit of four leaves fences to its own probes
    begin, filed = uncalibrated_node("4xh100").link, load_node("4xh100").link
    assert begin is not None
    assert filed is not None
    assert (begin.spread_s.value, begin.fence_s) == (4e-7, filed.fence_s)


def test_a_link_is_calibrated_where_an_engine_of_several_gpus_runs() -> None:
    nodes = [load_node(name) for name in ("2xh100", "2xmi300x")]
    assert recipe_of(nodes[0].device, 2).groups == link_groups(2)
    with pytest.raises(CalibrationError, match="links are probed between NVIDIA GPUs"):
        recipe_of(nodes[1].device, 2)
