"""The plan as one block sees it: costs and wait groups worked out once, shared by all ranks and steps.

Where a step's work depends on its routing there are variants: what a block does when its rank's tokens chose certain experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile

from twin.hardware.types import BlockUnit, Device
from twin.kernel.teams import Ahead, taken_ahead
from twin.models.spec import DType
from twin.plan.catalogue import ROWS, Spent
from twin.plan.types import (
    Execution,
    HandOffKind,
    Matrix,
    Parts,
    Plan,
    Read,
    Sampling,
    Span,
    Stage,
    StageKind,
    Value,
    routed_share,
    tiles_of,
)
from twin.sim import consume, cost
from twin.sim.causes import CAUSES, COLLECTIVE, HAND_OFF, SAMPLING
from twin.sim.clock import cost_in_time
from twin.sim.routing import Chosen, Draw, Draws, Routing
from twin.sim.wiring import Channel, Wiring, part_count, reset_words, wire
from twin.units import picoseconds

FP32_BYTES = 4
ROUNDS_AHEAD = 2  # of cached positions: one is scanned, the next is on its way
CAUSE = {spent: CAUSES.index(spent.value) for spent in Spent}


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
    last_slot: int  # slots of the step up to and including this stage; of a variant only where kernels or the cores themselves load
    touches_memory: bool
    gate: int = -1  # this block must have finished that stage before a slot of this one may be requested; -1: known ahead
    stored: int = 0  # bytes written to memory when the stage ends; nobody waits for them
    kv_after: bool = False  # cached entries follow from the reads and are asked for after them
    aside: bool = False  # made by the block's helper, beside the stages that follow
    ahead: tuple[int, ...] = ()  # consumer time of the first slots, which are awaited and leave the ring before the reads
    group: int = 1  # of these slots, what one row group of all teams takes
    asks: int = 0  # such stages behind this one: the helper begins them when this one's reads have succeeded


@dataclass(frozen=True, slots=True)
class Variant:
    """What the blocks of a rank do in a step: `stages[block][stage]`, and `sizes[block]`, the bytes of each slot."""

    stages: tuple[tuple[StageWork, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    def bytes(self) -> int:
        """Weights, and caches read and written."""
        cached = sum(sum(size for size, _ in work.kv) + work.stored for stages in self.stages for work in stages)
        return sum(sum(sizes) for sizes in self.sizes) + cached


@dataclass(frozen=True, slots=True)
class Program:
    """All that does not depend on time. Without `choices` every rank does the first variant in every step."""

    plan: Plan
    channels: tuple[Channel, ...]
    variants: tuple[Variant, ...]
    barriers: bool  # a full barrier after every stage
    borders: bool  # a kernel border before every stage
    fetch_ps: int  # from knowing that data are there to having the first of them
    choices: tuple[tuple[int, ...], ...] = ()  # [step][rank] variant; a step more than is simulated, for the loaders run ahead
    step_sizes: tuple[int, ...] = field(default=(), compare=False)  # [variant] bytes of a rank

    @property
    def stages(self) -> tuple[tuple[StageWork, ...], ...]:
        """Of the first variant."""
        return self.variants[0].stages

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of the first variant."""
        return self.variants[0].sizes

    @property
    def drawn(self) -> bool:
        """Do steps or ranks differ?"""
        return bool(self.choices)

    def variant(self, step: int, rank: int) -> Variant:
        return self.variants[self.choices[step][rank] if self.choices else 0]

    def step_bytes(self, step: int) -> int:
        """Weights and caches that all ranks move in a step."""
        chosen = self.choices[step] if self.choices else (0,) * self.plan.ranks
        return sum(self.step_sizes[variant] for variant in chosen)


