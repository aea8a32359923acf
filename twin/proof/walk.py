"""Compares the stages of a plan, one by one, with what the model says they must be and read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from twin.frozen import frozen
from twin.models.feeds import DenseFeed, ExpertFeed, NoFeed, Scoring
from twin.models.layers import Layer
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    Mamba2,
    NoMixer,
    ShortConvolution,
)
from twin.models.spec import DType, LaneHead, ModelSpec
from twin.models.weight import Weight
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span
from twin.plan.options import CollectiveKind, LateParts, Residual, Sampling
from twin.plan.types import Parts, Plan, Read, Shard, Stage, Value
from twin.proof.stored import PLAIN, multiplied, streams
from twin.proof.violation import Violation

MOST_SHAPES = 2  # of heads
SUMMED = (  # of which every rank has a share
    StageKind.O_PROJ,
    StageKind.DOWN,
    StageKind.SHARED_DOWN,
    StageKind.ROUTED_DOWN,
    StageKind.COLLECTIVE,
    StageKind.LANE_MEAN,
    StageKind.LM_HEAD,
)


def partials_of(plan: Plan, heads: int, dim: int) -> int:
    """Words for so many heads' outputs over a part of the positions: numbers of 16 bits in pairs, a
    maximum and a sum of each.
    """
    packed = 1 if plan.options.kv_dtype is DType.FP32 else 2
    return -(-heads * dim // packed) + 2 * heads


Spans = tuple[tuple[Span, ...], ...]  # [blocks][...]


@frozen
class Need:
    """One read that the computation calls for; `spans[block]` are the elements without which it is
    wrong.
    """

    value: Value
    spans: Spans
    parts: Parts = Parts.OWN
    scale: float = 1.0
    residual: bool = False
    previous_step: bool = False
    sequences: tuple[int, ...] | None = None  # [blocks] of which it uses the words; None: all


class Wrong(Exception):
    """The stages stop making sense here: nothing after this point can be compared."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.violation = Violation("data flow", stage, message)


