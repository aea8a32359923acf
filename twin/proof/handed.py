"""Rounds whose blocks hand numbers on one by one (native/platform/cuda_handed.cuh): does nobody
read what is left of an earlier layer, and is nothing erased that somebody has yet to read?

A word says by itself whether it is there, so it must have been erased before anybody looks for what
is written next, and only behind all who read what stood there. Blocks learn of each other only by
what they read. `handed_on` makes the blocks' events in the order of the kernel and compares what
each knows: an event comes behind another where a chain of reads says so, however long a block naps.
Four blocks stand for all: two that share a KV head, one that has another, and one without; some of
them make no rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from itertools import product

from twin.frozen import frozen
from twin.kernel.prompt import INPUTS
from twin.proof.violation import Violation

BLOCKS = range(4)
GROUPS = ((0, 1), (2,))  # of a KV head each
# who makes words of it; inputs come with squares of every block
MAKERS = {"heads": (0, 3), "fed": (0, 2)}
LAYERS, ROUNDS = 2, 2
WHERE = "a round's hand-offs"


@frozen(kw_only=True)
class Rules:
    """How the kernel hands on; tests plant other ways."""

    places: int = INPUTS  # of inputs, in turn
    waits: bool = True  # inputs are published behind what the block erased before
    squares: bool = True  # those of every block are read with inputs
    behind: int = 1  # inputs are erased when those so many turns later have been read
    outputs_at: str = "feed"  # heads, parts and outputs are erased when a stage has read inputs


@frozen
class _Seen:
    """What is known of a content of a place."""

    makers: list[int] = field(default_factory=list)  # blocks
    readers: list[int] = field(default_factory=list)  # events
    erased: list[int] = field(default_factory=list)


class _Walk:
    """Events in an order that is possible; `before` has a bit for each that comes before one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.before: list[int] = []
        self.last = dict.fromkeys(BLOCKS, -1)  # each block's consumers
        self.house = dict.fromkeys(BLOCKS, -1)  # its scheduler warp
        self.contents: dict[tuple[str, int], dict[int, _Seen]] = {}  # by place and turn
        self.made: dict[tuple[str, int, int], list[int]] = {}
        self.wrong: list[str] = []

    def event(self, *after: int) -> int:
        known = 0
        for one in after:
            if one >= 0:
                known |= self.before[one] | 1 << one
        self.before.append(known)
        return len(self.before) - 1

    def behind(self, late: int, early: int) -> bool:
        return bool(self.before[late] >> early & 1)

    def content(self, value: str, place: int, turn: int) -> _Seen:
        return self.contents.setdefault((value, place), {}).setdefault(turn, _Seen())

    def stale(self, at: int, value: str, place: int, turn: int) -> bool:
        """May what stood there before still stand there, as event `at` knows it?"""
        turns = self.contents.get((value, place), {})
        earlier = [number for number in turns if number < turn]
        if not earlier:  # erased before the first round, at which all meet
            return False
        erased = turns[max(earlier)].erased
        return not erased or not all(self.behind(at, one) for one in erased)

    def publish(self, block: int, value: str, place: int, turn: int) -> None:
        at = self.last[block] = self.event(self.last[block])
        self.made.setdefault((value, place, turn), []).append(at)
        self.content(value, place, turn).makers.append(block)
        if self.stale(at, value, place, turn):
            self.wrong.append(f"{value} of turn {turn} may be erased behind their publication")

    def read(self, block: int, value: str, place: int, turn: int) -> None:
        poll = self.event(self.last[block])
        if self.stale(poll, value, place, turn):
            self.wrong.append(f"{value} of turn {turn}: a block may find those of an earlier turn")
        self.last[block] = self.event(poll, *self.made.get((value, place, turn), []))
        self.content(value, place, turn).readers.append(self.last[block])

    def erase(self, block: int, value: str, place: int, turn: int) -> None:
        """Words are shared among all blocks, whoever made them; parts have one that does."""
        there = self.contents.get((value, place), {}).get(turn)
        if there is None or (value == "parts" and block not in there.makers):
            return
        self.house[block] = self.event(self.house[block], self.last[block])
        there.erased.append(self.house[block])

    def wait(self, block: int) -> None:
        if self.rules.waits:
            self.last[block] = self.event(self.last[block], self.house[block])

    def meet(self) -> None:
        all_here = self.event(*self.last.values())
        self.last = {block: self.event(all_here) for block in BLOCKS}

    # ---- a round ---------------------------------------------------------------------------------

    def inputs(self, turn: int) -> tuple[str, int, int]:
        return "inputs", turn % self.rules.places, turn

    def read_inputs(self, turn: int, layer: int, stage: str) -> None:
        for block in BLOCKS:
            self.read(block, *self.inputs(turn))
        for block in BLOCKS:
            gone = turn - self.rules.behind
            if gone > 0:
                self.erase(block, *self.inputs(gone))
            if stage == self.rules.outputs_at and layer >= 0:
                self.erase(block, "outputs", 0, layer)
                for value in ("heads", "parts"):
                    self.erase(block, value, 0, layer)
            if stage != "feed" and layer > 0:
                self.erase(block, "fed", 0, layer - 1)

    def put_inputs(self, turn: int, *, adds: bool = True) -> None:
        """`adds`: to the residual, which lies with the inputs before."""
        for block in BLOCKS:
            if adds:
                self.read(block, *self.inputs(turn - 1))
            if self.rules.squares or block != BLOCKS[-1]:  # a block without rows
                self.wait(block)
                self.publish(block, *self.inputs(turn))

    def put(self, value: str, layer: int) -> None:
        for block in MAKERS[value]:
            self.publish(block, value, 0, layer)

    def attend(self, layer: int, together: bool) -> None:
        """`together`: several blocks look at a KV head's cache, and share its outputs."""
        lookers = [group if together else group[:1] for group in GROUPS]
        for group in lookers:
            for block in group:
                self.read(block, "heads", 0, layer)
                if together:
                    self.publish(block, "parts", 0, layer)
        for group in lookers:
            for block in group:
                if together:
                    self.read(block, "parts", 0, layer)
                self.publish(block, "outputs", 0, layer)

    def run(self, together: tuple[bool, ...]) -> None:
        turn = layer = 0
        for _ in range(ROUNDS):
            turn += 1
            self.put_inputs(turn, adds=False)
            for _ in range(LAYERS):
                self.read_inputs(turn, layer, "qkv")
                self.put("heads", layer)
                self.attend(layer, together[layer])
                for block in BLOCKS:
                    self.read(block, "outputs", 0, layer)
                turn += 1
                self.put_inputs(turn)
                self.read_inputs(turn, layer, "feed")
                self.put("fed", layer)
                for block in BLOCKS:
                    self.read(block, "fed", 0, layer)
                turn += 1
                self.put_inputs(turn)
                layer += 1
            self.read_inputs(turn, layer, "head")
            self.meet()
        for (value, _), turns in self.contents.items():
            for number, seen in turns.items():
                for erased in seen.erased:
                    if not all(self.behind(erased, reader) for reader in seen.readers):
                        self.wrong.append(
                            f"{value} of turn {number} are erased before all have read them"
                        )


def handed_on(rules: Rules = Rules()) -> Iterator[Violation]:  # noqa: B008  # frozen
    """The first rule that the hand-offs of some rounds break."""
    for together in product((False, True), repeat=LAYERS * ROUNDS):
        walk = _Walk(rules)
        walk.run(together)
        if walk.wrong:
            yield Violation("drafts", WHERE, walk.wrong[0])
            return
