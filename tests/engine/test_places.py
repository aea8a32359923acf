"""Where blocks ran, from what the kernel says; which dies share an I/O die, from hops between
them.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from twin.engine.places import Places, io_dies_of
from twin.errors import EngineError

PAIRS = ((0, 5), (1, 4), (2, 7), (3, 6))  # not the neighbours that one might suppose


def hops(within_s: float, between_s: float) -> dict[tuple[int, int], float]:
    return {
        pair: within_s if pair in PAIRS else between_s + 1e-9 * sum(pair)
        for pair in combinations(range(8), 2)
    }


def test_dies_with_the_shortest_hops_share_an_io_die() -> None:
    found = io_dies_of(hops(1e-6, 1.1e-6))
    assert found is not None
    assert sorted(found) == list(range(8))
    assert all(found[a] == found[b] for a, b in PAIRS)
    assert len(set(found.values())) == 4


def test_hops_that_are_all_alike_tell_nothing() -> None:
    assert io_dies_of(hops(1e-6, 1.01e-6)) is None
    assert io_dies_of(hops(1.2e-6, 1.1e-6)) is None
    assert io_dies_of({(0, 1): 1e-6}) is None
    some = hops(1e-6, 1.1e-6)
    del some[2, 5]
    assert io_dies_of(some) is None


def test_a_table_says_only_what_was_found() -> None:
    places = Places((3, 0, 3, 1))
    assert places.blocks_of_die == {0: 1, 1: 1, 3: 2}
    assert not places.round_robin
    assert places.table({3: 1, 0: 0}) == [(0, 3, 1), (1, 0, 0), (2, 3, 1), (3, 1, None)]
    assert places.pair_on(3, 3) == (0, 2)
    assert places.pair_on(0, 1) == (1, 3)
    assert places.pair_on(0, 2) is None


def test_neighbours_share_a_die_where_no_die_comes_twice() -> None:
    assert Places((0, 0, 2, 2, 2, 1)).neighbours
    assert not Places((0, 0, 2, 0)).neighbours


def test_blocks_that_say_nothing_or_too_much_are_refused() -> None:
    with pytest.raises(EngineError, match="1 blocks, the first is 1, did not say"):
        Places((0, -1)).check(8)
    with pytest.raises(EngineError, match="ran on 3 dies, where this GPU has 2"):
        Places((0, 1, 2)).check(2)
