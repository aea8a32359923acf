"""Which nodes reach a speed with a model: floors first, then simulations, then draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twin.batching.prices import rates_of
from twin.calibrate.known_error import first_error, known_error
from twin.calibrate.on_record import step_at
from twin.errors import TwinError
from twin.hardware.floor import ceiling
from twin.hardware.load import load_node, node_names
from twin.models.load import load_model
from twin.schedule.options import plan_for
from twin.study import interval
from twin.study.depth import Depths, repeating, times
from twin.study.hardware import node_on_file
from twin.study.interval import Draws
from twin.study.optimise import found_by, search, searched
from twin.study.options import Plain
from twin.study.point import Point, Row
from twin.study.runner import Runner

DEPTHS = (2, 4)  # layers that each draw is simulated with
SEED = 1
CLOSE = 1.5  # a slower node may reach the speed in a draw
SURE, LIKELY, PERHAPS, NO = "yes", "likely", "perhaps", "no"


@dataclass(frozen=True, slots=True)
class Fit:
    """A node and what it does with the model. `low` and `high` hold eight of ten, by `rests`."""

    node: str
    reaches: str
    tokens_per_s: float
    low: float | None
    high: float | None
    rests: str  # what the interval is from
    floor_tokens_per_s: float
    usd_per_hour: float | None
    usd_per_million: float | None
    kwh_per_million: float | None
    measured: float | None = None  # tokens/s of a run on record, near these positions
    plan: str = ""  # options that are no defaults and were not given

    def json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Found:
    """`fits`: those that reach the speed with some chance, the cheapest first; `missed`: how many
    others were looked at, by why they do not.
    """

    fits: tuple[Fit, ...]
    missed: dict[str, int]


def fit_for(
    model: str,
    target: float,
    options: tuple[tuple[str, Plain], ...],
    runner: Runner,
    *,
    draws: int,
    own: Sequence[str] = (),
    usd_per_hour: float | None = None,
    every: bool = False,
    plans: bool | None = None,
) -> Found:
    """The fewest GPUs of each device that reach the speed, and fewer that perhaps do; with `every`
    all nodes that do. `own`: nodes of the user's files besides those on file. `plans`: the best one
    of each node (True), default options (False), or the best where these do not reach the speed.
    Raises TwinError.
    """
    names = [name for name in node_names() if load_node(name).device.sharing is None]
    points = [Point(model, name, options) for name in (*names, *own)]
    left = [point for point in points if _most(point) >= target]
    some = _every(left, runner) if every else _smallest(left, target, runner)
    near = [point for point, speed in some.items() if (speed or 0.0) * CLOSE >= target]
    rows = dict(zip(near, runner.rows(near, "nodes that come close"), strict=True)) if near else {}
    rows = dict(_planned(rows, target, plans, runner))
    problems = sum(speed is None for speed in some.values())
    problems += sum(bool(row.problem) for row in rows.values())
    close = {p: row for p, row in rows.items() if row.tokens_per_s * CLOSE >= target}
    _draw_all([p for p in close if not known_error(p.on_node(), p.spec())], runner, draws)
    made = [
        replace(_fit(point, row, target, runner, draws, usd_per_hour), plan=_plan(point, options))
        for point, row in close.items()
    ]
    fits = [fit for fit in made if fit.reaches != NO]
    missed = {
        "have a floor below the speed": len(points) - len(left),
        "have no plan or no room": problems,
        "are too slow": len(some) - problems - len(fits),
        "have more GPUs than it takes (--every lists them)": len(left) - len(some),
    }
    return Found(tuple(sorted(fits, key=_cost)), missed)


def _planned(
    rows: dict[Point, Row], target: float, plans: bool | None, runner: Runner
) -> Iterator[tuple[Point, Row]]:
    """Each node's point by the plan that is taken there, and its row. All its GPUs are used: fewer
    are a node of their own.
    """
    for point, row in rows.items():
        wanted = plans if plans is not None else row.tokens_per_s < target and searched(point)
        if row.problem or not wanted or point.on_node().gpus == 1:
            yield point, row
            continue
        found = found_by(search(point, gpus=False), runner, f"plans on {point.node}")
        best = found.best.way.of(point)
        yield best, runner.rows([best])[0]


def _every(points: Sequence[Point], runner: Runner) -> dict[Point, float | None]:
    """Tokens per second of each, of a deep model about; None of a node without a plan or room."""
    fits = runner.rows([replace(point, steps=0) for point in points], "nodes with room")
    there = [point for point, row in zip(points, fits, strict=True) if not row.problem]
    speeds = dict(zip(there, _about(there, runner), strict=True)) if there else {}
    return {point: speeds.get(point) for point in points}


def _about(points: Sequence[Point], runner: Runner) -> list[float | None]:
    """From a few layers of each, where these repeat."""
    depths = repeating(points[0].spec())
    short = [depths.short(point) if depths else (point,) for point in points]
    rows = iter(runner.rows([one for some in short for one in some], "nodes, a few layers"))
    speeds: list[float | None] = []
    for point, some in zip(points, short, strict=True):
        found = tuple(next(rows) for _ in some)
        if any(row.problem for row in found):
            speeds.append(None)
            continue
        step_s = depths.extended(point, found) if depths else found[0].step_s
        speeds.append(found[0].tokens_per_step / (step_s + found[0].draft_s))
    return speeds


def _plan(point: Point, given: tuple[tuple[str, Plain], ...]) -> str:
    return ", ".join(
        f"{name}={value}" for name, value in point.options if (name, value) not in given
    )


def _smallest(points: Sequence[Point], target: float, runner: Runner) -> dict[Point, float | None]:
    """Each device's nodes from the smallest up until one reaches the speed, all devices at once."""
    waiting: dict[str, list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda one: node_on_file(one.node).gpus):
        waiting[node_on_file(point.node).device.name].append(point)
    found: dict[Point, float | None] = {}
    while waiting:
        now = {device: left.pop(0) for device, left in waiting.items()}
        found |= _every(list(now.values()), runner)
        waiting = {
            device: left
            for device, left in waiting.items()
            if left and (found[now[device]] or 0.0) < target
        }
    return found


