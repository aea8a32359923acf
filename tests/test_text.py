"""Values in messages."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from twin.text import shown


@pytest.mark.parametrize(
    "value",
    [
        "a",
        "it's",
        3,
        -1.5,
        True,
        None,
        [],
        {},
        [1, "b"],
        (1, 2),
        {"a": [1, {"b": 2}]},
        {3},
        b"x",
        float("nan"),
    ],
)
def test_a_short_value_is_shown_as_repr_writes_it(value: object) -> None:
    assert shown(value) == repr(value)


def test_a_path_and_a_date_are_shown_by_what_they_say() -> None:
    assert shown(Path("a/b")) == "'a/b'"
    long = shown(Path("folder") / ("a" * 100) / "name")
    assert (long[0], long[-8:], len(long)) == ("…", "aa/name'", 80)
    assert shown(date(2026, 1, 2)) == "datetime.date(2026, 1, 2)"


def test_what_is_shown_never_exceeds_the_limit() -> None:
    long: list[object] = [
        "x" * 10**6,
        10**5000,
        -(10**5000),
        list(range(10**6)),
        {"k" * 99: 1},
        b"x" * 10**6,
        [["x" * 70] * 2],
    ]
    for value in long:
        assert len(shown(value)) <= 80
        assert len(shown(value, 20)) <= 20
        assert len(shown(value, 10**5)) <= 10**5


def test_what_is_left_out_is_marked() -> None:
    assert shown("x" * 100, 10) == "'xxxxxxxx…"
    assert shown(10**5000) == "<integer of 16610 bits>"


@pytest.mark.parametrize(
    "sign", ["\x1b[2J", "\n", "\r", "\x00", "\x7f", "\x9b", "\u202e", "\u2028", "\ud800", "\u200b"]
)
def test_no_control_character_reaches_the_terminal(sign: str) -> None:
    for value in (
        sign,
        [sign],
        {sign: sign},
        (sign,),
        sign.encode("utf-8", "surrogatepass"),
        Path(f"a{sign}b"),
    ):
        assert shown(value).isprintable()
        shown(value).encode("utf-8")


def test_shared_and_endless_data_take_no_longer() -> None:
    bomb: Any = "lol"
    for _ in range(60):
        bomb = [bomb] * 9  # 9^60 leaves
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(10**5):
        deep = [deep]
    for value in (bomb, endless, deep, {"key": bomb}):
        assert len(shown(value)) == 80
        assert len(shown(value, 10**4)) <= 10**4
    # dismantled by hand: a deep list may overflow the stack when it is freed
    while isinstance(deep, list):
        deep = deep.pop()
