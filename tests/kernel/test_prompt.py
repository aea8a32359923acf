"""How a prompt pass is divided over blocks."""

from __future__ import annotations

import pytest

from twin.kernel.prompt import sharing

BLOCKS, CHUNK = 132, 1024  # of an H200; tokens of a pass


@pytest.mark.parametrize("tokens", range(1, CHUNK + 1, 37))
def test_no_block_makes_a_fifth_more_than_its_share(tokens: int) -> None:
    members, tiles, together = sharing(tokens, CHUNK, BLOCKS)
    assert members * tiles <= 1.2 * -(-tokens // together)


def test_of_seven_tiles_none_takes_two() -> None:
    """Six of 132 blocks are left when seven share: one of them would take two."""
    assert sharing(7 * 128, CHUNK, BLOCKS) == (8, 1, 128)
    assert sharing(7 * 128, CHUNK, 7) == (7, 1, 128)
