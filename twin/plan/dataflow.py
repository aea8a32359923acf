"""What a stage must read to compute the model: derived from the model alone, then compared with the plan.

A plan that forgets a read would run and compute something else without a sign, so every stage's reads are compared
exactly: value, parts, scale and step. The elements may be more than needed, never fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from twin.models.spec import LaneHead, ModelSpec
from twin.plan.types import CollectiveKind, Parts, Plan, Read, Sampling, Shard, Span, Stage, StageKind, Value
from twin.plan.violation import Violation

PARTIAL_EXTRA = 2  # a partial's running maximum and sum
PROBE_KINDS = (StageKind.STREAM, StageKind.EXCHANGE, StageKind.ATTENTION, StageKind.SAMPLE)


@dataclass(frozen=True, slots=True)
class Need:
    """One read that the computation calls for; `spans[block]` are the elements without which it is wrong."""

    value: Value
    spans: tuple[tuple[Span, ...], ...]
    parts: Parts = Parts.OWN
    scale: float = 1.0
    residual: bool = False
    previous_step: bool = False


class _Wrong(Exception):
    """The stages stop making sense here: nothing after this point can be compared."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.violation = Violation("data flow", stage, message)


def check_data_flow(plan: Plan) -> list[Violation]:
    """Everything a model's plan, or a probe's, reads wrongly. The plan's structure must be sound."""
    found = list(_every_word_read(plan))
    if plan.spec is None:
        return found + list(_probe(plan))
    walk = _Walk(plan, plan.spec)
    try:
        walk.step()
    except _Wrong as wrong:
        walk.found.append(wrong.violation)
    return found + walk.found


# ---- every word that is written is read ------------------------------------------------------------------------------


def _every_word_read(plan: Plan) -> Iterator[Violation]:
    """Only a poll proves that a store arrived; without one it could land after the word's next use."""
    spans: dict[tuple[int, bool], set[Span]] = {}
    for stage in plan.stages:
        for read in stage.reads:
            every = {span for block in set(read.spans) for span in block}
            for own in (True, False):
                if read.parts is Parts.ALL or (read.parts is Parts.OWN) == own:
                    spans.setdefault((read.value, own), set()).update(every)
    for value in plan.values:
        for own in (True, False) if value.pushed and plan.ranks > 1 else (True,):
            hole = first_hole(spans.get((value.id, own), set()), (0, value.elements))
            if hole is not None:
                whose = "the own part" if own else "the other ranks' parts"
                message = f"no block reads {value.name}[{hole}] of {whose}"
                yield Violation("unread", plan.stages[value.stage].name, message)


def first_hole(spans: set[Span] | tuple[Span, ...], needed: Span) -> int | None:
    """The first element of `needed` that no span holds."""
    at, end = needed
    for lo, hi in sorted(spans):
        if lo > at:
            break
        at = max(at, hi)
    return at if at < end else None


# ---- probes ----------------------------------------------------------------------------------------------------------


def _probe(plan: Plan) -> Iterator[Violation]:
    """A probe's hand-offs form a ring: each publisher gathers what the one before it published; in an exchange others may, too."""
    for stage in plan.stages:
        if stage.kind not in PROBE_KINDS:
            yield Violation("data flow", stage.name, "a plan without a model has no such stage")
            return
    chain = [stage for stage in plan.stages if stage.publishes is not None]
    for index, stage in enumerate(chain):
        assert stage.publishes is not None
        before = plan.values[chain[index - 1].publishes or 0]
        owned = plan.values[stage.publishes].owned
        listens = [stage.kind is StageKind.EXCHANGE and any(read.spans[block] for read in stage.reads) for block in range(plan.blocks)]
        working = [lo < hi or heard for (lo, hi), heard in zip(owned, listens, strict=True)]
        parts = Parts.ALL if before.pushed else Parts.OWN
        spans = tuple(((0, before.elements),) if works else () for works in working)
        yield from compare(plan, stage, [Need(before, spans, parts, previous_step=before.stage >= stage.index)])
    for stage in plan.stages:
        if stage.publishes is None and stage.reads:
            yield Violation("data flow", stage.name, "reads but publishes nothing")


