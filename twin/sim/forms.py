"""Which stages do the same work, and which blocks of them: what layers and blocks have in common is
worked out once.
"""

from __future__ import annotations

from itertools import takewhile

from twin.plan.types import Plan, Read, Stage
from twin.sim import attend


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
        known = {
            index: _first(
                [_traits(plan, plan.stages[index], block) for block in range(plan.blocks)]
            )
            for index in set(self.of)
        }
        self.alike = [known[index] for index in self.of]
        self.kinds = _first(list(zip(*(known[index] for index in sorted(known)), strict=True)))

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
        asked = (read.parts, same(read.spans), read.previous_step, read.sequences)
        return (*asked, *words, producer.publishes == value.id, *self._own(producer))


def _first(traits: list[tuple[object, ...]]) -> list[int]:
    """Of each block, the first one with the same traits."""
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(trait, block) for block, trait in enumerate(traits)]


def _traits(plan: Plan, stage: Stage, block: int) -> tuple[object, ...]:
    """All that the work of a block in a stage depends on."""
    # its share of the chosen experts' rows is its own
    if any(not matrix.owned for matrix in stage.matrices):
        return (block,)
    reads = [
        (
            bool(read.spans[block]),
            sum(hi - lo for lo, hi in read.spans[block]),
            read.sequences[block] if read.sequences else 0,
        )
        for read in stage.reads
    ]
    shares = [hi - lo for lo, hi in (matrix.owned[block] for matrix in stage.matrices)]
    items: list[object] = []
    if stage.items:
        lo, hi = stage.items[block]
        size = (
            stage.scan.item_bytes
            if stage.scan
            else lambda item: attend.item_kv_bytes(plan, stage, item)
        )
        heads: tuple[int, ...] = ()
        if not stage.scan:
            splits = plan.kernel_attention().splits_of(stage.window)
            heads = ((hi - 1) // splits - lo // splits,)
        items = [*heads, *(size(item) for item in range(lo, hi))]
    published = None
    if stage.publishes is not None:
        lo, hi = plan.values[stage.publishes].owned[block]
        published = hi - lo
    return (*reads, *shares, "items", *items, reset_words(plan, stage, block), published)


def reset_words(plan: Plan, stage: Stage, block: int) -> int:
    """Elements that this block sets back, of every part."""
    count = 0
    for reset in stage.resets:
        value = plan.values[reset.value]
        lo, hi = value.owned[block]
        count += (hi - lo) * plan.buffers[value.buffer].parts * value.words
    return count
