"""The plan of a model on a node that the twin predicts to be fastest: GPUs used, what every rank
computes alike, where the residual lies, how experts are dealt, splits of the cache, and the format.

Floors first: a number of GPUs, or a format, whose bytes alone take longer than the best step so far
is not simulated. What is left is searched by coordinate descent: all single changes of a plan, then
the best ones together, until nothing helps. Plans are compared coarsely: by a few layers of a deep
model (twin/study/depth.py), by one GPU that stands for all, by few steps where steps are drawn. The
closest are compared by all layers, and the best one is simulated as `twin simulate` does. How far
that ends from trying everything: studies/best-plans.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TypeVar

from twin.cost.model_floor import model_bytes
from twin.cost.routing import STEPS
from twin.errors import PlanError, TwinError
from twin.hardware.floor import floor_s
from twin.hardware.load import counted
from twin.hardware.types import Node
from twin.models.feeds import ExpertFeed
from twin.models.spec import ModelSpec
from twin.plan.options import Common, LatentCache, LateParts, Options, Residual
from twin.plan.ranges import GPUS
from twin.plan.types import Plan
from twin.schedule.choose import chooser_of
from twin.schedule.options import plan_for
from twin.study.depth import repeating
from twin.study.options import Plain
from twin.study.point import Point, Row
from twin.study.runner import Runner
from twin.study.whatif import with_steps

T = TypeVar("T")
# A search yields the points that it needs and is sent their rows: so a terminal and a page can wait
# for them each in its own way.
Steps = Generator[Sequence[Point], Sequence[Row], T]
Value = tuple[tuple[str, Plain], ...]  # options that make it; none: the standard one
Axis = tuple[Value, ...]  # the standard value first

STANDARD: Value = ()
# options whose values are searched; naming one of them means a plan of one's own
SEARCHED = (
    *("common", "residual", "expert_ranks", "late_parts", "latent_cache", "attention_splits"),
)
KINDS = {
    "common": Common,
    "residual": Residual,
    "late_parts": LateParts,
    "latent_cache": LatentCache,
}
OF_SPLITS = ("attention_splits", "split_positions", "window_splits")
ROUNDS = 4  # of descent, at most: a round tries all single changes (judged)
# A step that another plan beats by less is as good: of such plans one that the engine runs is
# taken, and else the one with the fewest options. A third of what the search may lose.
TIE = 0.003
# Fewer GPUs, planned as the best so far, that take this much longer are left alone (judged: their
# other plans would have to gain so much more than those of all GPUs).
FAR = 0.15
# Plans so close to the best are simulated with all layers, the fastest ones: a few layers say no
# more than that of plans whose steps differ by their routing.
CLOSE, MOST_CLOSE = 0.015, 3
DRAWN = 5  # steps that plans are compared by where steps differ by their routing: all draw the same


@dataclass(frozen=True, slots=True)
class Way:
    """How a model may be run on a node."""

    gpus: int
    format: str = ""  # empty: the model's own
    options: Value = STANDARD

    def of(self, point: Point) -> Point:
        """The point run this way."""
        count, device = counted(point.node)
        node = point.node if count == self.gpus else f"{self.gpus}x{device}"
        chosen = dict(self.options) | ({"format": self.format} if self.format else {})
        return with_steps(replace(point, node=node).with_options(**chosen))

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.options]
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return ", ".join([gpus, *([self.format] if self.format else []), *said])


@dataclass(frozen=True, slots=True)
class Tried:
    """A way and its step."""

    way: Way
    step_s: float
    whole: bool  # by all layers; else from a few of them
    only_simulated: str = ""  # why no engine of ours runs it


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    ranking: tuple[Tried, ...]  # fastest first; of equal ones what the engine runs
    standard: Way  # all GPUs, the model's own format, default options
    simulated: int  # plans
    left_out: tuple[str, ...]  # numbers of GPUs and formats, with the reason

    @property
    def best(self) -> Tried:
        return self.ranking[0]

    def of(self, way: Way) -> Tried | None:
        return next((tried for tried in self.ranking if tried.way == way), None)


def found_by(steps: Steps[T], runner: Runner, what: str) -> T:
    """A search, its points computed by a runner."""
    try:
        points = next(steps)
        while True:
            points = steps.send(runner.rows(points, what))
    except StopIteration as end:
        value: T = end.value
        return value


def searched(point: Point) -> bool:
    """Is a plan looked for where the user says nothing of one? Where several GPUs may be used, and
    none of the options is named that a search would choose.
    """
    return point.on_node().gpus > 1 and not dict(point.options).keys() & {*SEARCHED, *OF_SPLITS}


def together(searches: Sequence[Steps[T]], runner: Runner, what: str) -> list[T | TwinError]:
    """Searches side by side: their points are computed in common batches, so that no core waits.
    A search's mistake stands in place of what it finds.
    """
    answers: dict[int, T | TwinError] = {}
    wanted = {at: _sent(answers, at, steps, None) for at, steps in enumerate(searches)}
    while len(answers) < len(searches):
        left = [at for at in wanted if at not in answers]
        rows = iter(runner.rows([point for at in left for point in wanted[at]], what))
        for at in left:
            some = [next(rows) for _ in wanted[at]]
            wanted[at] = _sent(answers, at, searches[at], some)
    return [answers[at] for at in range(len(searches))]


def _sent(
    answers: dict[int, T | TwinError], at: int, steps: Steps[T], rows: Sequence[Row] | None
) -> Sequence[Point]:
    """The points that a search needs next, or none after its answer."""
    try:
        return next(steps) if rows is None else steps.send(rows)
    except StopIteration as end:
        answers[at] = end.value
    except TwinError as error:
        answers[at] = error
    return ()


def search(
    point: Point,
    *,
    formats: Sequence[str] = (),
    gpus: bool = True,
    starts: Sequence[Value] = (),
    confirm: bool = True,
) -> Steps[Found]:
    """The best way to run the point's model on its node. Options that the point names stay.

    `formats` are searched besides the model's own. Without `gpus` all of the node's are used.
    `starts`: options that are best elsewhere, tried first. Without `confirm` the best plan's step
    is left as plans are compared. Raises the TwinError of the standard plan where no way can be
    planned.
    """
    made = Search(point, starts)
    node = point.on_node()
    counts = [n for n in reversed(GPUS) if n < node.gpus] if gpus else []
    for form in ("", *formats):
        for count in (node.gpus, *counts):
            yield from made.descend(count, form)
    yield from made.settle()
    if confirm:
        yield from made.confirm(Way(node.gpus))
    return made.found(Way(node.gpus))


def among(point: Point, some: Sequence[Way]) -> Steps[Found]:
    """The best of a few ways, such as those that are best on other nodes, and of default options.
    Raises the TwinError of the standard plan where none can be planned.
    """
    made, standard = Search(point), Way(point.on_node().gpus)
    for way in dict.fromkeys((standard, *some)):
        yield from made.try_one(way)
    yield from made.close()
    return made.found(standard)


def ways(point: Point, *, formats: Sequence[str] = (), gpus: bool = True) -> Iterator[Way]:
    """All of those that `search` chooses from."""
    node = point.on_node()
    for form in ("", *formats):
        for count in [node.gpus, *(n for n in reversed(GPUS) if gpus and n < node.gpus)]:
            try:
                each = axes(Way(count, form).of(point))
            except TwinError:
                continue
            for options in _product(each):
                yield Way(count, form, options)


def axes(point: Point) -> tuple[Axis, ...]:
    """What can be chosen of the point's plan, beyond what it names. A value that makes the same
    stages is left out, and so is one that cannot be planned. Raises TwinError.
    """
    plan = _few_layers(point)
    found = []
    for names, values in _alternatives(plan):
        if not dict(point.options).keys() & set(names):
            live = [value for value in values if _other(point, plan, value)]
            if live:
                found.append((STANDARD, *live))
    return tuple(found)


def _alternatives(plan: Plan) -> Iterator[tuple[Sequence[str], list[Value]]]:
    options = plan.options
    for name, kind in KINDS.items():
        others = [one.value for one in kind if one is not getattr(options, name)]
        yield (name,), [((name, value),) for value in others]
    if plan.routed:
        groups = [n for n in GPUS if n <= plan.ranks and n != options.expert_ranks]
        yield ("expert_ranks",), [(("expert_ranks", n),) for n in groups]
    own = _splits(plan)
    yield OF_SPLITS, [_splits_value(plan, n) for n in (own // 2, 2 * own) if n]


def _splits(plan: Plan) -> int:
    """Of each cached head; 0 where nothing is split."""
    if plan.attention is not None:
        return plan.attention.splits
    return max((s.scan.splits for s in plan.stages if s.scan and s.scan.entries > 1), default=0)


def _splits_value(plan: Plan, splits: int) -> Value:
    """So many, and a split has as many positions as in the standard plan before further ones take
    any.
    """
    own = plan.attention
    if own is None:
        return (("attention_splits", splits),)
    first = plan.options.split_positions
    if first is None:
        first = chooser_of(plan.limits).first_positions(
            plan.options, group=own.group, head_dim=own.head_dim
        )
    return (("attention_splits", splits), ("split_positions", first))


def _few_layers(point: Point) -> Plan:
    """Its plan, of a deep model with a few layers: which options matter is seen there."""
    depths = repeating(point.spec())
    case = (depths.short(point)[-1] if depths else point).case()
    return plan_for(case.spec, case.node, **case.options())


def _other(point: Point, plan: Plan, value: Value) -> bool:
    try:
        other = _few_layers(point.with_options(**dict(value)))
    except TwinError:
        return False
    return (other.stages, other.attention) != (plan.stages, plan.attention)


def _product(each: Sequence[Axis]) -> Iterator[Value]:
    if not each:
        yield STANDARD
        return
    for rest in _product(each[1:]):
        for value in each[0]:
            yield _joined([value, rest])


def _joined(values: Sequence[Value]) -> Value:
    return tuple(sorted(pair for value in values for pair in value))


class Search:
    """Owns the steps that are known, and the best of them."""

    def __init__(self, point: Point, starts: Sequence[Value] = ()) -> None:
        self._point = replace(point, steps=STEPS)
        self._starts = starts
        self._steps: dict[Way, float] = {}  # seconds; infinite without a plan
        self._problem = ""
        self._left_out: list[str] = []
        self._deep: dict[Way, float] = {}  # of the deeper short model
        self._whole: set[Way] = set()  # simulated with all layers
        self._confirmed: Way | None = None  # with all GPUs too: the answer
        self._centres: set[Way] = set()  # whose single changes have been tried

    def descend(self, gpus: int, form: str) -> Steps[None]:
        """One number of GPUs, one format."""
        standard = Way(gpus, form)
        if (why := self.hopeless(standard)) or (why := (yield from self._refused(standard))):
            self._left_out.append(f"{standard}: {why}")
            return
        each = axes(standard.of(self._point))
        best = self._best()
        yield from self.time([standard])  # first: others are compared with it
        likely = [best.options] if best else self._starts
        starts = [replace(standard, options=_carried(options, each)) for options in likely]
        yield from self.time(starts)
        at = min((standard, *starts), key=self._steps.__getitem__)
        if best is not None and self._steps[at] > self._steps[best] * (1 + FAR):
            return
        for _ in range(ROUNDS):
            self._centres.add(at)
            further = yield from self._round(at, each)
            if further == at:
                return
            at = further

    def try_one(self, way: Way) -> Steps[None]:
        """A way by itself, next to the standard plan of its GPUs and format."""
        standard = self._standard(way)
        if not self.hopeless(standard) and not (yield from self._refused(standard)):
            yield from self.time([standard])
            yield from self.time([way])

    def settle(self) -> Steps[None]:
        """The closest plans by all layers, and the changes of the best of them: where all layers
        see another one in front than a few layers did, its changes have not been tried.
        """
        for _ in range(ROUNDS):
            yield from self.close()
            best = min(sorted(self._whole, key=str), key=self._steps.__getitem__, default=None)
            if best is None or best in self._centres:
                return
            self._centres.add(best)
            each = axes(replace(best, options=STANDARD).of(self._point))
            yield from self._round(best, each)

    def _round(self, at: Way, each: Sequence[Axis]) -> Steps[Way]:
        """All single changes of a way, then the best of each axis together."""
        changes = [
            {value: _changed(at, axis, value) for value in axis if _value(at, axis) != value}
            for axis in each
        ]
        single = [way for moves in changes for way in moves.values()]
        yield from self.time(single)
        better = []
        for axis, moves in zip(each, changes, strict=True):
            value = min(moves, key=lambda one: self._steps[moves[one]])
            if self._steps[moves[value]] < self._steps[at]:
                better.append((self._steps[moves[value]], axis, value))
        together, combined = at, []
        for _, axis, value in sorted(better, key=lambda one: one[0]):
            together = _changed(together, axis, value)
            combined.append(together)
        yield from self.time(combined)
        return min([at, *single, *combined], key=self._steps.__getitem__)

    def time(self, some: Sequence[Way]) -> Steps[None]:
        """Steps of ways that are not known yet."""
        new = [way for way in dict.fromkeys(some) if way not in self._steps]
        short = [self._short(way) for way in new]
        rows = iter((yield [one for each in short for one in each]))
        for way, each in zip(new, short, strict=True):
            found = [next(rows) for _ in each]
            problem = next((row.problem for row in found if row.problem), "")
            self._problem = self._problem or problem
            self._steps[way] = float("inf") if problem else self._whole_s(way, found)

    def _coarse(self, way: Way) -> Point:
        """What plans are compared by, with all layers."""
        point = way.of(self._point)
        return replace(point, steps=min(point.steps, DRAWN), representative=True)

    def _short(self, way: Way) -> tuple[Point, ...]:
        """What is simulated to know a way's step: two depths of the standard plan of its GPUs and
        format, and the deeper one of all others. A difference of two would be that of two draws
        where steps are drawn.
        """
        point = self._coarse(way)
        depths = repeating(point.spec())
        if depths is None:
            return (point,)
        return (
            depths.short(point)[-1:] if self._standard(way) in self._deep else depths.short(point)
        )

    def _standard(self, way: Way) -> Way:
        return replace(way, options=STANDARD)

    def _whole_s(self, way: Way, rows: Sequence[Row]) -> float:
        """A step of all layers: what a deep model gains in a few of them it gains in all."""
        point = self._coarse(way)
        depths, spec = repeating(point.spec()), point.spec()
        times = [_mean_s(row) for row in rows]
        self._deep[way] = times[-1]
        if depths is None or spec.layers <= depths.deep:
            return times[-1]
        if len(times) == 2:
            return depths.line(spec.layers, *times)
        standard = self._standard(way)
        share = spec.layers / depths.deep
        if point.steps > STEPS:
            share = _routed(spec, spec.layers) / _routed(spec, depths.deep)
        return self._steps[standard] + (times[-1] - self._deep[standard]) * share

    def close(self) -> Steps[None]:
        """All layers of the few ways that may be the best."""
        left = [way for way in self._steps if way not in self._whole]
        ordered = sorted(left, key=self._steps.__getitem__)[:MOST_CLOSE]
        if not ordered:
            return
        most = min(self._steps.values()) * (1 + CLOSE)
        near = [way for way in ordered if self._steps[way] <= most < float("inf")]
        rows = yield [self._coarse(way) for way in near]
        for way, row in zip(near, rows, strict=True):
            self._whole.add(way)
            self._steps[way] = float("inf") if row.problem else _mean_s(row)

    def confirm(self, standard: Way) -> Steps[None]:
        """The best way with all GPUs and steps, as `twin simulate` takes it."""
        best = self.found(standard).best.way
        (row,) = yield [best.of(self._point)]
        self._steps[best], self._confirmed = row.step_s, best

    def found(self, standard: Way) -> Found:
        """All that can be run, the fastest first but for ties."""
        known = {way: s for way, s in self._steps.items() if s < float("inf")}
        if not known:
            standard.of(self._point).case().plan()  # raises what is wrong with it
            raise PlanError(self._problem)
        ordered = sorted(
            (way not in self._whole, s, len(way.options), str(way), way) for way, s in known.items()
        )
        tried = [
            Tried(way, s, not short, self._only_simulated(way)) for short, s, *_, way in ordered
        ]
        most = tried[0].step_s * (1 + TIE)
        equal = [one for one in tried if one.whole and one.step_s <= most]
        equal.sort(key=lambda one: (bool(one.only_simulated), len(one.way.options), one.step_s))
        if self._confirmed is not None:
            equal = [one for one in tried if one.way == self._confirmed]
        rest = [one for one in tried if one not in equal]
        return Found((*equal, *rest), standard, len(self._steps), tuple(self._left_out))

    def _best(self) -> Way | None:
        known = {way: s for way, s in self._steps.items() if s < float("inf")}
        return min(known, key=known.__getitem__) if known else None

    def hopeless(self, way: Way) -> str:
        """Why its bytes alone take longer than the best step. Computers whose caches serve a step
        have no such floor.
        """
        best = self._best()
        try:
            point = way.of(self._point)
            node = point.on_node()
        except TwinError as error:
            return str(error)
        if best is None or node.device.sharing is not None:
            return ""
        least_s = _least_s(point, node)
        if least_s <= self._steps[best]:
            return ""
        return f"its bytes alone take {least_s * 1e6:.0f} us, a step on {best} takes less"

    def _refused(self, way: Way) -> Steps[str]:
        """Why it cannot be planned, or has no room."""
        (row,) = yield [replace(way.of(self._point), steps=0)]
        self._problem = self._problem or row.problem
        return row.problem

    def _only_simulated(self, way: Way) -> str:
        return _few_layers(way.of(self._point)).simulation_only() or ""


def _mean_s(row: Row) -> float:
    return mean(row.step_times_s or (row.step_s,))


def _routed(spec: ModelSpec, layers: int) -> int:
    """How many of the first layers choose experts."""
    return sum(isinstance(spec.layer(at).feed, ExpertFeed) for at in range(layers))


def _least_s(point: Point, node: Node) -> float:
    case = point.case()
    own = {"weight_dtype": case.spec.dtype, "kv_dtype": case.spec.dtype}
    options = Options(**(own | case.options()))
    return floor_s(node.device, node.gpus, model_bytes(case.spec, options))


def _value(way: Way, axis: Axis) -> Value:
    """The axis' value that a way has."""
    chosen = dict(way.options)
    return next((v for v in axis[1:] if v and dict(v).items() <= chosen.items()), STANDARD)


def _changed(way: Way, axis: Axis, value: Value) -> Way:
    names = {name for one in axis for name, _ in one}
    kept = tuple((name, chosen) for name, chosen in way.options if name not in names)
    return replace(way, options=_joined([kept, value]))


def _carried(options: Value, each: Sequence[Axis]) -> Value:
    """Values of another number of GPUs, where they are there too; of more groups of experts than
    there are ranks, the most.
    """
    chosen: Mapping[str, Plain] = dict(options)
    found = []
    for axis in each:
        same = [v for v in axis[1:] if dict(v).items() <= chosen.items()]
        if not same and "expert_ranks" in chosen and axis[-1] and axis[-1][0][0] == "expert_ranks":
            same = [axis[-1]]
        found += same[:1]
    return _joined(found)
