"""From a model, options and the node's limits to a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from twin.errors import PlanError
from twin.models.spec import LaneHead, Lanes, ModelSpec
from twin.plan.partition import cut, scatter, spread
from twin.plan.resets import with_resets
from twin.plan.types import (
    PARTIAL_EXTRA,
    Buffer,
    CollectiveKind,
    Execution,
    HandOffKind,
    Kv,
    Limits,
    Matrix,
    Options,
    Parts,
    Placement,
    Plan,
    Read,
    Sampling,
    Shard,
    Span,
    Stage,
    StageKind,
    Value,
)

POSITIONS_PER_SPLIT = 128  # on an H200 with up to 1,024 positions: 8 splits 742 us, 4 splits 755, 2 splits 797 (studies/h200-tuning)
CANDIDATE = 2  # logit and index
HEAD_STEP = 4  # elements of a head that a thread gathers at once
ONCE_PER_STEP = ("lane_mean", "logits", "candidates", "token")  # a whole step lies between two uses: one copy is enough


def build(spec: ModelSpec, options: Options, limits: Limits) -> Plan:
    """Plan one decode step.

    Raises PlanError when the options do not fit the model. The result still has to pass `validate`.
    """
    ranks = spec.lanes.count if spec.lanes else options.gpus
    _check(spec, options, ranks)
    options = _settled(spec, options)
    ranks_per_gpu = ranks // options.gpus
    blocks = options.blocks // ranks_per_gpu
    builder = _Builder(spec, options, ranks, blocks, shard_of(spec, ranks))
    builder.step()
    plan = Plan(
        name=f"{spec.name} on {options.gpus} x {options.blocks} blocks",
        spec=spec,
        options=options,
        limits=limits,
        ranks=ranks,
        ranks_per_gpu=ranks_per_gpu,
        blocks=blocks,
        shard=builder.shard,
        kv=builder.kv,
        buffers=tuple(builder.buffers.values()),
        values=tuple(builder.values),
        stages=tuple(builder.stages),
        die_of_block=dies(options, limits.dies),
    )
    return with_resets(plan) if options.handoff is HandOffKind.SENTINEL else plan


def dies(options: Options, count: int) -> tuple[int, ...]:
    """Die of each block of a GPU: runs of neighbours, or round-robin as the hardware deals them."""
    if options.placement is Placement.FLAT:
        return tuple(block % count for block in range(options.blocks))
    return tuple(block * count // options.blocks for block in range(options.blocks))


def shard_of(spec: ModelSpec, ranks: int) -> Shard:
    """The sizes of one rank. KV heads are replicated when there are more ranks than KV heads."""
    for name, count in (("attention heads", spec.heads), ("ffn", spec.ffn)):
        if count % ranks:
            raise PlanError(f"{spec.name}: {count} {name} do not divide over {ranks} ranks: choose a tensor-parallel degree that does")
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise PlanError(f"{spec.name}: {spec.kv_heads} KV heads neither divide over {ranks} ranks nor replicate evenly")
    return Shard(
        hidden=spec.hidden,
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        head_dim=spec.head_dim,
        ffn=spec.ffn // ranks,
        vocab=-(-spec.vocab // ranks),
        kv_replicas=max(1, ranks // spec.kv_heads),
    )


def _check(spec: ModelSpec, options: Options, ranks: int) -> None:
    if options.gpus not in (1, 2, 4, 8):
        raise PlanError(f"gpus={options.gpus}: the tensor-parallel degree is 1, 2, 4 or 8")
    if options.blocks < 1:
        raise PlanError(f"blocks={options.blocks}: at least 1 block per GPU")
    if ranks % options.gpus:
        raise PlanError(f"{spec.name} has {ranks} lanes, which do not divide over {options.gpus} GPUs")
    if options.blocks % (ranks // options.gpus):
        raise PlanError(f"blocks={options.blocks}: {ranks // options.gpus} lanes per GPU need a multiple of that many blocks")
    if ranks > 1 and options.collective is CollectiveKind.NONE:
        raise PlanError(f"collective=none with {ranks} ranks: their partial sums must meet; use push or library")
    if options.collective is CollectiveKind.LIBRARY and options.execution is Execution.RESIDENT and ranks > 1:
        raise PlanError("collective=library cannot run inside a resident kernel: use push, or execution graph or stream")
    between_gpus = options.execution is not Execution.RESIDENT and options.gpus > 1
    if between_gpus and options.collective is CollectiveKind.PUSH and options.handoff is HandOffKind.GRID:
        raise PlanError("handoff=grid polls nothing, so kernels of several GPUs cannot push: use sentinel or counter, or a library")
    if options.delay and not spec.lanes:
        raise PlanError(f"delay={options.delay}: {spec.name} was not trained with delayed tensor parallelism, its delay is 0")
    if options.delay is not None and not 0 <= 2 * options.delay <= spec.layers:
        raise PlanError(f"delay={options.delay}: must lie between 0 and half of the {spec.layers} layers")
    if not 1 <= options.context < options.max_context + 1:
        raise PlanError(f"context={options.context}: must lie between 1 and max_context={options.max_context}")
    _check_lanes(spec, options)
    for name in ("slot_bytes", "ring_slots", "window_slots", "tile_rows", "kv_page", "copies", "prompt_chunk"):
        if getattr(options, name) < 1:
            raise PlanError(f"{name}={getattr(options, name)}: must be at least 1")
    if spec.head_dim % HEAD_STEP:
        raise PlanError(f"{spec.name}: head_dim={spec.head_dim}: the kernel exchanges heads {HEAD_STEP} elements at a time")
    if options.slot_bytes % 16:
        raise PlanError(f"slot_bytes={options.slot_bytes}: must be a multiple of 16, the bulk copy's grain")
    if options.tile_rows % 2:
        raise PlanError(f"tile_rows={options.tile_rows}: must be even, a gate row and its up row stay together")


def _check_lanes(spec: ModelSpec, options: Options) -> None:
    lanes = spec.lanes
    if not lanes:
        return
    if lanes.count < 2:
        raise PlanError(f"{spec.name} has {lanes.count} lane: a model of one lane is an ordinary one, describe it without lanes")
    delay = options.delay if options.delay is not None else lanes.delay
    late = lanes.head is LaneHead.VOCABULARY and options.handoff is HandOffKind.SENTINEL
    if late and 0 < 2 * delay == spec.layers:
        raise PlanError(f"delay={delay}: half of the {spec.layers} layers leaves no time for resets before the next step; use counters")


def _settled(spec: ModelSpec, options: Options) -> Options:
    """Fill in what the options leave to the model."""
    delay = options.delay if options.delay is not None else (spec.lanes.delay if spec.lanes else 0)
    return replace(options, delay=delay)


@dataclass(slots=True)
class _Builder:
    spec: ModelSpec
    options: Options
    ranks: int
    blocks: int
    shard: Shard
    buffers: dict[str, Buffer] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    shift: int = 0  # running start of the longer spans
    kv: Kv = field(init=False)

    def __post_init__(self) -> None:
        self.kv = kv_of(self.options, self.shard, self.blocks)

    # ---- the step, in order -------------------------------------------------------------------------------

    def step(self) -> None:
        self._embed()
        residual: list[Read] = []
        for layer in range(self.spec.layers):
            residual = self._layer(layer, residual)
        self._head(residual)

    def _layer(self, layer: int, residual: list[Read]) -> list[Read]:
        shard = self.shard
        q, kv = shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim
        qkv = self._project(
            StageKind.QKV, layer, reads=residual, outputs=q + 2 * kv, cols=shard.hidden, vector=2 * shard.hidden,
            operations=("add_norm", "qkv_proj", "rope_append"),
        )  # fmt: skip
        partials = self._attention(layer, qkv)
        o = self._project(
            StageKind.O_PROJ, layer, reads=[self._whole(partials)], outputs=shard.hidden, cols=q, vector=q,
            operations=("o_proj",), pushed=self._exchanged(layer),
        )  # fmt: skip
        act = self._project(
            StageKind.GATE_UP, layer, reads=self._residual(StageKind.O_PROJ, layer, o), outputs=shard.ffn, cols=shard.hidden,
            unit=2, vector=2 * shard.hidden, operations=("add_norm", "gate_up_proj", "silu_mul"),
        )  # fmt: skip
        down = self._project(
            StageKind.DOWN, layer, reads=[self._whole(act)], outputs=shard.hidden, cols=shard.ffn, vector=0,
            operations=("down_proj",), pushed=self._exchanged(layer),
        )  # fmt: skip
        return self._residual(StageKind.DOWN, layer, down)

    def _embed(self) -> None:
        """The sampled token of the previous step arrives by value only when one block samples for all."""
        reads: tuple[Read, ...] = ()
        if self.options.sampling is Sampling.FULL:
            self._buffer("token", elements=1, pushed=False, copies=1)  # value 0, produced by the last stage
            producer = self._count_stages() - 1
            self.values.append(Value(0, "token", producer, 0, 0, 1, False, ((0, 1), *[(1, 1)] * (self.blocks - 1))))
            reads = (Read(0, Parts.OWN, (((0, 1),),) * self.blocks, previous_step=True),)
        self._stage(StageKind.EMBED, -1, reads=reads, publishes=None, vector=self.shard.hidden, operations=("embedding",))

    def _attention(self, layer: int, qkv: Value) -> Value:
        shard = self.shard
        count = shard.kv_heads * self.kv.splits
        items = scatter(count, self.blocks)
        width = (shard.heads // shard.kv_heads) * (shard.head_dim + PARTIAL_EXTRA)
        stage = len(self.stages)
        value = self._value(
            "attention", layer, stage, elements=count * width, pushed=False, owned=tuple((lo * width, hi * width) for lo, hi in items)
        )
        read = Read(qkv.id, Parts.OWN, tuple(_item_spans(shard, self.kv.splits, span) for span in items))
        self._stage(
            StageKind.ATTENTION, layer, reads=(read,), publishes=value.id, vector=0, operations=("attention", "combine"),
            items=items, window=self.spec.windows[layer],
        )  # fmt: skip
        return value

    def _head(self, residual: list[Read]) -> None:
        spec, shard = self.spec, self.shard
        mean = spec.lanes is not None and spec.lanes.head is not LaneHead.VOCABULARY
        if mean:
            owned = spread(shard.hidden, self.blocks)
            stage = len(self.stages)
            value = self._value("lane_mean", 0, stage, elements=shard.hidden, pushed=True, owned=owned)
            self._stage(
                StageKind.LANE_MEAN, -1, reads=tuple(residual), publishes=value.id, vector=2 * shard.hidden, operations=("add_norm",)
            )
            residual = [self._whole(self._collected(value))]
        owned = spread(shard.vocab, self.blocks, self.shift)
        matrix = cut(rows=shard.vocab, cols=shard.hidden, unit=1, owned=owned, options=self.options)
        full = self.options.sampling is Sampling.FULL
        if full and shard.vocab < self.blocks:  # a block without logits tells nobody how far it is
            raise PlanError(f"the vocabulary has {shard.vocab} rows per rank for {self.blocks} blocks: use fewer blocks or sampling=greedy")
        published = owned if full else tuple((CANDIDATE * b, CANDIDATE * (b + 1)) for b in range(self.blocks))
        elements = shard.vocab if full else CANDIDATE * self.blocks
        stage = len(self.stages)
        name = "logits" if full else "candidates"
        value = self._value(name, 0, stage, elements=elements, pushed=self.ranks > 1, owned=published)
        self._stage(
            StageKind.LM_HEAD, -1, reads=tuple(residual), publishes=value.id, matrix=matrix, vector=2 * shard.hidden,
            operations=("add_norm", "lm_head"),
        )  # fmt: skip
        value = self._collected(value)
        everything = self._whole(value)
        if full:
            everything = replace(everything, spans=(everything.spans[0], *[()] * (self.blocks - 1)))
        self._stage(StageKind.SAMPLE, -1, reads=(everything,), publishes=0 if full else None, vector=0, operations=("sample",))

    # ---- pieces -------------------------------------------------------------------------------------------

    def _project(
        self, kind: StageKind, layer: int, *, reads: list[Read], outputs: int, cols: int, vector: int,
        operations: tuple[str, ...], unit: int = 1, pushed: bool = False,
    ) -> Value:  # fmt: skip
        """A stage that multiplies a matrix and publishes one element per `unit` rows."""
        if outputs < self.blocks:
            raise PlanError(f"{kind.value} has {outputs} outputs per rank for {self.blocks} blocks: use at most {outputs} blocks per rank")
        owned = spread(outputs, self.blocks, self.shift)
        self.shift = (self.shift + outputs) % self.blocks
        rows = tuple((unit * lo, unit * hi) for lo, hi in owned)
        matrix = cut(rows=unit * outputs, cols=cols, unit=unit, owned=rows, options=self.options)
        value = self._value(kind.value, layer, len(self.stages), elements=outputs, pushed=pushed, owned=owned)
        self._stage(kind, layer, reads=tuple(reads), publishes=value.id, matrix=matrix, vector=vector, operations=operations)
        return self._collected(value)

    def _collected(self, value: Value) -> Value:
        """With a library collective a pushed value stays local and a stage of its own gathers it."""
        if not value.pushed or self.options.collective is not CollectiveKind.LIBRARY:
            return value
        local = replace(value, pushed=False, name=value.name + ".part", buffer=self._part_buffer(value))
        self.values[value.id] = local
        stage = len(self.stages)
        gathered = replace(value, id=len(self.values), stage=stage)
        self.values.append(gathered)
        own = tuple((span,) if span[0] < span[1] else () for span in value.owned)
        layer = self.stages[-1].layer
        self._stage(
            StageKind.COLLECTIVE, layer, reads=(Read(local.id, Parts.OWN, own),), publishes=gathered.id, vector=0,
            operations=("all_reduce",),
        )  # fmt: skip
        return gathered

    def _part_buffer(self, value: Value) -> int:
        pushed = next(b for b in self.buffers.values() if b.id == value.buffer)
        return self._buffer(pushed.name + ".part", elements=pushed.elements, pushed=False, copies=pushed.copies).id

    def _residual(self, kind: StageKind, layer: int, value: Value) -> list[Read]:
        """Which parts of this module's output, and of a delayed one, the next stage adds to the residual."""
        lanes = self.spec.lanes
        delay = self.options.delay or 0
        if not lanes or delay == 0:
            return [self._whole(value, residual=True)]
        if layer < delay:
            if lanes.early_exchange:
                return [self._whole(value, residual=True)]
            own = self._whole(value, residual=True, parts=Parts.OWN)
            return [replace(own, scale=math.sqrt(lanes.count))]
        past = self._published(kind, layer - delay)  # delivered late even if it was exchanged early, as in the published code
        return [self._whole(value, residual=True, parts=Parts.OWN), self._whole(past, residual=True, parts=Parts.OTHERS)]

    def _exchanged(self, layer: int) -> bool:
        """Does any other rank ever read this layer's partial sums?"""
        if self.ranks == 1:
            return False
        delay = self.options.delay or 0
        if delay == 0:
            return True
        lanes: Lanes = self.spec.lanes  # type: ignore[assignment]  # delay > 0 implies lanes
        if lanes.early_exchange and layer < delay:
            return True
        return layer + delay < self.spec.layers

    def _published(self, kind: StageKind, layer: int) -> Value:
        """The last value that stage (or its collective) published."""
        ids = [s.publishes for s in self.stages if s.layer == layer and s.kind is kind]
        following = self.stages[next(s.index for s in self.stages if s.layer == layer and s.kind is kind) + 1]
        chosen = following.publishes if following.kind is StageKind.COLLECTIVE else ids[0]
        assert chosen is not None
        return self.values[chosen]

    def _whole(self, value: Value, *, residual: bool = False, parts: Parts | None = None) -> Read:
        """Every block reads every element that was written."""
        parts = parts or (Parts.ALL if value.pushed else Parts.OWN)
        return Read(value.id, parts, (((0, value.elements),),) * self.blocks, residual=residual)

    def _value(self, name: str, layer: int, stage: int, *, elements: int, pushed: bool, owned: tuple[Span, ...]) -> Value:
        once = name in ONCE_PER_STEP
        exchanged = self.ranks > 1 and name in (StageKind.O_PROJ.value, StageKind.DOWN.value)
        copies = 1 if once else self._exchange_copies() if exchanged else self.options.copies
        buffer = self._buffer(name, elements=elements, pushed=pushed or exchanged, copies=copies)
        suffix = "" if once else f"[{layer}]"
        value = Value(len(self.values), name + suffix, stage, buffer.id, layer % copies, elements, pushed, owned)
        self.values.append(value)
        return value

    def _exchange_copies(self) -> int:
        """Copies of a value that other ranks read `delay` layers later, and whose reset they learn of that much later still."""
        delay, lanes = self.options.delay or 0, self.spec.lanes
        copies = self.options.copies + 2 * delay
        if lanes and lanes.head is LaneHead.VOCABULARY:
            # LM_HEAD reads these layers' parts; other ranks learn of the reset only `delay` layers into the next step.
            last = (self.spec.layers - 1, self.spec.layers - 1 - delay)
            while copies < self.spec.layers and any(layer % copies < delay for layer in last):
                copies += 1
        return copies

    def _buffer(self, name: str, *, elements: int, pushed: bool, copies: int) -> Buffer:
        if name not in self.buffers:
            self.buffers[name] = Buffer(len(self.buffers), name, elements, copies, self.ranks if pushed else 1)
        return self.buffers[name]

    def _stage(
        self, kind: StageKind, layer: int, *, reads: tuple[Read, ...], publishes: int | None, vector: int,
        operations: tuple[str, ...], matrix: Matrix | None = None, items: tuple[Span, ...] = (), window: int = 0,
    ) -> None:  # fmt: skip
        self.stages.append(Stage(len(self.stages), kind, layer, reads, (), publishes, matrix, vector, operations, items, window))

    def _count_stages(self) -> int:
        """Stages of the step, known before it is built: the token's producer is the last one."""
        dry = replace(self.options, sampling=Sampling.GREEDY)
        other = _Builder(self.spec, dry, self.ranks, self.blocks, self.shard)
        other.step()
        return len(other.stages)


def kv_of(options: Options, shard: Shard, blocks: int) -> Kv:
    """Splits of each KV head and the page capacity of each split."""
    pages = -(-options.max_context // options.kv_page)
    wanted = -(-options.max_context // POSITIONS_PER_SPLIT)
    splits = options.attention_splits or max(1, min(blocks // shard.kv_heads, wanted))
    if splits > pages:
        raise PlanError(f"attention_splits={splits}: more than the {pages} pages of {options.kv_page} positions")
    return Kv(splits, options.kv_page, -(-pages // splits) * options.kv_page, options.kv_dtype)


def _item_spans(shard: Shard, splits: int, items: Span) -> tuple[Span, ...]:
    """The elements of q, k and v that a block's items use, one span per vector, merged over neighbouring heads."""
    if items[0] == items[1]:
        return ()
    first, last = items[0] // splits, (items[1] - 1) // splits
    group = shard.heads // shard.kv_heads * shard.head_dim
    k = shard.heads * shard.head_dim
    v = k + shard.kv_heads * shard.head_dim
    one = shard.head_dim
    return (
        (first * group, (last + 1) * group),
        (k + first * one, k + (last + 1) * one),
        (v + first * one, v + (last + 1) * one),
    )
