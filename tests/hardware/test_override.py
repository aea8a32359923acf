from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import every
from twin.errors import HardwareError
from twin.hardware.load import load_device, load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import (
    IDLE,
    apply_fit,
    interval,
    numbers,
    resolve,
    with_number,
    with_numbers,
)
from twin.hardware.schema import limits
from twin.units import stem, unit_of

NODE = load_node("8xmi300x")
DEVICE = load_device("h200")
PATHS = sorted(numbers(NODE))


@given(st.sampled_from(PATHS), st.floats(0.5, 2.0))
def test_one_number_changes_and_nothing_else_but_what_is_behind_it(
    path: str, factor: float
) -> None:
    value = (
        max(1.0, round(numbers(NODE)[path].value * factor))
        if not unit_of(path.rpartition(".")[2])
        else numbers(NODE)[path].value * factor
    )
    changed = numbers(with_number(NODE, path, value, Kind.FITTED, "test"))
    assert changed.pop(path) == Number(value, Kind.FITTED, "test")
    follows = {f"device.{loaded}" for loaded, idle in IDLE.items() if f"device.{idle}" == path} | {
        "device.block.load_latency_s"
    }
    assert {p: n for p, n in changed.items() if p not in follows} == {
        p: n for p, n in numbers(NODE).items() if p not in {path, *follows}
    }


@pytest.mark.parametrize(("loaded", "idle"), IDLE.items())
@pytest.mark.parametrize("factor", ["x0", "x0.1", "x0.5", "x1", "x3", "x100"])
def test_a_better_idle_time_leaves_the_wait_behind_the_stream(
    loaded: str, idle: str, factor: str
) -> None:
    """Bytes in flight do not know what comes behind them: otherwise the queue would cost more after
    each improvement.
    """
    before, after = (numbers(device) for device in (DEVICE, with_number(DEVICE, idle, factor)))
    assert after[idle].value == pytest.approx(before[idle].value * float(factor[1:]))
    assert after[loaded].value - after[idle].value == pytest.approx(
        before[loaded].value - before[idle].value
    )
    low, value, high = after[loaded].low, after[loaded].value, after[loaded].high
    assert low is not None
    assert high is not None
    assert low <= value <= high


def test_a_better_latency_leaves_the_bytes_in_flight() -> None:
    """They are what a block streams alone times the latency, and say what it can stream from a
    cache that is closer.
    """
    changed = with_number(with_number(DEVICE, "memory.latency", "x0.5"), "memory.latency", "x0.5")
    assert changed.block.load_latency_s is not None
    assert changed.block.load_latency_s.value == DEVICE.memory.latency_s.value
    assert changed.memory.latency_s.value == DEVICE.memory.latency_s.value / 4


def test_a_loaded_time_that_is_set_as_well_is_what_it_is_said_to_be() -> None:
    for changes in permutations([("handoff.hop", "0.1 us"), ("handoff.loaded_hop", "0.4 us")]):
        changed = with_numbers(DEVICE, changes).handoff
        assert changed.loaded_hop_s is not None
        assert (changed.hop_s.value, changed.loaded_hop_s.value) == pytest.approx((1e-7, 4e-7))


@given(st.sampled_from(PATHS))
def test_a_fit_of_all_present_numbers_changes_nothing(path: str) -> None:
    assert apply_fit(NODE, {path: numbers(NODE)[path]}) == NODE
    assert apply_fit(NODE, numbers(NODE)) == NODE


@every("path", sorted(numbers(DEVICE)))
def test_a_path_may_omit_its_unit(path: str) -> None:
    head, _, leaf = path.rpartition(".")
    assert resolve(DEVICE, f"{head}.{stem(leaf)}") == path


@pytest.mark.parametrize(
    "path", ["handoff.hop_s", "device.handoff.hop_s", "handoff.hop", "device.handoff.hop"]
)
def test_a_node_and_its_device_take_the_same_paths(path: str) -> None:
    assert with_number(NODE, path, "0.5 us").device.handoff.hop_s.value == 0.5e-6
    assert with_number(NODE.device, path, "0.5 us").handoff.hop_s.value == 0.5e-6


def test_the_link_is_not_the_hand_off() -> None:
    assert resolve(NODE, "link.hop") == "link.hop_s"


@pytest.mark.parametrize(
    ("text", "factor"),
    [("x1.1", 1.1), ("x 2", 2.0), ("*0.5", 0.5), ("+10%", 1.1), ("-20%", 0.8), ("+ 5 %", 1.05)],
)
def test_factors_scale_the_range_too(text: str, factor: float) -> None:
    old, new = (
        DEVICE.memory.stream_bytes_per_s,
        with_number(DEVICE, "memory.stream", text).memory.stream_bytes_per_s,
    )
    assert new.value == pytest.approx(old.value * factor)
    assert new.low == pytest.approx((old.low or 0) * factor)
    assert (new.kind, new.source) == (Kind.ASSUMED, "what-if")


