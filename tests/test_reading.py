"""Plain data as typed values: every mistake of a file at once, each with its place, value and
limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from tests.draws import CHARACTERS, drawn
from twin.data import data_dir, read_yaml
from twin.errors import ConfigError, HardwareError
from twin.hardware.load import read_device
from twin.reading import (
    LONGEST_WRONG,
    MOST_WRONG,
    SOME,
    Check,
    FieldError,
    Parse,
    one_of,
    quantity,
    read,
)


def even(value: int) -> None:
    if value % 2:
        raise ConfigError(f"{value} must be even")


@dataclass(frozen=True, slots=True)
class Inner:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise FieldError("low", f"{self.low} is above high, {self.high}")


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    count: Annotated[int, Meta(ge=1, le=8), Check(even)]
    inner: Inner
    inners: Annotated[tuple[Inner, ...], SOME] = ()
    word: Literal["left", "right"] = "left"
    by_name: dict[str, float] | None = None
    mixed: str | Inner = ""
    call_s: Annotated[float, quantity(0.0, 1.0)] = 0.0
    known: Annotated[str, one_of(lambda: ["alpha", "beta"])] = ""
    text: Annotated[int, Parse(lambda data, at: int(data))] = 0


GOOD: dict[str, Any] = {"name": "n", "count": 2, "inner": {"low": 1, "high": 2}}


def refusal(changes: dict[Any, Any]) -> str:
    data = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    with pytest.raises(HardwareError) as error:
        read(data, Outer, "a.yaml", refusal=HardwareError)
    assert str(error.value).startswith("a.yaml: ")
    assert str(error.value).isprintable()
    return str(error.value)


def test_what_is_right_becomes_the_type() -> None:
    made = read(
        GOOD
        | {
            "inners": [{"low": 0, "high": 0}],
            "mixed": {"low": 1, "high": 1},
            "by_name": {"a": 1},
            "call_s": "3 us",
            "known": "beta",
            "text": "7",
        },
        Outer,
        "a.yaml",
    )
    assert made.inners == (Inner(0, 0),)
    assert made.mixed == Inner(1, 1)
    assert made.by_name == {"a": 1.0}
    assert (made.call_s, made.known, made.text) == (3e-6, "beta", 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 9}, "count: 9 must be a whole number, 1 to 8"),
        ({"count": True}, "count: True must be a whole number, 1 to 8"),
        ({"count": 3}, "count: 3 must be even"),
        ({"name": " \t"}, "name: ' \\t' must be a line of text, not empty"),
        ({"name": "a\x1b[2J"}, "must be a line of text"),
        ({"name": "x" * 20_000}, "must be text of at most 10,000 characters"),
        ({"nmae": "n"}, "nmae: unknown key; did you mean name"),
        ({1: 2}, "top level: key 1 must be text"),
        ({"inner": [1]}, "inner: must be a mapping with low, high, not [1]"),
        ({"inner": {"low": 3, "high": 2}}, "inner.low: 3 is above high, 2"),
        ({"inners": []}, "inners: [] must be a list, with at least one entry"),
        ({"inners": [{"low": 1}]}, "inners[0].high: missing; add it"),
        ({"word": "lfet"}, "word: 'lfet' is unknown; did you mean left? allowed: left, right"),
        ({"by_name": {"a": "b"}}, "by_name.a: 'b' must be a number"),
        ({"mixed": [1]}, "mixed: must be a mapping with low, high, not [1]"),
        ({"mixed": 1}, "mixed: 1 must be text"),
        ({"call_s": "2 s"}, "call_s: '2 s' is out of range; give 0 s to 1 s"),
        ({"call_s": 2}, "call_s: 2 must be text with its unit"),
        ({"known": "alpa"}, "known: 'alpa' is unknown; did you mean alpha?"),
        ({"name": ..., "count": ...}, "name, count: missing; add it"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_limit(
    changes: dict[Any, Any], message: str
) -> None:
    assert message in refusal(changes)


def test_all_mistakes_are_listed_at_once() -> None:
    inner = {"low": "x", "hgih": 1}
    message = refusal(
        {"name": ..., "count": 9, "inner": inner, "word": "up", "by_name": {"a": None}}
    )
    for part in (
        "name, inner.high: missing",
        "count: 9",
        "inner.low: 'x'",
        "inner.hgih: unknown key",
        "word: 'up'",
        "by_name.a: None",
    ):
        assert part in message


def test_keys_that_no_field_has_can_be_left_unread() -> None:
    assert read(GOOD | {"more": 1}, Outer, "a.json", others=True) == read(GOOD, Outer, "a.json")


def test_a_table_s_cells_are_numbers_where_a_field_is_one() -> None:
    assert read({"low": "1", "high": "2"}, Inner, "a.csv", strict=False) == Inner(1, 2)


def test_a_refusal_is_bounded_however_much_is_wrong() -> None:
    wrong = {f"key{i}": i for i in range(5000)}
    message = refusal(wrong)
    assert "4984 more unknown keys" in message
    assert len(message) < 2 * LONGEST_WRONG
    many = {f"{name}-{word}": 1 for name in Outer.__slots__ for word in "abc"}
    assert refusal(many).count("unknown key") <= MOST_WRONG


TEXTS = st.text(CHARACTERS, max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(CHARACTERS, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=5), inner)
    ),
    max_leaves=8,
)


@drawn(100)
@given(st.dictionaries(st.sampled_from([*GOOD, "inners", "word", "mixed", "known"]), PLAIN))
def test_any_plain_data_are_read_or_refused_in_a_line(data: dict[str, Any]) -> None:
    message = ""
    try:
        assert isinstance(read(data, Outer, "a.yaml"), Outer)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()


def test_eleven_missing_keys_of_a_device_are_listed_in_one_refusal(tmp_path: Path) -> None:
    data: Any = read_yaml(data_dir("hwmodels") / "devices" / "h200-sxm.yaml")
    data["kernel"] = read_yaml(data_dir("calibration") / "kernels" / "stated" / "h200-sxm.yaml")
    gone = [
        *(("kernel", name) for name in ["row_s", "stage_s", "element_s", "kv_bytes_per_s"]),
        *(("memory", name) for name in ["latency_s", "peak_bytes_per_s", "capacity_bytes"]),
        *(("kernel", name) for name in ["copy_s", "tile_s", "settle_s"]),
    ]
    for section, name in gone:
        del data[section][name]
    del data["handoff"]["hop_s"]["source"]
    file = tmp_path / "h200-sxm.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(HardwareError, match="missing; add it") as error:
        read_device(file)
    for path in (*(f"{section}.{name}" for section, name in gone), "handoff.hop_s.source"):
        assert path in str(error.value)