def _draw_all(points: Sequence[Point], runner: Runner, draws: int) -> None:
    """All draws in one go, so that no core waits between nodes."""
    if points and draws:
        depths = Depths(*DEPTHS)
        varied = [one for point in points for one in (point, *_varied(point, draws))]
        runner.rows([short for one in varied for short in depths.short(one)], "draws")


def _most(point: Point) -> float:
    """Tokens per second of the weights alone at the ceiling of all GPUs, a bound for any engine."""
    node = node_on_file(point.node)
    spec = load_model(point.model)
    if spec.layout:  # experts: which are read is drawn
        return float("inf")
    return node.gpus * ceiling(node.device).value / _least_bytes(point)


def _least_bytes(point: Point) -> float:
    """A lower bound of a step's bytes: the weights but one embedding, in the smallest format that
    an option could make of them.
    """
    chosen = dict(point.options)
    if {"weight_dtype", "format", "layers", "draft", "batch"} & chosen.keys():
        return 1.0
    spec = load_model(point.model)
    return float(max(1, spec.stored_bytes - spec.vocab * spec.hidden * spec.dtype.bytes))


def _fit(
    point: Point, row: Row, target: float, runner: Runner, draws: int, usd: float | None
) -> Fit:
    node, speed = node_on_file(point.node), row.tokens_per_s
    known, rests = known_error(node, point.spec(), point.chosen()), ""
    low = high = None
    if known is not None:
        low, high = known.interval(speed)
        rests = interval.from_runs(known)
    elif draws:
        low, high = _drawn(point, row, runner, draws)
        rests = interval.from_draws(draws)
    rates, total = rates_of(node, usd), row.total_tokens_per_s
    return Fit(
        node.name,
        _reaches(target, speed, low, high),
        speed,
        low,
        high,
        rests,
        1 / row.floor_s,
        rates.usd_per_hour(node),
        rates.usd_per_million(node, total),
        rates.kwh_per_million(node, total),
        on_record(point),
    )


def on_record(point: Point) -> float | None:
    """Tokens per second that a run of the same model on the node came to."""
    case = point.case()
    run = step_at(plan_for(case.spec, case.node, **case.options()), case.node)
    return run.tokens_per_s if run else None


def _reaches(target: float, speed: float, low: float | None, high: float | None) -> str:
    if low is not None and low >= target:
        return SURE
    if speed >= target:
        return LIKELY
    return PERHAPS if high is not None and high >= target else NO


def drawn(point: Point, row: Row, runner: Runner, count: int) -> list[float]:
    """Speeds of `count` draws of the node's numbers, from models of a few layers."""
    base, *found = times(
        [point, *_varied(point, count)], runner, Depths(*DEPTHS), f"draws of {point.node}"
    )
    return [
        row.tokens_per_s * base.step_s / one.step_s
        for one in found
        if not one.problem and one.step_s
    ]


def _varied(point: Point, count: int) -> list[Point]:
    changes = interval.settings(point.on_node(), Draws(count, SEED))
    return [point.with_settings(*one) for one in changes]


def _drawn(point: Point, row: Row, runner: Runner, count: int) -> tuple[float | None, float | None]:
    try:
        speeds = drawn(point, row, runner, count)
    except TwinError:
        return None, None
    if not speeds:
        return None, None
    new = first_error(point.on_node(), point.spec(), point.chosen())
    return interval.about(row.tokens_per_s, speeds, new)


def _cost(fit: Fit) -> tuple[bool, float, float]:
    """Those with a price first, the cheapest token first; the others by speed."""
    usd = fit.usd_per_million
    return usd is None, usd if usd is not None else 0.0, -fit.tokens_per_s
