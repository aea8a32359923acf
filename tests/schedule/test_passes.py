"""How a prompt pass is divided over blocks."""

from __future__ import annotations

from tests.rows import every
from twin.schedule.passes import sharing

BLOCKS, CHUNK = 132, 1024  # of an H200; tokens of a pass


@every("tokens", range(1, CHUNK + 1, 37))
def test_no_block_makes_a_fifth_more_than_its_share(tokens: int) -> None:
    members, tiles, together = sharing(tokens, CHUNK, BLOCKS)
    assert members * tiles <= 1.2 * -(-tokens // together)


def test_the_last_blocks_take_no_more_shares_than_the_others() -> None:
    """Six of 132 blocks are left when seven share, and two when five do: one of them would take
    two of seven tiles, or three of five. Of eight that share four are left: two tiles each, of half
    as many rows.
    """
    assert sharing(7 * 128, CHUNK, BLOCKS) == (4, 2, 128)
    assert sharing(5 * 128, CHUNK, BLOCKS) == (6, 1, 128)
    assert sharing(7 * 128, CHUNK, 7) == (7, 1, 128)
