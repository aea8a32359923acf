"""Pieces of a source are found by their words, not by their layout."""

from __future__ import annotations

import pytest

from twin.bench.pieces import replaced
from twin.errors import ConfigError

SOURCE = "int a(int first,\n      int second) {\n  return first +\n         second;\n}\n"


def test_a_piece_is_found_however_its_lines_are_broken() -> None:
    made = replaced(SOURCE, "  return first + second;\n", "  return second;\n")
    assert made == "int a(int first,\n      int second) {\n  return second;\n\n}\n"


@pytest.mark.parametrize("piece", ["first", "return firstly"])
def test_a_piece_that_is_not_there_once_is_refused(piece: str) -> None:
    with pytest.raises(ConfigError, match="times, not once"):
        replaced(SOURCE, piece, "")


def test_two_words_are_not_one() -> None:
    with pytest.raises(ConfigError, match="0 times"):
        replaced("returnfirst", "return first", "")
