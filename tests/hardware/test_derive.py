"""What nobody measured on a part follows the part that was measured, by rules that a test can work
out by hand.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from twin.calibrate.node import calibrated, calibrated_node, following
from twin.calibrate.store import HOME_VARIABLE, write_fit
from twin.data import data_dir, read_yaml
from twin.errors import HardwareError
from twin.hardware.derive import FOLLOWS, IDLE, QUEUE, followed
from twin.hardware.load import load_device, read_device
from twin.hardware.number import Kind, Number
from twin.hardware.override import numbers, with_number
from twin.hardware.types import Device

FOLLOWERS = ["b200", "b300", "mi300x", "mi325x", "mi355x", "mi455x", "rubin-r200"]
H200 = load_device("h200-sxm")


@cache
def best(name: str) -> Device:
    """With fits: reading one takes a tenth of a second. Of a part that follows another, what its
    own fit, if any, begins with.
    """
    return calibrated(load_device(name)) if name == H200.name else following(load_device(name))


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_a_block_costs_follows_the_measured_part(name: str) -> None:
    device = load_device(name)
    assert followed(device) == ["h200-sxm"]
    known = numbers(device)
    for path in (
        "kernel.stage_s",
        "kernel.tile_s",
        "kernel.round_s",
        "kernel.unit_s",
        "kernel.gather_bytes_per_s",
        "handoff.loaded_hop_s",
        "l2.loaded_latency_s",
    ):
        number = known[path]
        assert number.kind is Kind.ASSUMED, path
        assert number.source.startswith("derived: as h200-sxm ("), path


def test_the_measured_part_follows_none() -> None:
    assert followed(H200) == []
    assert set(numbers(H200)) >= set(FOLLOWS)


@pytest.mark.parametrize("name", FOLLOWERS)
def test_the_same_cycles_take_less_time_at_a_higher_clock(name: str) -> None:
    device, fitted = best(name), best("h200-sxm")
    clocks = fitted.block.clock_hz.value / device.block.clock_hz.value
    assert device.kernel.stage_s.value == pytest.approx(fitted.kernel.stage_s.value * clocks)
    assert device.kernel.item_s.value == pytest.approx(fitted.kernel.item_s.value * clocks)


def test_rates_fall_as_the_latency_of_the_exchange_grows() -> None:
    """MI300X: through the Infinity Cache, 218 ns; an H200's second-level cache 142 ns: both by
    pointer chases.
    """
    device, fitted = best("mi300x"), best("h200-sxm")
    assert device.kernel.gather_bytes_per_s.value == pytest.approx(
        fitted.kernel.gather_bytes_per_s.value * 142 / 218
    )


def test_a_hop_follows_the_latency_of_the_cache_that_it_goes_through() -> None:
    device, fitted = best("b200"), best("h200-sxm")
    assert device.handoff.hop_s.value == pytest.approx(fitted.handoff.hop_s.value * 150 / 142)


def test_a_barrier_takes_what_was_measured() -> None:
    """B300REF: 0.81 to 0.96 us on 148 blocks of a B300: two hops, the farthest blocks', and the
    arrivals."""
    device = best("b300")
    hop, arrival = device.handoff.hop_s.value, device.handoff.atomic_s.value
    barrier = 2 * (hop + device.handoff.cross_die_s.value) + device.blocks * arrival
    assert barrier == pytest.approx(0.9e-6, rel=0.12)


def test_dies_exchange_through_the_cache_that_all_of_them_see() -> None:
    mi300x, b200 = load_device("mi300x"), load_device("b200")
    assert mi300x.exchange == mi300x.llc
    assert b200.exchange == b200.l2  # no cache behind those of its dies
    assert H200.exchange == H200.l2


@pytest.mark.parametrize("name", FOLLOWERS)
@pytest.mark.parametrize(("loaded", "idle"), IDLE.items())
def test_the_same_queue_costs_the_same_wait(name: str, loaded: str, idle: str) -> None:
    known, fitted = numbers(best(name)), numbers(best("h200-sxm"))
    wait = max(0.0, fitted[loaded].value - fitted[idle].value)
    assert known[loaded].value - known[idle].value == pytest.approx(wait, abs=1e-15)


def test_a_wider_share_of_the_stream_takes_larger_copies_and_a_narrower_one_the_same() -> None:
    rubin, mi300x, fitted = (best(name) for name in ("rubin-r200", "mi300x", "h200-sxm"))
    assert rubin.kernel.copy_s.value == pytest.approx(
        fitted.kernel.copy_s.value * (4.61 / 132) / (20 / 224)
    )
    assert mi300x.kernel.copy_s.value == fitted.kernel.copy_s.value


def test_what_a_file_says_itself_stays() -> None:
    mi300x = load_device("mi300x")
    assert mi300x.kernel.fp16_bytes_per_s.value == 47e9
    assert mi300x.kernel.fp16_bytes_per_s.like is None
    assert mi300x.handoff.fence_s is None  # in the measured hops and barriers


def test_a_new_fit_moves_its_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    before = calibrated_node("8xb200").device
    assert before == load_device("b200")  # no fit in that folder: the files
    doubled = 2 * H200.kernel.stage_s.value
    write_fit(
        "h200-sxm",
        {"kernel.stage_s": Number(doubled, Kind.FITTED, "fit of a test", doubled, doubled)},
        {"run": "a test"},
    )
    after = calibrated_node("8xb200").device
    assert after.kernel.stage_s.value == pytest.approx(2 * before.kernel.stage_s.value)
    assert "fit of a test" in after.kernel.stage_s.source
    assert after.kernel.row_s == before.kernel.row_s
    assert after.kernel.stage_s.like
    assert after.kernel.stage_s.like.fitted


def test_a_factor_keeps_what_a_number_follows_and_a_value_ends_it() -> None:
    device = load_device("b200")
    assert (
        with_number(device, "kernel.stage", "x0.5").kernel.stage_s.like
        == device.kernel.stage_s.like
    )
    assert with_number(device, "kernel.stage", "0.3 us").kernel.stage_s.like is None


@pytest.fixture
def b200() -> dict[str, Any]:
    return read_yaml(data_dir("hwmodels") / "devices" / "b200.yaml")


def _read(data: dict[str, Any], folder: Path) -> Device:
    path = folder / "b200.yaml"
    path.write_text(yaml.safe_dump(data))
    return read_device(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("device", "h21", "like.device: unknown device 'h21'"),
        ("device", "b300", "itself like another part"),
        ("device", "b200", "itself like another part"),
        ("low", "x1.2", "0 < low <= 1 <= high"),
        ("high", "x0.9", "0 < low <= 1 <= high"),
        ("low", "0.7", "must be a factor, such as 'x0.7'"),
        ("low", "xx", "must be a factor"),
        ("low", None, "like.low: missing"),
        ("width", "x2", "like.width: unknown key"),
        ("without", ["memory.latency_s"], "'memory.latency_s' follows nothing"),
        ("without", "handoff.fence_s", "like.without: 'handoff.fence_s' must be a list"),
    ],
)
def test_a_wrong_likeness_names_the_file_and_the_key(
    b200: dict[str, Any], tmp_path: Path, key: str, value: object, message: str
) -> None:
    b200["like"] = {**b200["like"], key: value}
    if value is None:
        del b200["like"][key]
    with pytest.raises(HardwareError, match=r"b200\.yaml") as error:
        _read(b200, tmp_path)
    assert message in str(error.value)


def test_without_a_likeness_nothing_may_be_left_out(b200: dict[str, Any], tmp_path: Path) -> None:
    del b200["like"]
    with pytest.raises(HardwareError, match=r"kernel, handoff.hop_s: missing"):
        _read(b200, tmp_path)


def test_a_loaded_time_has_its_idle_one() -> None:
    assert {path for path, rule in FOLLOWS.items() if rule == QUEUE} == set(IDLE)