# ---- a model's step --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walk:
    """Follows the model from the embedding to the token and takes the plan's stages one by one."""

    plan: Plan
    spec: ModelSpec
    at: int = 0
    found: list[Violation] = field(default_factory=list)

    def step(self) -> None:
        plan, spec, shard = self.plan, self.spec, self.plan.shard
        self._sizes()
        full = plan.options.sampling is Sampling.FULL
        needs = []
        if full:
            token = plan.stages[-1].publishes
            if token is None:
                raise _Wrong(plan.stages[-1].name, "publishes no token although sampling=full")
            needs = [Need(plan.values[token], _whole(plan, 1), previous_step=True)]
        self._take(StageKind.EMBED, -1, needs, elements=None)
        o_proj: list[Value] = []
        down: list[Value] = []
        residual: list[Need] = []
        for layer in range(spec.layers):
            o_proj.append(self._attention(layer, residual))
            act = self._project(StageKind.GATE_UP, layer, self._residual(o_proj), shard.ffn, shard.hidden, unit=2)
            down.append(self._project(StageKind.DOWN, layer, [self._all(act)], shard.hidden, shard.ffn))
            residual = self._residual(down)
        self._head(residual, full)
        if self.at != len(plan.stages):
            raise _Wrong(plan.stages[self.at].name, "follows the end of the step")

    def _attention(self, layer: int, residual: list[Need]) -> Value:
        plan, shard = self.plan, self.plan.shard
        q, kv = shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim
        qkv = self._project(StageKind.QKV, layer, residual, q + 2 * kv, shard.hidden)
        items = shard.kv_heads * plan.kv.splits
        width = shard.heads // shard.kv_heads * (shard.head_dim + PARTIAL_EXTRA)
        stage = self._peek(StageKind.ATTENTION, layer)
        if stage.window != self.spec.windows[layer]:
            self._say(stage, f"window {stage.window}, the model has {self.spec.windows[layer]}")
        needed = tuple(_item_elements(shard, plan.kv.splits, span) for span in stage.items)
        partials = self._take(StageKind.ATTENTION, layer, [Need(qkv, needed)], elements=items * width)
        if partials.owned != tuple((lo * width, hi * width) for lo, hi in stage.items):
            self._say(stage, f"blocks do not publish the partials of their items, {width} elements each")
        return self._project(StageKind.O_PROJ, layer, [self._all(partials)], shard.hidden, q)

    def _head(self, residual: list[Need], full: bool) -> None:
        plan, shard, lanes = self.plan, self.plan.shard, self.spec.lanes
        if lanes and lanes.head is not LaneHead.VOCABULARY:
            residual = [self._all(self._gathered(self._take(StageKind.LANE_MEAN, -1, residual, elements=shard.hidden)))]
        stage = self._peek(StageKind.LM_HEAD, -1)
        elements = shard.vocab if full else 2 * plan.blocks
        head = self._take(StageKind.LM_HEAD, -1, residual, elements=elements, matrix=(shard.vocab, shard.hidden, 1))
        rows = stage.matrix.owned if stage.matrix else ()
        if head.owned != (rows if full else tuple((2 * block, 2 * block + 2) for block in range(plan.blocks))):
            self._say(stage, "blocks do not publish the logits of their rows" if full else "each block publishes 2 elements: logit, index")
        head = self._gathered(head)
        need = self._all(head)
        if full:
            token = plan.values[plan.stages[-1].publishes or 0]
            need = Need(head, tuple(((0, head.elements),) if lo < hi else () for lo, hi in token.owned), need.parts)
        self._take(StageKind.SAMPLE, -1, [need], elements=1 if full else None)

    def _project(self, kind: StageKind, layer: int, needs: list[Need], outputs: int, cols: int, unit: int = 1) -> Value:
        """A matrix stage: one published element per `unit` rows, by the block that owns the rows."""
        stage = self._peek(kind, layer)
        value = self._take(kind, layer, needs, elements=outputs, matrix=(unit * outputs, cols, unit))
        rows = stage.matrix.owned if stage.matrix else ()
        for block, ((lo, hi), row) in enumerate(zip(value.owned, rows, strict=False)):
            if row != (unit * lo, unit * hi):
                self._say(stage, f"block {block} owns rows {row} but publishes elements {(lo, hi)}, {unit} rows each")
                break
        return self._gathered(value)

    def _gathered(self, value: Value) -> Value:
        """With a library collective, the value that holds every rank's part; it takes a stage of its own."""
        if self.plan.options.collective is not CollectiveKind.LIBRARY or self.at >= len(self.plan.stages):
            return value
        stage = self.plan.stages[self.at]
        if stage.kind is not StageKind.COLLECTIVE:
            return value
        everything = tuple((span,) if span[0] < span[1] else () for span in value.owned)
        gathered = self._take(StageKind.COLLECTIVE, self.plan.stages[value.stage].layer, [Need(value, everything)], elements=value.elements)
        if not gathered.pushed:
            self._say(stage, f"{gathered.name} is gathered but not marked as pushed")
        return gathered

    def _residual(self, modules: list[Value]) -> list[Need]:
        """What the newest module, and the one `delay` layers before it, add to the residual stream."""
        lanes, layer = self.spec.lanes, len(modules) - 1
        delay = self._delay()
        if not lanes or delay == 0 or (layer < delay and lanes.early_exchange):
            return [self._all(modules[-1], residual=True)]
        scale = math.sqrt(lanes.count) if layer < delay else 1.0
        needs = [Need(modules[-1], _whole(self.plan, modules[-1].elements), Parts.OWN, scale, residual=True)]
        late = layer - delay
        if late >= 0:
            needs.append(Need(modules[late], _whole(self.plan, modules[late].elements), Parts.OTHERS, residual=True))
        return needs

    def _delay(self) -> int:
        delay = self.plan.options.delay
        return delay if delay is not None else self.spec.lanes.delay if self.spec.lanes else 0

    def _all(self, value: Value, *, residual: bool = False) -> Need:
        """Every element of every rank: a value that other ranks hold a share of has to be pushed."""
        kinds = (StageKind.QKV, StageKind.ATTENTION, StageKind.GATE_UP)
        shared = self.plan.ranks > 1 and self.plan.stages[value.stage].kind not in kinds
        return Need(value, _whole(self.plan, value.elements), Parts.ALL if shared else Parts.OWN, residual=residual)

    def _peek(self, kind: StageKind, layer: int) -> Stage:
        if self.at >= len(self.plan.stages):
            raise _Wrong("the end of the step", f"a stage {kind.value} of layer {layer} is missing")
        stage = self.plan.stages[self.at]
        if (stage.kind, stage.layer) != (kind, layer):
            raise _Wrong(stage.name, f"stands where the model needs {kind.value} of layer {layer}")
        return stage

    def _take(
        self, kind: StageKind, layer: int, needs: list[Need], *, elements: int | None, matrix: tuple[int, int, int] | None = None
    ) -> Value:  # fmt: skip
        """Compare the next stage with what it should be. `elements` is what it publishes, None for nothing."""
        stage = self._peek(kind, layer)
        self.at += 1
        self.found += compare(self.plan, stage, needs)
        has = (stage.matrix.rows, stage.matrix.cols, stage.matrix.unit) if stage.matrix else None
        if has != matrix:
            raise _Wrong(stage.name, f"its matrix (rows, cols, unit) is {has}, the model needs {matrix}")
        published = self.plan.values[stage.publishes].elements if stage.publishes is not None else None
        if published != elements:
            raise _Wrong(stage.name, f"publishes {published} elements, the model needs {elements}")
        return self.plan.values[stage.publishes or 0]

    def _sizes(self) -> None:
        plan, spec, kv = self.plan, self.spec, self.plan.kv
        ranks, options = plan.ranks, plan.options
        heads, replicas = max(1, spec.kv_heads // ranks), max(1, ranks // spec.kv_heads)
        shard = Shard(spec.hidden, spec.heads // ranks, heads, spec.head_dim, spec.ffn // ranks, -(-spec.vocab // ranks), replicas)
        if plan.shard != shard or spec.heads % ranks or spec.ffn % ranks or heads * ranks != spec.kv_heads * shard.kv_replicas:
            raise _Wrong("the plan", f"{plan.shard} is not 1/{ranks} of {spec.name}: {shard}")
        if ranks != (spec.lanes.count if spec.lanes else options.gpus):
            raise _Wrong("the plan", f"{ranks} ranks for {spec.name}")
        if (kv.page, kv.dtype) != (options.kv_page, options.kv_dtype):
            raise _Wrong("the plan", f"{kv} differs from the options")

    def _say(self, stage: Stage, message: str) -> None:
        self.found.append(Violation("data flow", stage.name, message))


def compare(plan: Plan, stage: Stage, needs: list[Need]) -> Iterator[Violation]:
    """Where a stage's reads differ from what it needs."""
    left = list(stage.reads)
    for need in needs:
        read = next((read for read in left if read.value == need.value.id and read.parts is need.parts), None)
        if read is None:
            message = f"does not read {need.value.name} ({need.parts.value} parts)"
            yield Violation("data flow", stage.name, message)
            continue
        left.remove(read)
        yield from _compare_read(stage, read, need)
    for read in left:
        message = f"reads {plan.values[read.value].name} ({read.parts.value} parts), which the model does not call for"
        yield Violation("data flow", stage.name, message)


def _compare_read(stage: Stage, read: Read, need: Need) -> Iterator[Violation]:
    name = need.value.name
    for what in ("scale", "residual", "previous_step"):
        if getattr(read, what) != getattr(need, what):
            yield Violation("data flow", stage.name, f"reads {name} with {what}={getattr(read, what)}, not {getattr(need, what)}")
    for block, (spans, needed) in enumerate(zip(read.spans, need.spans, strict=True)):
        holes = [hole for span in needed if (hole := first_hole(spans, span)) is not None]
        if holes:
            yield Violation("data flow", stage.name, f"block {block} needs {name}[{holes[0]}] and does not read it")
            return


def _whole(plan: Plan, elements: int) -> tuple[tuple[Span, ...], ...]:
    return (((0, elements),),) * plan.blocks


def _item_elements(shard: Shard, splits: int, items: Span) -> tuple[Span, ...]:
    """q of the query heads, k and v of the KV heads that a block's items touch."""
    heads = sorted({item // splits for item in range(*items)})
    group, size = shard.heads // shard.kv_heads, shard.head_dim
    k, v = shard.heads, shard.heads + shard.kv_heads
    vectors = [head * group + i for head in heads for i in range(group)] + [k + head for head in heads] + [v + head for head in heads]
    return tuple((vector * size, (vector + 1) * size) for vector in vectors)
