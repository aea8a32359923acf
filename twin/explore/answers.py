"""What the explorer says of a case or a sweep, part by part: the first one soon, the rest while it
is read.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import product
from typing import Any

from twin.batching.prices import Rates, rates_of
from twin.calibrate.known_error import KnownError, first_error, known_error
from twin.calibrate.on_record import step_at
from twin.cost.model_floor import model_floor_s
from twin.cost.prompt import prompt_time
from twin.errors import TwinError
from twin.explore.processes import Waiting
from twin.explore.rows import Progress, Rows, Steps
from twin.explore.view import View, ViewCase
from twin.hardware.number import Kind
from twin.hardware.override import interval as range_of
from twin.hardware.override import numbers
from twin.hardware.types import Node
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.schedule.options import SETTLED
from twin.study import interval
from twin.study.compared import checked, compared
from twin.study.depth import Depths, repeating
from twin.study.fit_for import DEPTHS, SEED
from twin.study.interval import Draws, about, from_draws, from_runs
from twin.study.ladder import rungs
from twin.study.optimise import Found, search, searched
from twin.study.point import Point, Row
from twin.study.whatif import simulated, sweep
from twin.units import format_quantity, unit_of

Part = dict[str, Any]
Answer = Generator[Part | Progress | Waiting, None, None]
DRAWS = 8
LONG_S = 0.4  # of a simulation: before it, a few layers say what comes about
PROMPT = 512  # tokens
US = 1e6


def case(one: ViewCase, usd: float | None, rows: Rows) -> Answer:
    """Speed and its causes; other engines and cost; what it rests on; the ladder; an interval."""
    point = one.point()
    node = point.on_node()
    known = known_error(node, point.spec(), point.chosen())
    soon = yield from _about(point, node, known, rows)
    if soon is not None:
        yield soon
    row = (yield from rows.of([point], "the step", parallel=soon is not None))[0]
    if row.problem:
        yield {"part": "problem", "message": row.problem}
        return
    plan = "default options; the best one is being looked for" if searched(point) else ""
    yield from _answered(point, row, usd, plan)
    yield {"part": "rests", "numbers": _rests(node, row)}
    yield from _ladder(point, rows)
    yield from _between(point, row, rows)
    if searched(point):
        yield from _by_the_best_plan(point, usd, rows)


def _by_the_best_plan(point: Point, usd: float | None, rows: Rows) -> Answer:
    """Speed, engines and interval once more, by the plan that `twin simulate` takes."""
    found = yield from _best(point, rows)
    best = found.best.way.of(point)
    (row,) = yield from rows.of([best], "the step of the best plan")
    why = found.best.only_simulated
    plan = f"the best of {found.simulated}: {found.best.way}"
    yield from _answered(best, row, usd, f"{plan}; in the simulator only: {why}" if why else plan)
    yield {"part": "rests", "numbers": _rests(best.on_node(), row)}
    yield from _between(best, row, rows)


def _between(point: Point, row: Row, rows: Rows) -> Answer:
    """The interval: of held-out runs, else of draws."""
    node = point.on_node()
    known = known_error(node, point.spec(), point.chosen())
    if known is not None:
        yield _interval(*known.interval(row.tokens_per_s), from_runs(known))
        return
    speeds = yield from _draws(point, node, row, rows)
    if speeds:
        new = first_error(node, point.spec(), point.chosen())
        low, high = about(row.tokens_per_s, speeds, new)
        yield _interval(low, high, from_draws(len(speeds)))


def _answered(point: Point, row: Row, usd: float | None, plan: str) -> Answer:
    """The speed by one plan, and other engines next to it."""
    node = point.on_node()
    known, rates = known_error(node, point.spec(), point.chosen()), rates_of(node, usd)
    ends = known.interval(row.tokens_per_s) if known else None
    yield _speed(point, node, row, rates, ends) | {"plan": plan}
    yield {"part": "engines"} | _engines(point, node, row, rates, ends)


def _best(point: Point, rows: Rows) -> Steps[Found]:
    """The best plan, its points computed like all others."""
    steps = search(point)
    try:
        points = next(steps)
        while True:
            found = yield from rows.of(points, "plans")
            points = steps.send(found)
    except StopIteration as end:
        best: Found = end.value
        return best


def _about(point: Point, node: Node, known: KnownError | None, rows: Rows) -> Steps[Part | None]:
    """The speed of a deep model from two of its depths; None where all of it takes no longer."""
    spec = point.spec()
    depths = None if rows.known(point) else repeating(spec)
    if depths is None:
        return None
    deeper_first, plan = depths.short(point)[::-1], replace(point, steps=0)
    ahead = rows.ahead([*deeper_first[1:], plan])
    found = []
    # The deeper one first: what the first simulation of all has to load makes it seem slower, and
    # then an estimate is given where none was needed, but never the other way round.
    for one in deeper_first:
        found += yield from rows.of([one], "a few layers", parallel=False, ahead=ahead)
        # it has all the work that does not grow with the layers, so this is too much
        if found[-1].problem or found[-1].wall_s * spec.layers < LONG_S:
            return None
    more, few = found
    if _whole_s(spec.layers, depths, few.wall_s, more.wall_s) < LONG_S:
        return None
    (whole,) = yield from rows.of([plan], "the plan", parallel=False, ahead=ahead)
    if whole.problem:
        return None
    step_s = depths.line(spec.layers, few.step_s, more.step_s)
    floor_s = depths.line(spec.layers, few.floor_s, more.floor_s)
    tokens_per_s = more.tokens_per_step / (step_s + more.draft_s)
    return {
        "part": "about",
        "title": _title(point, node),
        "tokens_per_s": tokens_per_s,
        "step_s": step_s,
        "floor_tokens_per_s": 1 / floor_s,
        "interval": known.interval(tokens_per_s) if known else None,
        "layers": [depths.shallow, depths.deep, spec.layers],
    }


def _whole_s(layers: int, depths: Depths, few_s: float, more_s: float) -> float:
    """How long a simulation of all layers takes, from those of both depths. Other programs may have
    made either slower, so a layer is given half of its share of the deeper one at least.
    """
    each_s = max((more_s - few_s) / (depths.deep - depths.shallow), more_s / depths.deep / 2)
    return more_s + (layers - depths.deep) * each_s


def swept(view: View, rows: Rows) -> Answer:
    """Every combination of the axes' values, about the first case."""
    axes = view.axes()
    point = view.cases[0].point()
    cells = list(sweep(point, axes).cells())
    found = yield from rows.of([cell.point for cell in cells], "points")
    yield {
        "part": "sweep",
        "axes": [{"name": axis.name, "values": list(axis.values)} for axis in axes],
        "cells": [
            {
                "at": list(at),
                "tokens_per_s": None if row.problem else row.tokens_per_s,
                "floor_tokens_per_s": None if row.problem else 1 / row.floor_s,
                "problem": row.problem,
            }
            for at, row in zip(product(*(axis.values for axis in axes)), found, strict=True)
        ],
    }


