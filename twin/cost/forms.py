"""Which stages do the same work, and which blocks of them: what layers and blocks have in common is
worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from twin.cost import attention
from twin.plan.matrix import Span
from twin.plan.types import Plan, Read, Stage


class Numbered:
    """Equal things get the same number. Things are held by the plan, so the same object is known by
    its identity.
    """

    def __init__(self) -> None:
        self.by_identity: dict[int, int] = {}
        self.by_value: dict[object, int] = {}

    def __call__(self, thing: object) -> int:
        number = self.by_identity.get(id(thing))
        if number is None:
            number = self.by_identity[id(thing)] = self.by_value.setdefault(
                thing, len(self.by_value)
            )
        return number


class Forms:
    """`of[stage]`: the first stage whose blocks do the same work but for the channels they wait at
    and feed.

    `alike[stage][block]`: the first block whose work in the stage costs the same on any device,
    whatever experts are chosen.
    """

    def __init__(self, plan: Plan, numbered: Numbered) -> None:
        self.plan, self.numbered = plan, numbered
        first: dict[object, int] = {}
        self.of = [first.setdefault(self._form(stage), stage.index) for stage in plan.stages]
        self.columns: dict[int, Sequence[Any]] = {}  # by block, of what the plan holds
        self.counted: dict[tuple[Span, ...], tuple[bool, int]] = {}
        self.items: dict[object, Sequence[Any]] = {}
        known = {
            index: first_alike(list(self._traits(plan.stages[index]))) for index in set(self.of)
        }
        self.alike = [known[index] for index in self.of]
        self.kinds = first_alike(list(zip(*(known[index] for index in sorted(known)), strict=True)))

    def _form(self, stage: Stage) -> tuple[object, ...]:
        """All that the lowering looks at in a stage and around it."""
        plan, same = self.plan, self.numbered
        last = max((plan.values[read.value].stage for read in stage.reads), default=-1)
        published = None
        if stage.publishes is not None:
            value = plan.values[stage.publishes]
            published = (same(value.owned), value.elements, value.words, value.pushed)
        resets = tuple(
            (
                same(plan.values[r.value].owned),
                plan.values[r.value].words,
                plan.buffers[plan.values[r.value].buffer].parts,
            )
            for r in stage.resets
        )
        late_behind = sum(
            1 for _ in takewhile(lambda other: other.late, plan.stages[stage.index + 1 :])
        )
        reads = tuple(self._read(read, last) for read in stage.reads)
        return (*self._own(stage), reads, resets, published, stage.late, late_behind)

    def _own(self, stage: Stage) -> tuple[object, ...]:
        same = self.numbered
        matrices = tuple(same(matrix) for matrix in stage.matrices)
        parts = (
            stage.vector_elements,
            len(stage.operations),
            stage.window,
            stage.scan,
            stage.routed,
            stage.gate is None,
        )
        return (stage.kind, matrices, same(stage.items), *parts)

    def _read(self, read: Read, last: int) -> tuple[object, ...]:
        same, value = self.numbered, self.plan.values[read.value]
        producer = self.plan.stages[value.stage]
        words = (value.elements, value.words, value.pushed, same(value.owned), value.stage == last)
        loads = (read.parts, same(read.spans), read.previous_step, read.sequences)
        return (*loads, *words, producer.publishes == value.id, *self._own(producer))

    def _traits(self, stage: Stage) -> Iterable[object]:
        """Of each block, all that its work in a stage depends on."""
        plan = self.plan
        # its share of the chosen experts' rows is its own
        if any(not matrix.owned for matrix in stage.matrices):
            return range(plan.blocks)
        columns = [self._counted(read.spans) for read in stage.reads]
        columns += [read.sequences for read in stage.reads if read.sequences]
        columns += [self._widths(matrix.owned) for matrix in stage.matrices]
        if stage.items:
            looked_at = (self.numbered(stage.items), stage.window, stage.scan)
            if looked_at not in self.items:
                self.items[looked_at] = list(self._items(stage))
            columns.append(self.items[looked_at])
        if stage.resets:
            columns.append([reset_words(plan, stage, block) for block in range(plan.blocks)])
        if stage.publishes is not None:
            columns.append(self._widths(plan.values[stage.publishes].owned))
        return zip(*columns, strict=True) if columns else [()] * plan.blocks

    def _items(self, stage: Stage) -> Iterator[tuple[int, ...]]:
        plan, scan = self.plan, stage.scan
        for lo, hi in stage.items:
            if scan:
                yield tuple(scan.item_bytes(item) for item in range(lo, hi))
                continue
            splits = plan.attention_of(stage).splits_of(stage.window)
            heads = (hi - 1) // splits - lo // splits
            sizes = (attention.item_kv_bytes(plan, stage, item) for item in range(lo, hi))
            yield (heads, *sizes)

    def _counted(self, spans: Sequence[tuple[Span, ...]]) -> Sequence[Any]:
        """Whether a block reads anything, and how many elements. Layers share these."""
        if id(spans) not in self.columns:
            column = []
            for own in spans:
                if own not in self.counted:  # blocks read alike
                    self.counted[own] = (bool(own), sum(hi - lo for lo, hi in own))
                column.append(self.counted[own])
            self.columns[id(spans)] = column
        return self.columns[id(spans)]

    def _widths(self, owned: Sequence[Span]) -> Sequence[Any]:
        if id(owned) not in self.columns:
            self.columns[id(owned)] = [hi - lo for lo, hi in owned]
        return self.columns[id(owned)]


def first_alike(traits: Sequence[object]) -> list[int]:
    """Of each block, the first one with the same traits."""
    seen: dict[object, int] = {}
    return [seen.setdefault(trait, block) for block, trait in enumerate(traits)]


def reset_words(plan: Plan, stage: Stage, block: int) -> int:
    """Elements that this block sets back, of every part."""
    count = 0
    for reset in stage.resets:
        value = plan.values[reset.value]
        lo, hi = value.owned[block]
        count += (hi - lo) * plan.buffers[value.buffer].parts * value.words
    return count
