"""The plan as one block sees it: costs and wait groups worked out once, shared by all ranks and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twin.hardware.types import BlockUnit, Device
from twin.plan.types import Execution, HandOffKind, Parts, Plan, Read, Span, Stage, StageKind, Value, tiles
from twin.sim import cost
from twin.units import picoseconds

# Causes, in the order of reports. Plain integers: they are compared for every slot.
STREAMING, HAND_OFF, COLLECTIVE, CONSUMER, LAUNCH, ATTENTION, SAMPLING, OTHER = range(8)
CAUSES = ("streaming", "hand_off", "collective", "consumer", "launch", "attention", "sampling", "other")
FP32_BYTES = 4
ROUNDS_AHEAD = 2  # of cached positions: one is scanned, the next is on its way
VECTOR_KINDS = (StageKind.QKV, StageKind.O_PROJ, StageKind.GATE_UP, StageKind.DOWN, StageKind.LM_HEAD, StageKind.LANE_MEAN)
Tile = tuple[int, int, int, int]  # columns of the matrix, rows and columns of the tile, rows that end with it


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
class ReadWork:
    channel: int  # -1: a barrier or kernel border already guarantees it
    previous_step: bool
    size: int  # bytes, all parts
    cost_ps: int
    rounds: int  # of loads that follow each other and queue behind the stream
    cause: int  # of the gather


@dataclass(frozen=True, slots=True)
class Publication:
    size: int  # bytes this block publishes
    own: tuple[int, ...]  # channels it feeds in its own rank
    others: tuple[int, ...]  # channels it feeds in every other rank
    pushed: bool


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage of one block."""

    index: int
    kind: StageKind
    reads: tuple[ReadWork, ...]
    fixed_ps: int
    fixed_cause: int
    slots: tuple[int, ...]  # consumer time of each ring slot
    kv: tuple[tuple[int, int], ...]  # (bytes, consumer time) of each request
    kv_ahead: int  # requests under way; 0: as many as the ring's window
    sample_ps: int
    publication: Publication | None
    fence_ps: int  # before its arrival at a counter
    launch_ps: int  # kernel border before this stage
    library: bool  # a vendor collective
    last_slot: int  # slots of the step up to and including this stage
    touches_memory: bool