def stages(view: View) -> Answer:
    """Stage by stage: of one case, or of the first two side by side."""
    yield Progress("stages", 0, len(view.cases[:2]))
    sides = []
    for one in view.cases[:2]:
        result = simulated(one.point())
        sides.append(
            {stage.name: (stage.kind, stage.seconds, stage.dominant) for stage in result.stages}
        )
        yield Progress("stages", len(sides), len(view.cases[:2]))
    first, other = sides[0], sides[-1]
    names = list(first) + [name for name in other if name not in first]
    yield {
        "part": "stages",
        "sides": len(sides),
        "stages": [
            {
                "name": name,
                "kind": (first.get(name) or other[name])[0],
                "us": [side[name][1] * US if name in side else None for side in sides],
                "mostly": [side[name][2] if name in side else "" for side in sides],
            }
            for name in names
        ],
    }


def _speed(
    point: Point, node: Node, row: Row, rates: Rates, ends: tuple[float, float] | None
) -> Part:
    return {
        "part": "speed",
        "title": _title(point, node),
        "tokens_per_s": row.tokens_per_s,
        "total_tokens_per_s": row.total_tokens_per_s,
        "step_s": row.step_s,
        "floor_tokens_per_s": 1 / row.floor_s,
        "model_floor_tokens_per_s": 1
        / model_floor_s(point.case().plan(), row.floor_s, row.bytes_per_step),
        "stream_fraction": row.stream_fraction,
        "mbu": row.bytes_per_step / (row.peak_bytes_per_s * row.step_s),
        "interval": ends,
        "measured": _measured(point, node),
        "usd_per_hour": rates.usd_per_hour(node),
        "causes": {cause: s * US for cause, s in row.attribution.items()},
        "kinds": {
            kind: {cause: s * US for cause, s in causes.items()}
            for kind, causes in row.kinds.items()
        },
        "step_times_us": [s * US for s in row.step_times_s] if len(row.step_times_s) > 1 else [],
    }


