"""Marked blocks of a page: found, filled, stamped; everything else stays."""

from __future__ import annotations

import pytest

from studies.common.blocks import Block, Stamp, blocks, filled
from twin.errors import ConfigError

PAGE = """# A page

<!-- made: speeds columns=1,3 -->
old
<!-- end -->
between
<!-- made: figure fit=before inputs=abc -->
<!-- end -->
"""
STAMP = Stamp("2026-11-22T161133-probes", "0123456789ab")


def body(block: Block) -> str:
    return f"{block.name} {block.places('columns')}"


def test_a_block_is_filled_and_stamped_and_the_rest_stays() -> None:
    made = filled(PAGE, body, STAMP)
    assert (
        "<!-- made: speeds columns=1,3 fit=2026-11-22T161133-probes inputs=0123456789ab -->\n"
        "speeds [0, 2]\n<!-- end -->" in made
    )
    assert (
        "<!-- made: figure fit=2026-11-22T161133-probes inputs=0123456789ab -->\nfigure None\n"
        "<!-- end -->" in made
    )
    assert made.startswith("# A page\n")
    assert "\nbetween\n" in made
    assert "old" not in made


def test_filling_twice_changes_nothing() -> None:
    once = filled(PAGE, body, STAMP)
    assert filled(once, body, STAMP) == once


def test_a_block_that_no_script_has_written_has_no_stamp() -> None:
    first, second = blocks(PAGE)
    assert first.stamp is None
    assert second.stamp == Stamp("before", "abc")
    assert dict(first.choices) == {"columns": "1,3"}


def test_a_word_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'columns' is not key=value"):
        list(blocks("<!-- made: speeds columns -->\n<!-- end -->\n"))