@every(
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
        ("memory.stream", "0.000001 B/s"),
        ("memory.stream", "1e300 B/s"),
        ("memory.stream", "1e999 B/s"),
        ("memory.stream", "x1e300"),
        ("memory.stream", "x1e999"),
        ("memory.stream", "x" + "9" * 5000),
        ("memory.stream", "+" + "9" * 5000 + "%"),
        ("memory.stream", "9" * 5000 + " B/s"),
        ("memory.stream", "x²"),
        ("memory.stream", "x٣"),
        ("memory.stream", "x1_0"),
        ("memory.stream", "٣ TB/s"),
        ("memory.stream", "² TB/s"),
        ("memory.stream", "xinf"),
        ("memory.stream", "+nan%"),
        ("kernel.stage", "1000000 s"),
        ("kernel.stage", 1.001),
        ("kernel.element", "2 ms"),
        ("block.on_chip_bytes", "2 GB"),
        ("structure.io_dies", 1e30),
        ("structure.io_dies", "1e30"),
        ("structure.io_dies", "65"),
        ("structure.blocks_per_die", "5000"),
        ("structure.dies", "64"),  # of 132 blocks each
    ],
)
def test_a_senseless_value_is_refused(path: str, value: str | float) -> None:
    with pytest.raises(HardwareError, match=r"memory\.stream|structure|block|kernel") as error:
        with_number(DEVICE, path, value)
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()


@every("path", PATHS)
def test_every_number_has_a_range_and_both_ends_are_refused_beyond(path: str) -> None:
    """And no shipped number, nor what is believed about it, comes near an end."""
    least, most = limits(path)
    number = numbers(NODE)[path]
    assert 10 * least <= number.value <= most / 3 or not unit_of(path.rsplit(".", 1)[-1])
    for beyond in (least * 0.999 - 1e-9, most * 1.001):
        with pytest.raises(HardwareError, match=path.replace(".", r"\.")):
            with_number(NODE, path, beyond)


def test_the_message_says_value_limit_and_next_step() -> None:
    with pytest.raises(
        HardwareError,
        match=r"memory\.stream_bytes_per_s: value 0\.001 B/s is out of range; give 1 MB/s to 1000 "
        r"PB/s, such as",
    ):
        with_number(DEVICE, "memory.stream", "0.001 B/s")


def test_a_hand_off_may_be_free() -> None:
    assert with_number(DEVICE, "handoff.hop", "0 s").handoff.hop_s.value == 0


@pytest.mark.parametrize(
    "path", ["memory.steam", "stream", "", "device", "memory", "fabric.hop_s", "link.hop_s", "name"]
)
def test_an_unknown_path_lists_the_closest(path: str) -> None:
    with pytest.raises(HardwareError, match="has no number"):
        with_number(DEVICE, path, "1 us")


def test_a_typo_gets_the_right_suggestion() -> None:
    with pytest.raises(HardwareError, match=r"did you mean memory\.stream_bytes_per_s"):
        with_number(DEVICE, "memory.steam_bytes_per_s", "1 TB/s")


def test_a_kind_can_be_given_by_name() -> None:
    assert (
        with_number(DEVICE, "memory.stream", "4 TB/s", "vendor", "x").memory.stream_bytes_per_s.kind
        is Kind.VENDOR
    )
    with pytest.raises(HardwareError, match="not a kind"):
        with_number(DEVICE, "memory.stream", "4 TB/s", "guess", "x")


def test_a_fit_that_cannot_be_is_refused() -> None:
    with pytest.raises(HardwareError, match="low <= value <= high"):
        apply_fit(DEVICE, {"handoff.hop_s": Number(1e-6, Kind.FITTED, "x", 2e-6, 3e-6)})


@every("path", PATHS)
def test_an_interval_holds_its_value(path: str) -> None:
    number = numbers(NODE)[path]
    low, high = interval(number)
    assert low <= number.value <= high


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("hop", "handoff.hop_s or device.handoff.loaded_hop_s"),
        ("memory.bandwidth", "memory.stream_bytes_per_s"),
        ("memory.stram", "memory.stream_bytes_per_s"),
    ],
)
def test_a_number_that_is_not_there_is_answered_with_those_that_may_be_meant(
    said: str, meant: str
) -> None:
    with pytest.raises(HardwareError, match=f"did you mean .*{meant}"):
        resolve(load_node("1xh200"), said)
