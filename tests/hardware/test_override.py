from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.errors import HardwareError
from twin.hardware.load import load_device, load_node
from twin.hardware.override import apply_fit, interval, numbers, resolve, with_number
from twin.hardware.types import Kind, Number
from twin.units import stem

NODE = load_node("8xmi300x")
DEVICE = load_device("h200")
PATHS = sorted(numbers(NODE))


@given(st.sampled_from(PATHS), st.floats(0.5, 2.0))
def test_one_number_changes_and_nothing_else(path: str, factor: float) -> None:
    value = max(1.0, round(numbers(NODE)[path].value * factor)) if ".structure." in path else numbers(NODE)[path].value * factor
    changed = numbers(with_number(NODE, path, value, Kind.FITTED, "test"))
    assert changed.pop(path) == Number(value, Kind.FITTED, "test")
    assert changed == {p: n for p, n in numbers(NODE).items() if p != path}


@given(st.sampled_from(PATHS))
def test_a_fit_of_all_present_numbers_changes_nothing(path: str) -> None:
    assert apply_fit(NODE, {path: numbers(NODE)[path]}) == NODE
    assert apply_fit(NODE, numbers(NODE)) == NODE


@pytest.mark.parametrize("path", sorted(numbers(DEVICE)))
def test_a_path_may_omit_its_unit(path: str) -> None:
    head, _, leaf = path.rpartition(".")
    assert resolve(DEVICE, f"{head}.{stem(leaf)}") == path


@pytest.mark.parametrize("path", ["handoff.hop_s", "device.handoff.hop_s", "handoff.hop", "device.handoff.hop"])
def test_a_node_and_its_device_take_the_same_paths(path: str) -> None:
    assert with_number(NODE, path, "0.5 us").device.handoff.hop_s.value == 0.5e-6
    assert with_number(NODE.device, path, "0.5 us").handoff.hop_s.value == 0.5e-6


def test_the_link_is_not_the_hand_off() -> None:
    assert resolve(NODE, "link.hop") == "link.hop_s"


@pytest.mark.parametrize(("text", "factor"), [("x1.1", 1.1), ("x 2", 2.0), ("*0.5", 0.5), ("+10%", 1.1), ("-20%", 0.8), ("+ 5 %", 1.05)])
def test_factors_scale_the_range_too(text: str, factor: float) -> None:
    old, new = DEVICE.memory.stream_bytes_per_s, with_number(DEVICE, "memory.stream", text).memory.stream_bytes_per_s
    assert new.value == pytest.approx(old.value * factor)
    assert new.low == pytest.approx((old.low or 0) * factor)
    assert (new.kind, new.source) == (Kind.ASSUMED, "what-if")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("memory.stream", "0 TB/s"),
        ("memory.stream", -1.0),
        ("memory.stream", "-100%"),
        ("memory.stream", float("nan")),
        ("memory.stream", float("inf")),
        ("memory.stream", "x"),
        ("memory.stream", "x-1"),
        ("memory.stream", "xnan"),
        ("memory.stream", "+a%"),
        ("memory.stream", "5 us"),
        ("memory.stream", "5"),
        ("structure.blocks_per_die", "x1.01"),
        ("block.clock", 0),
    ],
)
def test_a_senseless_value_is_refused(path: str, value: str | float) -> None:
    with pytest.raises(HardwareError, match=r"memory\.stream_bytes_per_s|structure|block"):
        with_number(DEVICE, path, value)


def test_a_hand_off_may_be_free() -> None:
    assert with_number(DEVICE, "handoff.hop", "0 s").handoff.hop_s.value == 0


@pytest.mark.parametrize("path", ["memory.steam", "stream", "", "device", "memory", "fabric.hop_s", "link.hop_s", "name"])
def test_an_unknown_path_lists_the_closest(path: str) -> None:
    with pytest.raises(HardwareError, match="has no number"):
        with_number(DEVICE, path, "1 us")


def test_a_typo_gets_the_right_suggestion() -> None:
    with pytest.raises(HardwareError, match=r"did you mean memory\.stream_bytes_per_s"):
        with_number(DEVICE, "memory.steam_bytes_per_s", "1 TB/s")


def test_a_kind_can_be_given_by_name() -> None:
    assert with_number(DEVICE, "memory.stream", "4 TB/s", "vendor", "x").memory.stream_bytes_per_s.kind is Kind.VENDOR
    with pytest.raises(HardwareError, match="not a kind"):
        with_number(DEVICE, "memory.stream", "4 TB/s", "guess", "x")


def test_a_fit_that_cannot_be_is_refused() -> None:
    with pytest.raises(HardwareError, match="low <= value <= high"):
        apply_fit(DEVICE, {"handoff.hop_s": Number(1e-6, Kind.FITTED, "x", 2e-6, 3e-6)})


@pytest.mark.parametrize("path", PATHS)
def test_an_interval_holds_its_value(path: str) -> None:
    number = numbers(NODE)[path]
    low, high = interval(number)
    assert low <= number.value <= high