def compile_plan(plan: Plan, device: Device, routing: Routing | None = None, steps: int = 2) -> Program:
    """Everything that does not depend on time. `routing` (uniform by default) is drawn for `steps` steps and the one after them."""
    wiring = wire(plan)
    lowering = _Lowering(wiring, device)
    draws = Draws(plan, routing or Routing())
    known: dict[Draw, int] = {}
    choices = tuple(
        tuple(known.setdefault(draw, len(known)) for draw in draws.step(step)) for step in (range(steps + 1) if draws.vary else range(1))
    )
    variants = tuple(lowering.variant(dict(zip(draws.layers, draw, strict=True))) for draw in known)
    resident = plan.options.execution is Execution.RESIDENT
    return Program(
        plan=plan,
        channels=wiring.channels,
        variants=variants,
        barriers=resident and plan.options.handoff is HandOffKind.GRID,
        borders=not resident,
        fetch_ps=_fetch_ps(plan, device),
        choices=choices if draws.vary else (),
        step_sizes=tuple(variant.bytes() for variant in variants),
    )


def _fetch_ps(plan: Plan, device: Device) -> int:
    """A sentinel poll returns the data; behind a counter, a barrier or a kernel border they are loaded afterwards."""
    if plan.options.execution is Execution.RESIDENT and plan.options.handoff is HandOffKind.SENTINEL:
        return 0
    return picoseconds(device.exchange.latency_s.value)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Slots of one stage of one block: consumer time and bytes."""

    costs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class _Lowering:
    """Makes StageWorks. Blocks with equal shares and layers with equal matrices cost the same, and are worked out once."""

    def __init__(self, wiring: Wiring, device: Device) -> None:
        plan = wiring.plan
        self.plan, self.device, self.wiring = plan, device, wiring
        self.weights: dict[object, _Weights] = {}
        self.gathers: dict[tuple[int, int, int, float], int] = {}
        self.fixed: dict[object, int] = {}
        self.totals: dict[tuple[int, Chosen], int] = {}  # words that all blocks publish of chosen experts
        self.scans: dict[object, tuple[tuple[int, int], ...]] = {}
        self.works: dict[object, StageWork] = {}
        self.runs = _runs(plan)
        self.parts: dict[object, tuple[list[StageWork], list[int]]] = {}  # of a run of stages, a block and its experts
        self.exact = plan.options.execution is not Execution.RESIDENT or device.block.loading == "on-demand"

    @cached_property
    def taken(self) -> dict[StageKind, Ahead]:
        return taken_ahead(self.plan)

    @cached_property
    def aside(self) -> list[bool]:
        """[stages] that a warp which a block has to spare makes: sums of late parts."""
        spare = self._polled() and self.device.warps is not None and self.device.sharing is None
        return [spare and stage.late for stage in self.plan.stages]

    def variant(self, chosen: dict[int, Chosen]) -> Variant:
        """`chosen` by stage that routed experts begin with: how many tokens chose each expert in use on the rank."""
        made = {block: self._stream(block, chosen) for block in sorted(set(self.wiring.kinds))}
        return Variant(tuple(made[kind][0] for kind in self.wiring.kinds), tuple(made[kind][1] for kind in self.wiring.kinds))

    def _stream(self, block: int, chosen: dict[int, Chosen]) -> tuple[tuple[StageWork, ...], tuple[int, ...]]:
        """A block's stages, and the bytes of its slots."""
        works: list[StageWork] = []
        sizes: list[int] = []
        last: Chosen = ()
        for number, stages in enumerate(self.runs):
            last = chosen.get(stages[0].index, last)
            experts = last if stages[0].routed else ()
            key = (number, block, experts, len(sizes) if self.exact else 0)
            if key not in self.parts:
                self.parts[key] = self._part(stages, block, experts, len(sizes))
            part = self.parts[key]
            works += part[0]
            sizes += part[1]
        return tuple(works), tuple(sizes)

    def _part(self, stages: list[Stage], block: int, experts: Chosen, first_slot: int) -> tuple[list[StageWork], list[int]]:
        works: list[StageWork] = []
        sizes: list[int] = []
        for stage in stages:
            first = self.wiring.alike[stage.index][block]
            weights = self._weights(stage, first, experts)
            sizes += weights.sizes
            works.append(self._work(stage, first, experts, weights, first_slot + len(sizes)))
        return works, sizes

    def _work(self, stage: Stage, block: int, experts: Chosen, weights: _Weights, last_slot: int) -> StageWork:
        key = (stage.index, block, experts, last_slot if self.exact else 0)
        known = self.works.get(key)
        if known is not None:
            return known
        plan, device = self.plan, self.device
        kv = self._scan(stage, block)
        lo, hi = stage.items[block] if stage.items else (0, 0)
        ahead = self._ahead(stage, weights)
        work = StageWork(
            index=stage.index,
            kind=stage.kind,
            reads=self._reads(stage, block, experts),
            fixed_ps=self._fixed(stage, block),
            fixed_cause=_fixed_cause(stage),
            slots=weights.costs,
            kv=kv,
            kv_ahead=ROUNDS_AHEAD if device.warps else 0,
            sample_ps=_sample(plan, device.block, stage, block),
            publication=self._publication(stage, block, experts),
            fence_ps=_fence_ps(plan, device, stage),
            launch_ps=cost.launch_ps(device.launch, plan.options.execution, stage, model=plan.spec is not None),
            library=stage.kind is StageKind.COLLECTIVE,
            last_slot=last_slot,
            touches_memory=bool(weights.costs or kv),
            gate=-1 if stage.gate is None or not weights.costs else stage.gate,
            stored=(hi - lo) * stage.scan.written_bytes if stage.scan else 0,
            kv_after=stage.scan is not None and stage.scan.chosen,
            aside=self.aside[stage.index],
            ahead=ahead,
            group=self.taken[stage.kind].group if ahead else 1,
            asks=self._asks(stage),
        )
        self.works[key] = work
        _check(stage, work)
        return work

    # ---- reads and publications -----------------------------------------------------------------------------

    def _reads(self, stage: Stage, block: int, experts: Chosen) -> tuple[ReadWork, ...]:
        """Without those of which this block reads nothing."""
        if stage.kind is StageKind.COLLECTIVE:
            return ()
        pairs = zip(stage.reads, self.wiring.reads[stage.index], strict=True)
        return tuple(self._read(stage, read, channel[block], block, experts) for read, channel in pairs if read.spans[block])

    def _read(self, stage: Stage, read: Read, channel: int, block: int, experts: Chosen) -> ReadWork:
        plan, value = self.plan, self.plan.values[read.value]
        words = self._words(read, value, block, experts) * part_count(plan, value, read.parts)
        remote = value.pushed and read.parts is not Parts.OWN and plan.ranks > 1
        cause = SAMPLING if stage.kind is StageKind.SAMPLE else COLLECTIVE if remote else HAND_OFF
        rounds = self._rounds(stage, read, words)
        loaded = self._loaded(stage, read, words)
        crowd = self._crowd(stage, read)
        key = (words, rounds, loaded, crowd)
        if key not in self.gathers:
            self.gathers[key] = cost.gather_cost(
                self.device, elements=words, rounds=rounds, loaded=loaded, blocks=plan.options.blocks, crowd=crowd
            ).ps
        return ReadWork(channel, read.previous_step, words * FP32_BYTES, self.gathers[key], rounds, cause)

    def _asks(self, stage: Stage) -> int:
        """Stages behind this one that the helper makes."""
        return 0 if self.aside[stage.index] else sum(1 for _ in takewhile(bool, islice(self.aside, stage.index + 1, None)))

    def _ahead(self, stage: Stage, weights: _Weights) -> tuple[int, ...]:
        """What a block of warps has loaded into registers before the inputs are there it has only to multiply. Nothing is saved where a
        stage begins with its inputs there: a probe's without any, and all behind a full barrier or a kernel's border. Nothing is taken
        where slots are only asked for once the inputs are there."""
        if stage.matrix is None or self.device.warps is None or self.device.block.loading == "on-demand":
            return ()
        if stage.kind not in self.taken:
            return ()
        waits = self.plan.options.handoff is not HandOffKind.GRID and self.plan.options.execution is Execution.RESIDENT
        loaded = cost.team_loads_ps(self.device, self.plan.options.weight_dtype, stage.matrix) if stage.reads and waits else 0
        return tuple(max(0, ps - loaded) for ps in weights.costs[: self.taken[stage.kind].tiles(stage.matrix)])

    def _takes_ahead(self, stage: Stage) -> bool:
        """Does a block of warps ever take weights of a stage of this kind from the ring before its inputs are there?"""
        return self.device.warps is not None and stage.kind in self.taken and self.taken[stage.kind].chunks > 0

    def _polled(self) -> bool:
        return self.plan.options.handoff is HandOffKind.SENTINEL and self.plan.options.execution is Execution.RESIDENT

    def _loaded(self, stage: Stage, read: Read, words: int) -> int:
        """Bytes of sectors that a block of warps loads for a read.

        Of what it waits for it polls all that it asks for at once, and the loads that come too early hold up those that find everything.
        """
        plan, value = self.plan, self.plan.values[read.value]
        size = words * FP32_BYTES
        if self.device.warps is None:
            return 0
        splits = self._splits(stage, read)
        if splits:
            if stage.matrix is None:
                return size
            split = cost.vector_bytes(stage.matrix, aligned=self._alignment(read), element=self._partial_bytes())
            at_once = cost.parts_at_once(stage.matrix) * split
            rounds = cost.vector_rounds(stage.matrix, parts=1, splits=splits)  # of splits missing in the last one, its last again
            return (rounds + self._polled()) * at_once
        at_once = min(size, cost.ROUND_BYTES)
        if ROWS[stage.kind].vector and stage.matrix:
            parts = part_count(plan, value, read.parts)
            whole = stage.matrix.cols * value.words * parts
            size = cost.vector_bytes(stage.matrix, aligned=cost.QUAD_BYTES) * value.words * min(words, whole) // whole
            size, at_once = size * parts, size * min(parts, cost.PARTS_AT_ONCE)
        waited_for = value.stage == max(plan.values[other.value].stage for other in stage.reads)
        return size + at_once if self._polled() and waited_for else size

    def _alignment(self, read: Read) -> int:
        """Bytes of one load of attention's partial outputs."""
        value = self.plan.values[read.value]
        scan = self.plan.stages[value.stage].scan or self.plan.kernel_attention()
        return cost.partial_alignment(value.elements // scan.items)

    def _partial_bytes(self) -> int:
        """Of an element of attention's partial outputs."""
        return FP32_BYTES if self.plan.options.kv_dtype is DType.FP32 else FP32_BYTES // 2

    def _crowd(self, stage: Stage, read: Read) -> float:
        """How often more than once the blocks of a rank ask for the same partial outputs at once, for each of the GPU's multiprocessors:
        of fewer splits than are looked at together they load the last one several times, all of them from the same few lines."""
        splits, producer = self._splits(stage, read), self.plan.stages[self.plan.values[read.value].stage]
        if self.device.warps is None or not splits or producer.scan:  # nobody has measured those of other layers
            return 0.0
        return max(0.0, cost.parts_at_once(stage.matrix) / splits - 1) * self.plan.blocks / self.device.blocks

    def _splits(self, stage: Stage, read: Read) -> int:
        """Of the attention whose partial outputs a stage combines; 0 of anything else that it reads."""
        producer = self.plan.stages[self.plan.values[read.value].stage]
        if stage.kind is not StageKind.O_PROJ or producer.kind is not StageKind.ATTENTION:
            return 0
        if producer.scan:
            return producer.scan.splits
        return min(
            self.plan.kernel_attention().splits, self.plan.options.context // self.plan.options.kv_page + 1
        )  # others hold no position yet

    def _rounds(self, stage: Stage, read: Read, words: int) -> int:
        """Of loads that follow each other beyond the first one."""
        plan = self.plan
        if self.device.warps is None:
            return 0
        if self.aside[stage.index]:
            rounds = cost.late_rounds(words // max(1, plan.ranks - 1))
        elif ROWS[stage.kind].vector:
            parts = part_count(plan, plan.values[read.value], read.parts)
            rounds = cost.vector_rounds(stage.matrix, parts=parts, splits=self._splits(stage, read))
        else:
            rounds = cost.span_rounds(words, polled=self._polled())
        return rounds - 1

    def _words(self, read: Read, value: Value, block: int, experts: Chosen) -> int:
        """FP32 words of one rank's part that a block reads."""
        producer = self.plan.stages[value.stage]
        if producer.routed and producer.publishes == value.id and not producer.matrices[0].owned:
            key = (producer.matrices[0].rows, experts)
            if key not in self.totals:
                self.totals[key] = sum(self._shared_words(producer, other, experts) for other in range(self.plan.blocks))
            return self.totals[key]
        words = sum(hi - lo for lo, hi in read.spans[block]) * value.words
        return words if read.sequences is None else words * read.sequences[block] // self.plan.options.batch

    def _shared_words(self, stage: Stage, block: int, experts: Chosen) -> int:
        """What a block publishes of the chosen experts' rows: a word a token, and at least one, so that readers learn of the block."""
        width = stage.matrices[0].rows // stage.matrices[0].unit
        return max(1, sum((hi - lo) * tokens for (lo, hi), tokens in _shares(width, self.plan.blocks, block, experts)))

    def _publication(self, stage: Stage, block: int, experts: Chosen) -> Publication | None:
        plan = self.plan
        if stage.publishes is None:
            return None
        value = plan.values[stage.publishes]
        lo, hi = value.owned[block]
        if lo == hi:
            return None
        divided = stage.routed is not None and not stage.matrices[0].owned
        words = self._shared_words(stage, block, experts) if divided else (hi - lo) * value.words
        mine = [c for c in self.wiring.feeds.get(value.id, []) if block in c.producers]
        return Publication(
            size=words * FP32_BYTES,
            own=tuple(c.index for c in mine if c.parts is not Parts.OTHERS),
            others=tuple(c.index for c in mine if c.parts is not Parts.OWN),
            pushed=value.pushed and plan.ranks > 1 and stage.kind is not StageKind.COLLECTIVE,
        )

    # ---- work -----------------------------------------------------------------------------------------------

    def _fixed(self, stage: Stage, block: int) -> int:
        plan = self.plan
        value = None if stage.publishes is None else plan.values[stage.publishes]
        published = 0 if stage.matrix or value is None else _length(value.owned[block]) * value.words
        resets = reset_words(plan, stage, block)
        combined = self.device.warps is not None and any(self._splits(stage, read) for read in stage.reads)  # where it is gathered
        vector = 0 if combined else stage.vector_elements
        normed = plan.tokens if ROWS[stage.kind].vector and vector else 0
        if self.device.warps and stage.kind in (StageKind.LM_HEAD, StageKind.SAMPLE) and plan.options.sampling is Sampling.GREEDY:
            normed += plan.tokens  # the best of all threads' candidates is found as a sum is
        key = (resets, vector, published, normed)
        if key not in self.fixed:
            self.fixed[key] = cost.stage_cost(self.device, resets=resets, vector=vector, published=published, normed=normed).ps
        turns = stage.kind is StageKind.ATTENTION and plan.spec is not None and any(read.spans[block] for read in stage.reads)
        return self.fixed[key] + (self._heads(stage, block) if turns else 0)

    def _heads(self, stage: Stage, block: int) -> int:
        """New tokens' heads on their way to the scans of a block's items; one round of them where a stage has a scan of its own."""
        if self.device.warps is None:
            return 0
        if stage.scan:
            assert self.plan.spec is not None  # a head of the size that the model shows: judged, no kernel of ours does such scans
            return cost.heads_ps(self.device.warps, self.plan.spec.head_dim, 1)
        own, (lo, hi) = self.plan.kernel_attention(), stage.items[block]
        keys = (hi - 1) // own.splits - lo // own.splits + 1
        return cost.heads_ps(self.device.warps, own.head_dim, keys * (own.group + 2))

    def _weights(self, stage: Stage, block: int, experts: Chosen) -> _Weights:
        if not stage.matrices:
            return self._cached(stage, block)
        shares = tuple(self._share(matrix, block, experts) for matrix in stage.matrices)
        key = (shares, experts if stage.routed else None, stage.kind is StageKind.STREAM)
        if key not in self.weights:
            slots = [slot for matrix in stage.matrices for slot in self._slots(stage, matrix, block, experts)]
            self.weights[key] = _Weights(tuple(ps for ps, _ in slots), tuple(size for _, size in slots))
        return self.weights[key]

    def _cached(self, stage: Stage, block: int) -> _Weights:
        """Keys and values that a block of warps gets through its ring, between the weights of the stages around."""
        if self.device.warps is None or not stage.items or stage.scan is not None:
            return _NOTHING
        sizes = tuple(cost.item_kv_bytes(self.plan, stage, item) for item in range(*stage.items[block]))
        key = (stage.kind, sizes)
        if key not in self.weights:
            tiles = [tile for size in sizes for tile in cost.cache_tiles(self.device.warps, self.plan, size)]
            self.weights[key] = _Weights(tuple(ps for _, ps in tiles), tuple(size for size, _ in tiles))
        return self.weights[key]

    def _share(self, matrix: Matrix, block: int, experts: Chosen) -> object:
        """What the slots of a block depend on."""
        share: object = block
        if matrix.owned:
            lo, hi = matrix.owned[block]
            share = hi - lo
        return matrix.rows, matrix.cols, matrix.unit, matrix.tile_rows, matrix.tile_cols, matrix.format, share

    def _slots(self, stage: Stage, matrix: Matrix, block: int, experts: Chosen) -> Iterator[tuple[int, int]]:
        """(consumer time, bytes) of each slot of a block, in stream order."""
        if stage.routed is None:
            joined = stage.kind is StageKind.STREAM and not self._takes_ahead(stage)
            yield from self._tiles(matrix, *matrix.owned[block], self.plan.tokens, joined=joined)
        elif matrix.owned:
            for tokens in experts:
                yield from self._tiles(matrix, *matrix.owned[block], tokens)
        else:
            for (lo, hi), tokens in _shares(matrix.rows // matrix.unit, self.plan.blocks, block, experts):
                yield from self._tiles(matrix, matrix.unit * lo, matrix.unit * hi, tokens)

    def _tiles(self, matrix: Matrix, first: int, last: int, tokens: int, *, joined: bool = False) -> Iterator[tuple[int, int]]:
        known: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        at_once = cost.teams_at_once(matrix, self.plan.options.weight_dtype)
        for (lo, hi), (left, right) in tiles_of(matrix, first, last):
            begun = lo - (lo - first) % matrix.batch_rows
            groups = -(-(min(last, begun + matrix.batch_rows) - begun) // matrix.tile_rows)
            number = (lo - begun) // matrix.tile_rows
            together = min(at_once, groups - number // at_once * at_once)
            tile = (hi - lo, right - left, hi - lo if right == matrix.cols else 0, together)
            if tile not in known:
                known[tile] = self._tile(matrix, *tile, tokens, joined=joined)
            ps, size = known[tile]
            ends = right == matrix.cols and (hi == last or (hi - first) % matrix.batch_rows == 0)
            yield (ps + picoseconds(self.device.warps.tile_s.value) if self.device.warps and ends else ps), size

    def _tile(self, matrix: Matrix, rows: int, cols: int, finished: int, groups: int, tokens: int, *, joined: bool) -> tuple[int, int]:
        device, dtype = self.device, self.plan.options.weight_dtype
        size = matrix.format.bytes(rows, cols) if matrix.format else rows * cols * dtype.bytes
        team = cost.team_work(device.warps, matrix, rows=rows, cols=cols, groups=groups, dtype=dtype, joined=joined)
        tile = consume.Tile(matrix.format, int(size * team.weights / (rows * cols)), int(team.weights), finished, team.ends_ps)
        return consume.tile_ps(device, dtype, tile, tokens), size

    def _scan(self, stage: Stage, block: int) -> tuple[tuple[int, int], ...]:
        """(bytes, consumer time) of each request for cached entries."""
        if not stage.items:
            return ()
        if stage.scan is None:
            return tuple(_kv(self.plan, self.device, stage, block)) if self.device.warps is None else ()
        key = (stage.kind, stage.scan, stage.items[block])
        if key not in self.scans:
            items = range(*stage.items[block])
            self.scans[key] = tuple(
                request for item in items for request in consume.scan_requests(self.device, self.plan, stage.kind, stage.scan, item)
            )
        return self.scans[key]


_NOTHING = _Weights()


def _runs(plan: Plan) -> list[list[Stage]]:
    """Stages in a row that depend on the same routing, or on none: what variants have in common is found once."""
    runs: list[list[Stage]] = []
    for stage in plan.stages:
        if not runs or stage.kind is StageKind.ROUTED_UP or bool(stage.routed) != bool(runs[-1][-1].routed):
            runs.append([])
        runs[-1].append(stage)
    return runs


def _shares(width: int, blocks: int, block: int, experts: Chosen) -> Iterator[tuple[Span, int]]:
    """A block's rows of each chosen expert when all blocks divide them, stacked; and the tokens that chose it."""
    lo, hi = routed_share(width * len(experts), blocks, block)
    for expert in range(lo // width, -(-hi // width)) if lo < hi else ():
        yield (max(lo - expert * width, 0), min(hi - expert * width, width)), experts[expert]


def _length(span: Span) -> int:
    return span[1] - span[0]


def _check(stage: Stage, work: StageWork) -> None:
    """Raises HardwareError for a cost that no executor's clock is made for."""
    single = (work.fixed_ps, work.sample_ps, work.fence_ps, work.launch_ps, sum(work.ahead))
    longest = max(*single, *work.slots, *(ps for _, ps in work.kv), *(read.cost_ps for read in work.reads))
    cost_in_time(f"stage {stage.name}: a piece of a block's work", longest)


def _fixed_cause(stage: Stage) -> int:
    return CAUSE[ROWS[stage.kind].spent]


def _kv(plan: Plan, device: Device, stage: Stage, block: int) -> list[tuple[int, int]]:
    size = sum(cost.item_kv_bytes(plan, stage, item) for item in range(*stage.items[block]))
    return [(chunk, cost.kv_cost(device.block, chunk)) for chunk in cost.chunks(size, plan.options.slot_bytes)]


def _fence_ps(plan: Plan, device: Device, stage: Stage) -> int:
    """Between kernels the border does it; a sentinel needs none."""
    handoff, fence = plan.options.handoff, device.handoff.fence_s
    if fence is None or plan.options.execution is not Execution.RESIDENT or handoff is HandOffKind.SENTINEL:
        return 0
    return picoseconds(fence.value) if handoff is HandOffKind.GRID or stage.publishes is not None else 0


def _sample(plan: Plan, unit: BlockUnit, stage: Stage, block: int) -> int:
    """Only a block that publishes the token looks at every logit."""
    if stage.kind is not StageKind.SAMPLE or stage.publishes is None:
        return 0
    logits = sum(
        (hi - lo) * plan.values[read.value].words * part_count(plan, plan.values[read.value], read.parts)
        for read in stage.reads
        for lo, hi in read.spans[block]
    )
    return cost.sample_cost(unit, logits)
