"""Text for terminals: columns line up, shares add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twin.report.tables import BAR_SIGNS, bar, count, facts, percent, table

CELLS = st.one_of(st.none(), st.integers(), st.text(alphabet="abcdefg ", max_size=12))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=6))
def test_columns_line_up(rows: list[tuple[object, object, object]]) -> None:
    lines = table(("first", "second", "third"), rows).split("\n")
    assert len(lines) == len(rows) + 2
    assert max(len(line) for line in lines) == len(lines[1])


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    assert table(("stage", "us"), [("a", 1), ("bc", 100)]).splitlines() == [
        "stage   us",
        "-----  ---",
        "a        1",
        "bc     100",
    ]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-9, 1e3), min_size=1, max_size=8))
def test_bar_is_as_long_as_the_whole(parts: dict[str, float]) -> None:
    drawn, legend = bar(parts, width=40).splitlines()
    assert len(drawn) == 42
    assert all(name in legend for name in parts)
    assert set(drawn[1:-1]) <= {*BAR_SIGNS, " "}


def test_bar_of_nothing_is_empty() -> None:
    assert bar({"a": 0.0}) == ""


def test_numbers_for_people() -> None:
    assert (count(3806.9), count(3.918), percent(0.4598), percent(-0.189, signed=True)) == (
        "3,807",
        "3.92",
        "46.0%",
        "-18.9%",
    )
    assert facts([("a", 1), ("bcd", "x")]) == "a    1\nbcd  x"
