"""Where the blocks of an AMD GPU run: compute dies (XCDs) as the kernel reads them from its
registers, and I/O dies as hand-offs between compute dies distinguish them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from twin.errors import EngineError

CLEAR = 1.05  # times as long a hop to another I/O die must take, in the mean

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Of one GPU's blocks."""

    dies: tuple[int, ...]  # by block of the plan, all ranks of the GPU one after the other

    @property
    def blocks_of_die(self) -> dict[int, int]:
        return dict(sorted(Counter(self.dies).items()))

    @property
    def round_robin(self) -> bool:
        """Do neighbours take the dies in turn, as flat plans suppose?"""
        first = list(dict.fromkeys(self.dies))
        return all(die == first[at % len(first)] for at, die in enumerate(self.dies))

    @property
    def neighbours(self) -> bool:
        """Are the blocks of each die neighbours, as plans by die suppose?"""
        return len(list(groupby(self.dies))) == len(set(self.dies))

    def check(self, dies: int) -> None:
        """Raises EngineError unless every block said on which of `dies` it ran."""
        silent = [block for block, die in enumerate(self.dies) if die < 0]
        if silent:
            raise EngineError(
                f"{len(silent)} blocks, the first is {silent[0]}, did not say on which die they "
                "ran; report this"
            )
        if len(set(self.dies)) > dies:
            raise EngineError(
                f"blocks ran on {len(set(self.dies))} dies, where this GPU has {dies}: is it "
                "partitioned?"
            )

    def table(self, io_dies: Mapping[int, int] | None = None) -> list[tuple[int, int, int | None]]:
        """(block, die, I/O die) of every block; None where hand-offs have not shown it."""
        known = io_dies or {}
        return [(block, die, known.get(die)) for block, die in enumerate(self.dies)]

    def pair_on(self, a: int, b: int) -> Pair | None:
        """Two different blocks, one on each die; None where there are none."""
        one = next((block for block, die in enumerate(self.dies) if die == a), None)
        other = next(
            (block for block, die in enumerate(self.dies) if die == b and block != one), None
        )
        return None if one is None or other is None else (one, other)


def io_dies_of(hops: Mapping[Pair, float]) -> dict[int, int] | None:
    """I/O die of each compute die, two to an I/O die, from the seconds of a hop between each two of
    them: the pairing with the shortest hops within. None where it is not clear or a hop is missing.
    """
    dies = sorted({die for pair in hops for die in pair})
    seconds = {frozenset(pair): taken for pair, taken in hops.items()}
    if len(dies) % 2 or len(dies) < 4 or len(seconds) < len(dies) * (len(dies) - 1) // 2:
        return None
    best = min(_pairings(dies), key=lambda pairs: sum(seconds[frozenset(pair)] for pair in pairs))
    within = [seconds[frozenset(pair)] for pair in best]
    inside = {frozenset(pair) for pair in best}
    between = [taken for pair, taken in seconds.items() if pair not in inside]
    if min(between) <= max(within) or statistics.mean(between) < CLEAR * statistics.mean(within):
        return None
    return {die: io for io, pair in enumerate(sorted(best)) for die in pair}


def _pairings(dies: list[int]) -> Iterator[list[Pair]]:
    """Every way to put them in pairs: 105 of eight."""
    if not dies:
        yield []
        return
    first, rest = dies[0], dies[1:]
    for at, other in enumerate(rest):
        for pairs in _pairings(rest[:at] + rest[at + 1 :]):
            yield [(first, other), *pairs]
