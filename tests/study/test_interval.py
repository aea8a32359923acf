"""Intervals: what is drawn stays inside what is known, and is the same hardware for every cell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from twin.calibrate.node import calibrated_node
from twin.calibrate.store import read_fit
from twin.hardware.derive import QUEUE
from twin.hardware.load import load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import SPREAD, apply_fit, interval, numbers
from twin.study.hardware import drawable, with_settings
from twin.study.interval import WIDTHS, Draws, about, chance, mechanism, settings, summary, uniforms

DRAWS = Draws(64, 7)
NODES = ("8xh200", "8xmi300x", "8xmi455x", "8xrubin-r200")


@pytest.mark.parametrize("name", NODES)
def test_draws_stay_in_the_range_and_reach_most_of_it(name: str) -> None:
    node = load_node(name)
    drawn = [dict(one) for one in settings(node, DRAWS)]
    for path, number in numbers(node).items():
        if (
            not drawable(path)
            or path not in drawn[0]
            or (number.like and number.like.rule == QUEUE)
        ):
            continue  # a wait in the queue is added to an idle time that is drawn too
        low, high = interval(number)
        values = np.array([float(one[path]) for one in drawn])
        slack = 1e-9 * high
        at_most = max(
            high, max(float(one.get(path.replace("loaded_hop_s", "hop_s"), 0)) for one in drawn)
        )
        assert low - slack <= values.min(), path
        assert values.max() <= at_most + slack, path
        if low > 0 and not path.endswith("stream_bytes_per_s"):
            assert np.median(values) == pytest.approx(number.value, rel=0.05 * high / low), path


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NODES)
def test_every_draw_is_a_possible_node(name: str) -> None:
    node = load_node(name)
    for one in settings(node, DRAWS):
        made = with_settings(node, one)
        assert (
            made.device.memory.stream_bytes_per_s.value <= made.device.memory.peak_bytes_per_s.value
        )
        assert made.link
        assert made.link.loaded_hop_s.value >= made.link.hop_s.value
        assert made.device.structure == node.device.structure
        assert made.device.memory.capacity_bytes == node.device.memory.capacity_bytes


def test_same_seed_same_draws_other_seed_others() -> None:
    node = load_node("8xh200")
    assert settings(node, DRAWS) == settings(node, DRAWS)
    assert settings(node, DRAWS) != settings(node, replace(DRAWS, seed=8))


def test_cells_on_one_device_see_the_same_hardware() -> None:
    one, eight = (dict(settings(load_node(name), DRAWS)[5]) for name in ("1xh200", "8xh200"))
    assert one.items() <= eight.items()


def test_mechanisms_move_together_and_the_rest_alone() -> None:
    assert (
        mechanism("link.loaded_hop_s")
        == mechanism("link.hop_s")
        != mechanism("device.handoff.hop_s")
    )
    assert mechanism("device.handoff.loaded_hop_s") == mechanism("device.handoff.hop_s")
    assert (
        mechanism("device.kernel.bf16_bytes_per_s")
        == mechanism("device.kernel.fp16_bytes_per_s")
        != mechanism("device.kernel.kv_bytes_per_s")
    )
    assert mechanism("device.launch.stream_s") == mechanism("device.launch.graph_edge_s")
    assert mechanism("device.memory.latency_s") == "device.memory.latency_s"


def test_each_stratum_is_drawn_once() -> None:
    found = uniforms("anything", DRAWS)
    assert sorted(np.floor(found * DRAWS.draws)) == list(range(DRAWS.draws))


def test_carrier_is_found_and_chance_is_not() -> None:
    node = load_node("8xh200")
    hops = uniforms(f"{node.device.name} link.hop_s", DRAWS)
    found = summary(node, DRAWS, 950.0, list(1000 - 100 * hops), numbers(node), new=0.0)
    assert found.p10 < 950.0 < found.p90
    name, correlation = found.carried_by[0]
    assert (name, round(correlation, 6)) == ("link.hop_s", -1.0)
    assert len(found.carried_by) == 1
    assert summary(node, DRAWS, 5.0, [5.0] * 64, numbers(node), new=0.0).carried_by == ()
    other = summary(
        node, DRAWS, 950.0, list(1000 - 100 * hops), ["device.memory.latency_s"], new=0.0
    )
    assert other.carried_by == ()
    wider = summary(node, DRAWS, 950.0, list(1000 - 100 * hops), numbers(node), new=0.1)
    assert wider.p10 < found.p10 * 0.99
    assert wider.p90 > found.p90 * 1.01


def test_a_number_whose_draws_resemble_a_carriers_is_not_named() -> None:
    """Whatever two columns of the draws have in common is explained once."""
    node = load_node("8xh200")
    first, second = (
        uniforms(f"{node.device.name} {name}", DRAWS)
        for name in ("link.hop_s", "device.memory.latency_s")
    )
    both = summary(
        node, DRAWS, 950.0, list(1000 - 100 * first - 60 * second), numbers(node), new=0.0
    ).carried_by
    assert {name for name, _ in both} == {"link.hop_s", "device.memory.latency_s"}


def test_more_numbers_and_fewer_draws_make_chance_larger() -> None:
    assert chance(64, 1) < chance(64, 20) < chance(16, 20) < chance(8, 20) < 1
    # tables of Spearman's rho, two-sided 5%
    assert chance(100, 1) == pytest.approx(0.197, abs=0.001)


def test_a_prediction_lies_inside_the_interval_of_its_draws() -> None:
    assert about(100.0, [70.0, 80.0, 90.0], 0.0) == (pytest.approx(72.0), 100.0)
    assert about(100.0, [110.0, 120.0, 130.0], 0.0) == (100.0, pytest.approx(128.0))


def test_a_number_known_exactly_is_not_drawn() -> None:
    node = apply_fit(
        load_node("1xh200"), {"device.memory.latency_s": Number(5e-7, Kind.ASSUMED, "what-if")}
    )
    assert "device.memory.latency_s" not in dict(settings(node, DRAWS)[0])


def test_every_kind_has_a_width_and_a_reason() -> None:
    assert set(WIDTHS) == set(SPREAD) == set(Kind)


def test_numbers_of_a_fit_are_drawn_as_its_bootstrap_drew_them() -> None:
    """Each draw takes one row of the fit for all of its numbers: parts of a sum keep the sum."""
    node = calibrated_node("1xh200")
    fit = read_fit(node.device.name)
    assert fit is not None
    rows = np.array(list(fit[1]["together"].values())).T
    paths = [f"device.{path}" for path in fit[1]["together"]]
    known = numbers(node)
    # others are held possible
    free = [
        at
        for at, path in enumerate(paths)
        if not path.endswith(("stream_bytes_per_s", "loaded_hop_s"))
    ]
    for one in map(dict, settings(node, DRAWS)):
        factors = np.array([float(one[paths[at]]) / known[paths[at]].value for at in free])
        assert np.isclose(rows[:, free], factors, rtol=1e-9).all(axis=1).any()


def test_what_follows_a_fit_is_drawn_with_it() -> None:
    """A B200's cycles in a draw are an H200's in the same draw, by a factor that all numbers of the
    rule share.
    """
    h200, b200 = calibrated_node("8xh200"), calibrated_node("8xb200")
    its, mine = settings(h200, DRAWS), settings(b200, DRAWS)
    clocks = b200.device.block.clock_hz.value / h200.device.block.clock_hz.value
    for one, other in zip(its, mine, strict=True):
        there, here = ({path: float(value) for path, value in draw} for draw in (one, other))
        cost = here["device.kernel.stage_s"] / there["device.kernel.stage_s"] * clocks
        assert 0.65 - 1e-9 <= cost <= 1.5 + 1e-9
        for path, faster in (("item_s", False), ("bf16_bytes_per_s", True)):
            ratio = here[f"device.kernel.{path}"] / there[f"device.kernel.{path}"]
            assert clocks * (1 / ratio if faster else ratio) == pytest.approx(cost)
        assert here["device.handoff.loaded_hop_s"] >= here["device.handoff.hop_s"]


@pytest.mark.parametrize("name", ["1xh200", "8xmi300x"])
def test_a_what_if_beyond_the_datasheet_lies_within_its_draws(name: str) -> None:
    """What a user sets is meant: draws lie about it, not below what the part's datasheet says."""
    node = with_settings(calibrated_node(name), [("device.memory.stream_bytes_per_s", "x1.3")])
    path = "device.memory.stream_bytes_per_s"
    own = numbers(node)
    assert own[path].value > own["device.memory.peak_bytes_per_s"].value
    drawn = np.array([float(dict(one)[path]) for one in settings(node, DRAWS)])
    p10, p90 = np.quantile(drawn, (0.1, 0.9))
    assert p10 < own[path].value < p90