@dataclass(slots=True)
class Walk:
    """Follows the model from the embedding to the token and takes the plan's stages one by one."""

    plan: Plan
    spec: ModelSpec
    at: int = 0
    found: list[Violation] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)  # values whose other parts may be added late
    # of those parts, by such a value, until they are added
    sums: dict[int, Value] = field(default_factory=dict)

    def step(self, body: Callable[[Walk], list[Need]]) -> None:
        """`body` takes the layers' stages and returns what the head adds to the residual."""
        plan = self.plan
        self._sizes()
        full = plan.options.sampling is Sampling.FULL
        needs = []
        if full:
            token = plan.stages[-1].publishes
            if token is None:
                raise Wrong(plan.stages[-1].name, "publishes no token although sampling=full")
            needs = [Need(plan.values[token], whole(plan, 1), previous_step=True)]
        self.take(StageKind.EMBED, -1, needs, elements=None)
        self._head(body(self), full)
        for past in self.sums:
            self.found.append(
                Violation(
                    "data flow",
                    "the plan",
                    f"the late parts of {plan.values[past].name} are summed and never added",
                )
            )
        if self.at != len(plan.stages):
            raise Wrong(plan.stages[self.at].name, "follows the end of the step")

    def _head(self, residual: list[Need], full: bool) -> None:
        plan, shard, lanes = self.plan, self.plan.shard, self.spec.lanes
        if lanes and lanes.head is not LaneHead.VOCABULARY:
            residual = [
                self.all(
                    self.gathered(
                        self.take(StageKind.LANE_MEAN, -1, residual, elements=shard.hidden)
                    )
                )
            ]
        stage = self.peek(StageKind.LM_HEAD, -1)
        each = 4 if full else 2
        head = self.take(
            StageKind.LM_HEAD,
            -1,
            residual,
            elements=each * plan.blocks,
            matrix=(shard.vocab, shard.hidden, 1),
        )
        if stage.matrix:
            self.check_stored(stage, stage.matrix, self.spec.end_weights()[-1])
        if head.owned != tuple((each * block, each * block + each) for block in range(plan.blocks)):
            what = "a summary of its logits" if full else "logit, index"
            self.say(stage, f"each block publishes {each} elements: {what}")
        head = self.gathered(head)
        need = self.all(head)
        if full:
            token = plan.values[plan.stages[-1].publishes or 0]
            need = Need(
                head,
                tuple(((0, head.elements),) if lo < hi else () for lo, hi in token.owned),
                need.parts,
            )
        self.take(StageKind.SAMPLE, -1, [need], elements=1 if full else None)

    def check_stored(self, stage: Stage, matrix: Matrix, weight: Weight) -> None:
        """Is a matrix stored as the model's is?"""
        stored = weight.format if self.spec.stored else None
        own = self.plan.attention is not None  # the engine runs the plan
        if own and stored is not None and stored.name in PLAIN:
            stored = None
        if not (streams(matrix, stored) if own else matrix.format == stored):
            self.say(stage, f"{weight.name} is stored as {stored}, not {matrix.format}")

    def gathered(self, value: Value) -> Value:
        """With a library collective, the value that holds every rank's part; it takes a stage of
        its own.
        """
        if self.plan.options.collective is not CollectiveKind.LIBRARY or self.at >= len(
            self.plan.stages
        ):
            return value
        stage = self.plan.stages[self.at]
        if stage.kind is not StageKind.COLLECTIVE:
            return value
        everything = tuple((span,) if span[0] < span[1] else () for span in value.owned)
        gathered = self.take(
            StageKind.COLLECTIVE,
            self.plan.stages[value.stage].layer,
            [Need(value, everything)],
            elements=value.elements,
        )
        if not gathered.pushed:
            self.say(stage, f"{gathered.name} is gathered but not marked as pushed")
        if gathered.owned != value.owned:
            message = f"blocks do not publish the elements of {gathered.name} that they read"
            self.say(stage, message)
        return gathered

    def residual(self, modules: list[Value]) -> list[Need]:
        """What the newest module, and the one `delay` layers before it, add to the residual."""
        lanes, layer = self.spec.lanes, len(modules) - 1
        self.modules.add(modules[-1].id)
        delay = self._delay()
        if not lanes or delay == 0 or (layer < delay and lanes.early_exchange):
            return [replace(self.all(modules[-1], residual=True), scale=self.spec.variant.residual)]
        scale = math.sqrt(lanes.count) if layer < delay else 1.0
        needs = [
            Need(
                modules[-1], whole(self.plan, modules[-1].elements), Parts.OWN, scale, residual=True
            )
        ]
        late = layer - delay
        if late >= 0:
            needs.append(self._late(modules[late]))
        return needs

    def _late(self, past: Value) -> Need:
        """The other ranks' parts of a module's output, or their sums, which are added once."""
        if self.plan.options.late_parts is not LateParts.REDUCED:
            return Need(past, whole(self.plan, past.elements), Parts.OTHERS, residual=True)
        self._sum_late_parts()
        summed = self.sums.pop(past.id, None)
        if summed is None:
            stage = self.plan.stages[min(self.at, len(self.plan.stages) - 1)]
            raise Wrong(
                stage.name, f"needs the late parts of {past.name}, which no stage before sums"
            )
        return self.all(summed, residual=True)

    def _sum_late_parts(self) -> None:
        """Takes the sums of late parts that stand next. Each is of one module's output, once;
        blocks sum what they own of it.

        A block publishes sums while it still waits for parts of others. That is safe because nobody
        but itself resets what it waits for.
        """
        plan = self.plan
        while (
            self.at < len(plan.stages)
            and plan.stages[self.at].late
            and plan.options.late_parts is LateParts.REDUCED
        ):
            stage = plan.stages[self.at]
            read = stage.reads[0] if stage.reads else None
            if read is None or read.value not in self.modules or read.value in self.sums:
                what = plan.values[read.value].name if read else "nothing"
                raise Wrong(
                    stage.name,
                    f"sums {what}, which is no module's output before it or was summed already",
                )
            past = plan.values[read.value]
            need = Need(
                past,
                tuple((span,) if span[0] < span[1] else () for span in past.owned),
                Parts.OTHERS,
            )
            self.sums[past.id] = self.take(
                StageKind.REDUCE, stage.layer, [need], elements=past.elements
            )
            if self.sums[past.id].owned != past.owned:
                self.say(
                    stage,
                    f"blocks do not publish the sums of the elements that they own of {past.name}",
                )
            if any(spans != needed for spans, needed in zip(read.spans, need.spans, strict=True)):
                self.say(stage, f"blocks read more of {past.name} than they own")
            if stage.layer != plan.stages[stage.index - 1].layer:
                self.say(stage, f"stands in layer {plan.stages[stage.index - 1].layer}")
            if stage.resets:
                self.say(stage, "resets something, which a stage that overlaps others must not do")

    def _delay(self) -> int:
        delay = self.plan.options.delay
        return delay if delay is not None else self.spec.lanes.delay if self.spec.lanes else 0

    def all(self, value: Value, *, residual: bool = False) -> Need:
        """Every element of every rank: a value that other ranks hold a share of has to be
        pushed.
        """
        shared = self.plan.ranks > 1 and self.plan.stages[value.stage].kind in SUMMED
        return Need(
            value,
            whole(self.plan, value.elements),
            Parts.ALL if shared else Parts.OWN,
            residual=residual,
        )

    def peek(self, kind: StageKind, layer: int) -> Stage:
        if kind is not StageKind.REDUCE:
            self._sum_late_parts()
        if self.at >= len(self.plan.stages):
            raise Wrong("the end of the step", f"a stage {kind.value} of layer {layer} is missing")
        stage = self.plan.stages[self.at]
        if (stage.kind, stage.layer) != (kind, layer):
            raise Wrong(stage.name, f"stands where the model needs {kind.value} of layer {layer}")
        return stage

    def take(
        self,
        kind: StageKind,
        layer: int,
        needs: list[Need],
        *,
        elements: int | None,
        matrix: tuple[int, int, int] | list[tuple[int, int, int]] | None = None,
    ) -> Value:
        """Compare the next stage with what it should be. `elements` is what it publishes, None for
        nothing.
        """
        stage = self.peek(kind, layer)
        self.at += 1
        self.found += compare(self.plan, stage, needs)
        has = tuple((m.rows, m.cols, m.unit) for m in stage.matrices)
        wanted = matrix if isinstance(matrix, list) else [matrix] if matrix else []
        if list(has) != wanted:
            raise Wrong(
                stage.name,
                f"its matrices (rows, cols, unit) are {list(has)}, the model needs {wanted}",
            )
        published = (
            self.plan.values[stage.publishes].elements if stage.publishes is not None else None
        )
        if published != elements:
            raise Wrong(stage.name, f"publishes {published} elements, the model needs {elements}")
        return self.plan.values[stage.publishes or 0]

    def _sizes(self) -> None:
        plan, spec, ranks = self.plan, self.spec, self.plan.ranks
        if ranks != (spec.lanes.count if spec.lanes else plan.options.gpus):
            raise Wrong("the plan", f"{ranks} ranks for {spec.name}")
        if not spec.layout and len(spec.windows) < spec.layers:
            raise Wrong("the plan", f"{len(spec.windows)} windows for {spec.layers} layers")
        shard = Shard(spec.hidden, -(-spec.vocab // ranks))
        if plan.shard != shard:
            raise Wrong("the plan", f"{plan.shard} is not 1/{ranks} of {spec.name}: {shard}")
        if bool(plan.attentions) != _alike(plan, spec):
            raise Wrong(
                "the plan",
                f"its attention is {plan.attention}; the kernel's is that of dense layers, or of "
                "experts', recurrent states' or short convolutions', and steps of one token",
            )
        shapes = _shapes(spec)
        if not plan.attentions:
            return
        if len(plan.attentions) != len(shapes):
            raise Wrong(
                "the plan",
                f"{len(plan.attentions)} attentions; {spec.name} has heads of {len(shapes)} shapes",
            )
        for attention, (heads, kv_heads, head_dim, shared) in zip(
            plan.attentions, shapes, strict=True
        ):
            own, replicas = max(1, kv_heads // ranks), max(1, ranks // kv_heads)
            has = (attention.heads, attention.kv_heads, attention.head_dim, attention.kv_replicas)
            wanted = (heads // ranks, own, head_dim, replicas)
            whole = heads % ranks == 0 and own * ranks == kv_heads * replicas
            if has != wanted or attention.values_are_keys != shared or not whole:
                raise Wrong("the plan", f"{attention} is not 1/{ranks} of {spec.name}: {wanted}")

    def say(self, stage: Stage, message: str) -> None:
        self.found.append(Violation("data flow", stage.name, message))


def compare(plan: Plan, stage: Stage, needs: list[Need]) -> Iterator[Violation]:
    """Where a stage's reads differ from what it needs, or come in another order."""
    left = list(stage.reads)
    taken: list[Read] = []
    for need in needs:
        read = next(
            (read for read in left if read.value == need.value.id and read.parts is need.parts),
            None,
        )
        if read is None:
            message = f"does not read {need.value.name} ({need.parts.value} parts)"
            yield Violation("data flow", stage.name, message)
            continue
        left.remove(read)
        taken.append(read)
        yield from _compare_read(stage, read, need)
    if not left and taken != list(stage.reads):
        wanted = ", ".join(plan.values[read.value].name for read in taken)
        message = f"its reads are not in the order in which they are taken: {wanted}"
        yield Violation("data flow", stage.name, message)
    for read in left:
        message = (
            f"reads {plan.values[read.value].name} ({read.parts.value} parts), which the model "
            "does not call for"
        )
        yield Violation("data flow", stage.name, message)


def _compare_read(stage: Stage, read: Read, need: Need) -> Iterator[Violation]:
    name = need.value.name
    for what in ("scale", "residual", "previous_step", "sequences"):
        if getattr(read, what) != getattr(need, what):
            yield Violation(
                "data flow",
                stage.name,
                f"reads {name} with {what}={getattr(read, what)}, not {getattr(need, what)}",
            )
    different = _difference(read.spans, need.spans)
    if different is not None:
        block, element, fault = different
        said = fault.format(f"{name}[{element}]")
        yield Violation("data flow", stage.name, f"block {block} {said}")


@lru_cache(maxsize=1024)
def _difference(has: Spans, needed: Spans) -> tuple[int, int, str] | None:
    """The first block that reads something else, an element that it lacks or has too much, and
    which of both. Layers that are alike are compared once.
    """
    if has == needed:
        return None
    for block, (spans, wanted) in enumerate(zip(has, needed, strict=True)):
        if spans == wanted:
            continue
        holes = [hole for span in wanted if (hole := first_hole(spans, span)) is not None]
        if holes:
            return block, holes[0], "needs {} and does not read it"
        more = [hole for span in spans if (hole := first_hole(wanted, span)) is not None]
        # it would lie where the kernel expects another, or count as known although nobody polls it
        if more:
            return block, more[0], "reads {}, which it does not use"
    return None


def whole(plan: Plan, elements: int) -> Spans:
    return (((0, elements),),) * plan.blocks


def _alike(plan: Plan, spec: ModelSpec) -> bool:
    """Neither layers described one by one, nor several formats, streams or tokens."""
    options = plan.options
    several = options.tokens > 1 or options.expert_ranks > 1 or options.residual is Residual.SLICED
    mixers = [layer.mixer for layer in spec.layout]
    if spec.hyper:
        return _compresses(plan, spec) and not several
    together = any(isinstance(m, GroupedAttention) and m.whole_qk_norm for m in mixers)
    several |= together and options.gpus > 1  # squares of divided heads are not exchanged
    odd = any(isinstance(layer.feed, ExpertFeed) or not _attends(layer) for layer in spec.layout)
    known = not spec.layout or (
        (odd or 0 < len(_shapes(spec)) <= MOST_SHAPES)
        and all(map(_known, spec.layout))
        and len({_has(layer) for layer in spec.layout if _attends(layer)}) == 1
        and (len(_shapes(spec)) == 1 or all(map(_only_shaped, spec.layout)))
        and len({layer.mixer for layer in spec.layout if _carries(layer)}) < 2
        and len({_gated(layer) for layer in spec.layout} - {None}) < 2
    )
    return known and multiplied(spec) and not several


def _compresses(plan: Plan, spec: ModelSpec) -> bool:
    """Does every layer attend compressed entries, on a CPU, whose kernel alone has code for it? All
    heads are alike, and so are those that score entries.
    """
    kinds = [layer.mixer for layer in spec.layout]
    alike = {
        (m.heads, m.head_dim, m.rope_dim, m.q_rank, m.o_groups, m.o_rank, m.window)
        for m in kinds
        if isinstance(m, CompressedAttention)
    }
    indexed = {
        (m.index_heads, m.index_dim, m.top_k)
        for m in kinds
        if isinstance(m, CompressedAttention) and m.top_k
    }
    feeds = [layer.feed for layer in spec.layout]
    return (
        plan.limits.oversubscribe
        and multiplied(spec)
        and all(isinstance(m, CompressedAttention) for m in kinds)
        and len(alike) == 1
        and len(indexed) < 2
        and all(isinstance(feed, ExpertFeed) and _chosen_plainly(feed) for feed in feeds)
    )


def _chosen_plainly(feed: ExpertFeed) -> bool:
    """By a router or a table, without groups; with no gate but silu, which may be clamped."""
    other = feed.bias or feed.gain != 1.0 or feed.offset != 0.0 or feed.shared_gate
    return feed.groups == feed.top_groups == 1 and not other and 0 < feed.top_k <= feed.experts


def _known(layer: Layer) -> bool:
    """Is the layer one that the kernel has code for: grouped attention, a recurrent state or a
    short convolution, and a plain feed, dense or routed, or one of both alone?
    """
    mixer, feed = layer.mixer, layer.feed
    if isinstance(mixer, GroupedAttention):
        added = mixer.qkv_bias or mixer.whole_qk_norm
        odd = (mixer.values_are_keys or mixer.value_norm) and (mixer.output_gate or added)
        if odd or (mixer.output_gate and added):
            return False
    elif isinstance(mixer, ShortConvolution):
        if mixer.conv < 2:  # it looks back
            return False
    elif isinstance(mixer, NoMixer):
        if isinstance(feed, NoFeed):
            return False
    elif not isinstance(mixer, DeltaNet | Mamba2) or not _recurs(mixer):
        return False
    if isinstance(feed, NoFeed):
        return True
    if isinstance(feed, DenseFeed):
        return feed.limit is None
    plain = feed.groups == feed.top_groups == 1 and feed.scoring is not Scoring.SQRT_SOFTPLUS
    # shared experts have no gate but silu
    other = (feed.bias, feed.limit is not None, feed.gain != 1.0, feed.offset != 0.0)
    shared = not any(other) if feed.shared_width else not feed.shared_gate
    if not feed.gated and any(other):  # these are of a gate and of what passes it
        return False
    return plain and shared and not feed.hashed and 0 < feed.top_k <= feed.experts


def _attends(layer: Layer) -> bool:
    return isinstance(layer.mixer, GroupedAttention)


def _carries(layer: Layer) -> bool:
    """Has the layer a state, or a history?"""
    return not _attends(layer) and not isinstance(layer.mixer, NoMixer)


def _gated(layer: Layer) -> bool | None:
    return None if isinstance(layer.feed, NoFeed) else layer.feed.gated


def _recurs(mixer: DeltaNet | Mamba2) -> bool:
    """Heads of whole loads, and a convolution that looks back."""
    whole = (mixer.key_dim | mixer.value_dim) % 4 == 0
    return whole and mixer.conv > 1 and mixer.value_heads % mixer.key_heads == 0


def _shapes(spec: ModelSpec) -> list[tuple[int, int, int, bool]]:
    """The distinct (query heads, key heads, elements, are keys the values) of its layers."""
    if not spec.layout:
        return [(spec.heads, spec.kv_heads, spec.head_dim, False)]
    found: list[tuple[int, int, int, bool]] = []
    for layer in spec.layout:
        mixer = layer.mixer
        one = None
        if isinstance(mixer, GroupedAttention):
            one = (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.values_are_keys)
        elif isinstance(mixer, CompressedAttention):  # keys are values: one head, cached once
            one = (mixer.heads, 1, mixer.head_dim, False)
        found += [one] if one and one not in found else []
    return found


def _only_shaped(layer: Layer) -> bool:
    """Attention without what no family has next to heads of several shapes."""
    return _attends(layer) and not any(_has(layer)[2:])


def _has(layer: Layer) -> tuple[bool, ...]:
    """What all layers must have in common: norms first, then what heads of one shape alone have."""
    mixer = layer.mixer
    assert isinstance(mixer, GroupedAttention)
    norms = (mixer.qk_norm, mixer.value_norm)
    added = (mixer.qkv_bias, mixer.o_bias, mixer.sinks, mixer.output_gate)
    return (*norms, *added, mixer.whole_qk_norm)


def first_hole(spans: set[Span] | tuple[Span, ...], needed: Span) -> int | None:
    """The first element of `needed` that no span holds."""
    at, end = needed
    for lo, hi in sorted(spans):
        if lo > at:
            break
        at = max(at, hi)
    return at if at < end else None