def _measured(point: Point, node: Node) -> Part | None:
    """A run on record of the same model on this very node."""
    run = None if point.settings else step_at(point.case().plan(), node)
    if run is None:
        return None
    return {"tokens_per_s": run.tokens_per_s, "context": run.context, "record": run.record}


def _title(point: Point, node: Node) -> str:
    return f"{point.spec().name} on {node.gpus} x {node.device.title}"


def _engines(
    point: Point, node: Node, row: Row, rates: Rates, ends: tuple[float, float] | None
) -> Part:
    chosen = dict(point.options)
    plan = point.case().plan()
    assert plan.spec is not None
    found = compared(
        plan.spec,
        node,
        plan.options.context,
        row.tokens_per_s,
        rates,
        sequences=row.sequences,
        interval=ends,
        prompt_s=_prompt_s(plan, node),
        others=not {"weight_dtype", "layers"} & chosen.keys(),
    )
    said = checked() if len(found.rows) > 1 else ""
    return found.json() | {
        "said": said,
        "prompt": PROMPT,
        "options": [
            [name, getattr(value, "value", value), name in chosen]
            for name in Options.__dataclass_fields__
            if (value := getattr(plan.options, name)) is not None
            and (name in chosen or name in SETTLED or name in ("context", "handoff", "execution"))
        ],
    }


def _prompt_s(plan: Plan, node: Node) -> float | None:
    if not node.device.teams:
        return None
    try:
        return prompt_time(plan, node, min(PROMPT, plan.options.max_context)).seconds
    except TwinError:
        return None


def _rests(node: Node, row: Row) -> list[list[str]]:
    """Path, kind, value, range and source; those that nobody measured come first."""
    order = [Kind.ASSUMED, Kind.UNBOUND, Kind.VENDOR, Kind.THIRD_PARTY, Kind.FITTED]
    found = []
    for path, number in numbers(node).items():
        soft = number.kind in (Kind.ASSUMED, Kind.UNBOUND)
        if soft and path not in row.assumed:
            continue  # this plan does not touch it
        unit = unit_of(path.rsplit(".", 1)[-1])
        low, high = (format_quantity(end, unit) for end in range_of(number))
        place = order.index(number.kind) if number.kind in order else len(order)
        said = "" if low == high else f"{low} .. {high}"
        value = format_quantity(number.value, unit)
        name = path.removeprefix("device.")
        found.append((place, [name, number.kind.value, value, said, number.source]))
    return [line for _, line in sorted(found, key=lambda item: item[0])]


def _ladder(point: Point, rows: Rows) -> Answer:
    """From launches to the whole monokernel, the levels in tokens per second."""
    try:
        steps = rungs(point)
        found = yield from rows.of([one for _, one in steps], "ladder")
    except TwinError as error:
        yield {"part": "ladder", "rungs": [], "problem": str(error)}
        return
    levels = [
        [name, row.tokens_per_s, row.step_s * US]
        for (name, _), row in zip(steps, found, strict=True)
        if not row.problem
    ]
    yield {"part": "ladder", "rungs": levels, "problem": ""}


def _interval(low: float, high: float, rests: str) -> Part:
    return {"part": "interval", "low": low, "high": high, "rests": rests}


def _draws(point: Point, node: Node, row: Row, rows: Rows) -> Steps[list[float]]:
    """Speeds of draws of the node's numbers, from models of a few layers."""
    depths = Depths(*DEPTHS)
    varied = [
        point,
        *(point.with_settings(*one) for one in interval.settings(node, Draws(DRAWS, SEED))),
    ]
    short = [depths.short(one) for one in varied]
    found = iter((yield from rows.of([one for shorts in short for one in shorts], "interval")))
    times = []
    for one, shorts in zip(varied, short, strict=True):
        of = tuple(next(found) for _ in shorts)
        times.append(0.0 if any(part.problem for part in of) else depths.extended(one, of))
    base, *drawn = times
    return [row.tokens_per_s * base / time for time in drawn if time and base]
