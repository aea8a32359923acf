from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.errors import ConfigError
from twin.units import (
    format_quantity,
    format_range,
    parse_count,
    parse_quantity,
    picoseconds,
    stem,
    unit_of,
)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4.8 TB/s", "B/s", 4.8e12),
        ("256 KiB", "B", 256 * 1024),
        ("1.98 GHz", "Hz", 1.98e9),
        ("0.35 us", "s", 0.35e-6),
        ("0.35 µs", "s", 0.35e-6),
        ("288 GB", "B", 288e9),
        ("1GiB", "B", 2**30),
        ("750 W", "W", 750.0),
        ("132", "", 132.0),
        ("0 s", "s", 0.0),
        ("1e-3 s", "s", 1e-3),
    ],
)
def test_quantities_are_in_base_units(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("4.8 TB", "B/s"),
        ("4.8", "B/s"),
        ("-1 s", "s"),
        ("nan s", "s"),
        ("inf s", "s"),
        ("1e999 s", "s"),
        ("1 parsec", "s"),
        ("", "s"),
        ("1 2 s", "s"),
        ("5 x", ""),
        ("1 s", "m"),
    ],
)
def test_a_wrong_quantity_is_refused(text: str, unit: str) -> None:
    with pytest.raises(ConfigError):
        parse_quantity(text, unit)


def test_a_wrong_unit_names_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="TB/s"):
        parse_quantity("4.8 Tbit/s", "B/s")


@given(st.floats(min_value=1e-11, max_value=1e15), st.sampled_from(["B", "B/s", "Hz", "s", "W"]))
def test_what_is_shown_can_be_read_back(value: float, unit: str) -> None:
    scaled = value if unit == "s" else value + 1
    assert parse_quantity(format_quantity(scaled, unit), unit) == pytest.approx(scaled, rel=0.006)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (4.61e12, "B/s", "4.61 TB/s"),
        (1.2e-6, "s", "1.2 us"),
        (262144, "B", "256 KiB"),
        (288e9, "B", "288 GB"),
        (0, "s", "0 s"),
        (132, "", "132"),
        (1.98e9, "Hz", "1.98 GHz"),
        (999.9e-9, "s", "1 us"),
        (2000, "W", "2 kW"),
    ],
)
def test_people_see_three_digits(value: float, unit: str, shown: str) -> None:
    assert format_quantity(value, unit) == shown


@given(st.floats(min_value=0, max_value=1e15), st.booleans())
def test_a_family_of_units_is_kept_whatever_the_value(value: float, binary: bool) -> None:
    shown = format_quantity(value, "B", binary=binary)
    assert ("i" in shown) == (binary and abs(value) >= 1023.5)
    assert parse_quantity(shown, "B") == pytest.approx(value, rel=0.006, abs=0.5)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(10.8e12, 17.2e12, "10.8 .. 17.2 TB/s"), (283e-12, 1.13e-9, "283 ps .. 1.13 ns"), (5, 5, "")],
)
def test_a_range_names_a_unit_once_where_both_ends_have_it(
    low: float, high: float, shown: str
) -> None:
    assert format_range(low, high, "s" if low < 1 else "B/s") == shown


@given(st.integers(0, 10**12))
def test_whole_picoseconds_survive(ps: int) -> None:
    assert picoseconds(ps * 1e-12) == ps


@pytest.mark.parametrize("seconds", [1e300, -1.0, float("nan"), float("inf")])
def test_only_a_time_becomes_picoseconds(seconds: float) -> None:
    with pytest.raises(ConfigError):
        picoseconds(seconds)


def test_units_follow_from_field_names() -> None:
    names = [
        "stream_bytes_per_s",
        "bytes_per_s",
        "on_chip_bytes",
        "clock_hz",
        "hop_s",
        "tdp_w",
        "dies",
        "stacks",
        "blocks_per_die",
    ]
    assert [unit_of(n) for n in names] == ["B/s", "B/s", "B", "Hz", "s", "W", "", "", ""]
    assert [stem(n) for n in names[2:5]] == ["on_chip", "clock", "hop"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("4,096", 4096),
        ("1_000_000", 10**6),
        ("1e5", 10**5),
        ("1.5e3", 1500),
        ("128k", 128_000),
        ("128K", 131_072),
        ("128Ki", 131_072),
        ("1.5k", 1500),
        ("-1", -1),
    ],
)
def test_a_count_is_read_as_people_write_it(text: str, count: int) -> None:
    assert parse_count(text) == count


@given(st.integers(-(10**18), 10**18))
def test_a_count_with_commas_is_the_same(count: int) -> None:
    assert parse_count(f"{count:,}") == parse_count(str(count)) == count


@pytest.mark.parametrize("text", ["", "many", "12.5", "4,09", "1,2345", "0x10", "1e-3", "k", "²"])
def test_what_is_no_whole_number_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number; write 4096"):
        parse_count(text)