@dataclass(frozen=True, slots=True)
class Program:
    """`stages[block][stage]` and `sizes[block]`, the bytes of each slot of a step, for the blocks of a rank."""

    plan: Plan
    channels: tuple[Channel, ...]
    stages: tuple[tuple[StageWork, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    barriers: bool  # a full barrier after every stage
    borders: bool  # a kernel border before every stage
    fetch_ps: int  # from knowing that data are there to having the first of them


def compile_plan(plan: Plan, device: Device) -> Program:
    """Everything that does not depend on time."""
    groups = _Channels(plan)
    works: list[list[StageWork]] = [[] for _ in range(plan.blocks)]
    sizes: list[list[int]] = [[] for _ in range(plan.blocks)]
    tile_ps: dict[Tile, int] = {}
    reads = [[groups.read(stage, read) for read in stage.reads] for stage in plan.stages]
    channels = groups.done()
    feeds = _feeds(channels)
    for stage in plan.stages:
        for block in range(plan.blocks):
            pairs = zip(stage.reads, reads[stage.index], strict=True)
            gathers = [_read(plan, device, stage, read, group[block], block) for read, group in pairs]
            work, streamed = _stage(plan, device, stage, block, feeds, tile_ps)
            sizes[block] += streamed
            launch = cost.launch_ps(device.launch, plan.options.execution, stage)
            needed = tuple(gather for gather in gathers if gather is not None)
            works[block].append(replace(work, reads=needed, launch_ps=launch, last_slot=len(sizes[block])))
    resident = plan.options.execution is Execution.RESIDENT
    return Program(
        plan=plan,
        channels=channels,
        stages=tuple(tuple(w) for w in works),
        sizes=tuple(tuple(s) for s in sizes),
        barriers=resident and plan.options.handoff is HandOffKind.GRID,
        borders=not resident,
        fetch_ps=_fetch_ps(plan, device),
    )


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


def _fetch_ps(plan: Plan, device: Device) -> int:
    """A sentinel poll returns the data; behind a counter, a barrier or a kernel border they are loaded afterwards."""
    if plan.options.execution is Execution.RESIDENT and plan.options.handoff is HandOffKind.SENTINEL:
        return 0
    far = device.llc is not None and device.structure.dies.value > 1
    return picoseconds((device.llc if far and device.llc else device.l2).latency_s.value)


class _Channels:
    """Collects wait groups; equal ones are shared."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.known: dict[tuple[int, Parts, frozenset[int]], Channel] = {}
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
        key = (value.id, spans)
        if key not in self.producers:
            self.producers[key] = frozenset(
                block for block, (lo, hi) in enumerate(value.owned) if lo < hi and any(lo < b and a < hi for a, b in spans)
            )
        return self.producers[key]


def _feeds(channels: tuple[Channel, ...]) -> dict[int, list[Channel]]:
    feeds: dict[int, list[Channel]] = {}
    for channel in channels:
        feeds.setdefault(channel.value, []).append(channel)
    return feeds


def _read(plan: Plan, device: Device, stage: Stage, read: Read, channel: int, block: int) -> ReadWork | None:
    """None: this block reads nothing of the value."""
    spans = read.spans[block]
    if not spans or stage.kind is StageKind.COLLECTIVE:
        return None
    value = plan.values[read.value]
    elements = sum(hi - lo for lo, hi in spans) * part_count(plan, value, read.parts)
    remote = value.pushed and read.parts is not Parts.OWN and plan.ranks > 1
    cause = SAMPLING if stage.kind is StageKind.SAMPLE else COLLECTIVE if remote else HAND_OFF
    polled = plan.options.handoff is HandOffKind.SENTINEL and plan.options.execution is Execution.RESIDENT
    vector = stage.kind in VECTOR_KINDS
    gather = cost.gather_cost(device, elements=elements, polled=polled, vector=vector)
    rounds = cost.later_rounds(device, elements=elements, polled=polled, vector=vector)
    return ReadWork(channel, read.previous_step, elements * FP32_BYTES, gather.ps, rounds, cause)


def _stage(
    plan: Plan, device: Device, stage: Stage, block: int, feeds: dict[int, list[Channel]], tile_ps: dict[Tile, int]
) -> tuple[StageWork, list[int]]:
    """Without its reads. `tile_ps` remembers the few distinct tiles."""
    unit, dtype = device.block, plan.options.weight_dtype
    slots, sizes = [], []
    if stage.matrix:
        for (lo, hi), (left, right) in tiles(stage.matrix, block):
            size = (hi - lo) * (right - left) * dtype.bytes
            finished = hi - lo if right == stage.matrix.cols else 0
            tile = (stage.matrix.cols, hi - lo, right - left, finished)
            if tile not in tile_ps:
                team = cost.team_work(device.warps, stage.matrix, rows=hi - lo, size=size)
                tile_ps[tile] = cost.tile_cost(unit, dtype, size=team.size, finished_rows=finished).ps + team.reduction_ps
            slots.append(tile_ps[tile])
            sizes.append(size)
    kv = tuple(_kv(plan, device, stage, block)) if stage.items else ()
    published = 0 if stage.matrix or stage.publishes is None else _length(plan.values[stage.publishes].owned[block])
    fixed = cost.stage_cost(unit, resets=_resets(plan, stage, block), vector=stage.vector_elements, published=published)
    work = StageWork(
        index=stage.index,
        kind=stage.kind,
        reads=(),
        fixed_ps=fixed.ps,
        fixed_cause=_fixed_cause(stage),
        slots=tuple(slots),
        kv=kv,
        kv_ahead=ROUNDS_AHEAD if device.warps else 0,
        sample_ps=_sample(plan, unit, stage, block),
        publication=_publication(plan, stage, block, feeds),
        fence_ps=_fence_ps(plan, device, stage),
        launch_ps=0,
        library=stage.kind is StageKind.COLLECTIVE,
        last_slot=0,
        touches_memory=bool(slots or kv),
    )
    return work, sizes


def _length(span: Span) -> int:
    return span[1] - span[0]


def _fixed_cause(stage: Stage) -> int:
    return {StageKind.EMBED: OTHER, StageKind.SAMPLE: SAMPLING, StageKind.ATTENTION: ATTENTION}.get(stage.kind, CONSUMER)


def _kv(plan: Plan, device: Device, stage: Stage, block: int) -> list[tuple[int, int]]:
    lo, hi = stage.items[block]
    sizes = [cost.item_kv_bytes(plan, stage, item) for item in range(lo, hi)]
    if device.warps is None:
        return [(chunk, cost.kv_cost(device.block, chunk)) for chunk in cost.chunks(sum(sizes), plan.options.slot_bytes)]
    return [request for size in sizes for request in cost.rounds(device.warps, plan, size)]


def _fence_ps(plan: Plan, device: Device, stage: Stage) -> int:
    """Between kernels the border does it; a sentinel needs none."""
    handoff, fence = plan.options.handoff, device.handoff.fence_s
    if fence is None or plan.options.execution is not Execution.RESIDENT or handoff is HandOffKind.SENTINEL:
        return 0
    return picoseconds(fence.value) if handoff is HandOffKind.GRID or stage.publishes is not None else 0


def _resets(plan: Plan, stage: Stage, block: int) -> int:
    """Elements that this block sets back, of every part."""
    count = 0
    for reset in stage.resets:
        value = plan.values[reset.value]
        lo, hi = value.owned[block]
        count += (hi - lo) * plan.buffers[value.buffer].parts
    return count


def _sample(plan: Plan, unit: BlockUnit, stage: Stage, block: int) -> int:
    """Only a block that publishes the token looks at every logit."""
    if stage.kind is not StageKind.SAMPLE or stage.publishes is None:
        return 0
    logits = sum((hi - lo) * part_count(plan, plan.values[read.value], read.parts) for read in stage.reads for lo, hi in read.spans[block])
    return cost.sample_cost(unit, logits)


def _publication(plan: Plan, stage: Stage, block: int, feeds: dict[int, list[Channel]]) -> Publication | None:
    if stage.publishes is None:
        return None
    value = plan.values[stage.publishes]
    lo, hi = value.owned[block]
    if lo == hi:
        return None
    mine = [c for c in feeds.get(value.id, []) if block in c.producers]
    return Publication(
        size=(hi - lo) * FP32_BYTES,
        own=tuple(c.index for c in mine if c.parts is not Parts.OTHERS),
        others=tuple(c.index for c in mine if c.parts is not Parts.OWN),
        pushed=value.pushed and plan.ranks > 1 and stage.kind is not StageKind.COLLECTIVE,
    )
