"""How knowledge spreads in the proof: the quick way equals the plain one, and layers that are alike
are looked at once.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from tests.proof.tiny import plan_of, tiny
from twin.plan.matrix import Span
from twin.plan.options import CollectiveKind, HandOffKind, Sampling
from twin.proof.happens_before import NEVER, _lesson_of, _Machine, _plan_sentinel_checks, _touched

SEEDS = st.integers(0, 2**32 - 1)


def some_spans(chance: random.Random, elements: int) -> tuple[Span, ...]:
    edges = sorted(chance.sample(range(elements + 1), 2 * chance.randrange(3)))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def some_owners(chance: random.Random, blocks: int, elements: int) -> tuple[Span, ...]:
    """In order or not, with owners of nothing: also what a wrong plan says."""
    spans = [
        tuple(sorted((chance.randrange(elements + 1), chance.randrange(elements + 1))))
        for _ in range(blocks)
    ]
    return tuple((lo, hi) for lo, hi in spans)


@drawn(60)
@given(SEEDS)
def test_a_reader_touches_the_owners_of_its_elements(seed: int) -> None:
    chance = random.Random(seed)
    blocks, elements = chance.randrange(1, 40), chance.randrange(4, 30)
    owned = some_owners(chance, blocks, elements)
    spans = tuple(some_spans(chance, elements) for _ in range(blocks))
    touched = _touched(spans, owned)
    for reader, mine in enumerate(spans):
        polled = {element for lo, hi in mine for element in range(lo, hi)}
        assert touched[reader].tolist() == [not polled.isdisjoint(range(*span)) for span in owned]


@drawn(60)
@given(SEEDS)
def test_a_reader_learns_what_its_writers_know_together(seed: int) -> None:
    chance = random.Random(seed)
    blocks = chance.randrange(1, 12)
    polled = np.array([[chance.random() < 0.3 for _ in range(blocks)] for _ in range(blocks)])
    if chance.random() < 0.3:
        polled[:] = polled[0]
    known, before = (
        np.array(
            [[chance.randrange(NEVER, 50) for _ in range(blocks)] for _ in range(blocks)], np.int16
        )
        for _ in "ab"
    )
    after = before.copy()
    lesson = _lesson_of(polled)
    if lesson is not None:
        lesson.teach(after, lesson.latest(known))
    for reader in range(blocks):
        for about in range(blocks):
            learned = [
                int(known[writer, about]) for writer in range(blocks) if polled[reader, writer]
            ]
            assert after[reader, about] == max([int(before[reader, about]), *learned])


def test_layers_that_are_alike_are_looked_at_once() -> None:
    counts = []
    for layers in (6, 12):
        machine = _Machine(plan_of(tiny(layers), blocks=4))
        _plan_sentinel_checks(machine)
        machine.run()
        counts.append((len(machine.lessons), len(machine.contents)))
    assert counts[0] == counts[1]


def test_the_walk_ends_with_the_last_check() -> None:
    """A token that block 0 publishes is polled a step later: its check is in the third step, all
    others before.
    """

    def walked(**chosen: Any) -> int:
        plan = plan_of(
            tiny(3),
            gpus=2,
            blocks=4,
            collective=CollectiveKind.PUSH,
            handoff=HandOffKind.SENTINEL,
            **chosen,
        )
        machine = _Machine(plan)
        _plan_sentinel_checks(machine)
        assert not machine.run().violations
        assert not machine.on_entry
        assert not machine.after_reads
        return int(machine.own.max()) // len(plan.stages)

    assert (walked(), walked(sampling=Sampling.FULL)) == (1, 2)
