"""Who waits for whom, and which blocks do the same: what a plan says before any hardware is known."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from twin.plan.types import Execution, HandOffKind, Parts, Plan, Read, Span, Stage, StageKind, Value
from twin.sim import cost
from twin.sim.causes import HAND_OFF, SAMPLING

KEPT = 16  # plans whose wiring is remembered


@dataclass(frozen=True, slots=True)
class Channel:
    """A wait group: everybody who needs the same elements of a value from the same ranks."""

    index: int
    value: int
    parts: Parts
    producers: frozenset[int]  # blocks of a rank
    arrivals: int  # publications that complete it
    counted: bool  # arrivals queue at one counter
    cause: int  # of waiting for the own rank's part


@dataclass(frozen=True, slots=True)
class Wiring:
    """`reads[stage][read][block]`: channels, -1 for none. `alike[stage][block]`: the first block whose stage costs the same on any
    device; `kinds[block]`: the first block that is alike in all stages."""

    plan: Plan
    channels: tuple[Channel, ...]
    reads: list[list[list[int]]]
    feeds: dict[int, list[Channel]]  # of each value
    alike: list[list[int]]
    kinds: list[int]


_kept: OrderedDict[int, Wiring] = OrderedDict()


def wire(plan: Plan) -> Wiring:
    """Remembered for this very plan: of many machines for one plan only the first has to find it out."""
    if id(plan) not in _kept:
        _kept[id(plan)] = _wire(plan)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(id(plan))
    return _kept[id(plan)]


def _wire(plan: Plan) -> Wiring:
    groups = _Channels(plan)
    reads = [[groups.read(stage, read) for read in stage.reads] for stage in plan.stages]
    channels = groups.done()
    feeds = _feeds(channels)
    alike = [_first([_traits(plan, stage, reads[stage.index], feeds, block) for block in range(plan.blocks)]) for stage in plan.stages]
    return Wiring(plan, channels, reads, feeds, alike, _first(list(zip(*alike, strict=True))))


def tracked(plan: Plan, value: Value) -> bool:
    """Is the value waited for by itself? Barriers and kernel borders cover the rest."""
    if plan.options.execution is Execution.RESIDENT:
        return plan.options.handoff is not HandOffKind.GRID
    return value.pushed and plan.stages[value.stage].kind is not StageKind.COLLECTIVE


def part_count(plan: Plan, value: Value, parts: Parts) -> int:
    """Ranks whose parts a read takes."""
    if not value.pushed:
        return 1
    return {Parts.OWN: 1, Parts.OTHERS: plan.ranks - 1, Parts.ALL: plan.ranks}[parts]


def _feeds(channels: tuple[Channel, ...]) -> dict[int, list[Channel]]:
    feeds: dict[int, list[Channel]] = {}
    for channel in channels:
        feeds.setdefault(channel.value, []).append(channel)
    return feeds


def _first(traits: list[tuple[object, ...]]) -> list[int]:
    """Of each block, the first one with the same traits."""
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(trait, block) for block, trait in enumerate(traits)]


def _traits(plan: Plan, stage: Stage, channels: list[list[int]], feeds: dict[int, list[Channel]], block: int) -> tuple[object, ...]:
    """All that the work of a block in a stage depends on."""
    if any(not matrix.owned for matrix in stage.matrices):  # its share of the chosen experts' rows is its own
        return (block,)
    reads = [
        (channel[block], sum(hi - lo for lo, hi in read.spans[block]), read.sequences[block] if read.sequences else 0)
        for read, channel in zip(stage.reads, channels, strict=True)
    ]
    shares = [hi - lo for lo, hi in (matrix.owned[block] for matrix in stage.matrices)]
    items: list[int] = []
    if stage.items:
        size = stage.scan.item_bytes if stage.scan else lambda item: cost.item_kv_bytes(plan, stage, item)
        items = [size(item) for item in range(*stage.items[block])]
    published: tuple[object, ...] = ()
    if stage.publishes is not None:
        lo, hi = plan.values[stage.publishes].owned[block]
        published = (hi - lo, *(channel.index for channel in feeds.get(stage.publishes, ()) if block in channel.producers))
    return (*reads, *shares, "items", *items, reset_words(plan, stage, block), published)


def reset_words(plan: Plan, stage: Stage, block: int) -> int:
    """Elements that this block sets back, of every part."""
    count = 0
    for reset in stage.resets:
        value = plan.values[reset.value]
        lo, hi = value.owned[block]
        count += (hi - lo) * plan.buffers[value.buffer].parts * value.words
    return count


class _Channels:
    """Collects wait groups; equal ones are shared."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.known: dict[tuple[int, Parts, frozenset[int]], Channel] = {}
        self.owners: dict[tuple[Span, ...], int] = {}  # ways in which blocks own a value, numbered: layers divide theirs alike
        self.divided = [self.owners.setdefault(tuple(value.owned), len(self.owners)) for value in plan.values]
        self.producers: dict[tuple[int, tuple[Span, ...]], frozenset[int]] = {}

    def read(self, stage: Stage, read: Read) -> list[int]:
        """Channel of each block, -1 for none."""
        value = self.plan.values[read.value]
        if not tracked(self.plan, value):
            return [-1] * self.plan.blocks
        parts = read.parts if value.pushed else Parts.OWN
        return [self._channel(value, parts, spans) if spans else -1 for spans in read.spans]

    def done(self) -> tuple[Channel, ...]:
        return tuple(self.known.values())

    def _channel(self, value: Value, parts: Parts, spans: tuple[Span, ...]) -> int:
        plan = self.plan
        counted = plan.options.handoff is not HandOffKind.SENTINEL
        where = ((0, value.elements),) if counted else spans  # a counter knows only that all have written
        producers = self._producers(value, where)
        key = (value.id, parts, producers)
        if key not in self.known:
            sampled = plan.stages[value.stage].kind is StageKind.SAMPLE
            self.known[key] = Channel(
                index=len(self.known),
                value=value.id,
                parts=parts,
                producers=producers,
                arrivals=len(producers) * part_count(plan, value, parts),
                counted=counted,
                cause=SAMPLING if sampled else HAND_OFF,
            )
        return self.known[key].index

    def _producers(self, value: Value, spans: tuple[Span, ...]) -> frozenset[int]:
        key = (self.divided[value.id], spans)
        if key not in self.producers:
            self.producers[key] = frozenset(
                block for block, (lo, hi) in enumerate(value.owned) if lo < hi and any(lo < b and a < hi for a, b in spans)
            )
        return self.producers[key]
